"""Links of groups in a cluster of levels, presets, and clusters from files."""

import os
import sys
from pathlib import Path

import pytest
import torch

from tpfuse.tools.ledger.machine import Line, Machine, Speeds
from tpfuse.tools.plan.cluster import LINKS, Cluster, Level, preset, read, this_machine
from tpfuse.tools.plan.collectives import Link
from tpfuse.tools.plan.devices import DEVICES

A100 = DEVICES["a100-80gb"]
TWO = Cluster(A100, 64, (Level(8, 230e9, 1e-6), Level(64, 25e9, 1e-5)))
THREE = Cluster(A100, 64, (Level(4, 200e9, 1e-6), Level(8, 60e9, 2e-6), Level(64, 10e9, 1e-5)))


@pytest.mark.parametrize(
    "ranks, stride, bandwidth, latency",
    [
        (8, 1, 230e9, 1e-6),  # tp in a node
        (2, 4, 230e9, 1e-6),  # dp in a node, beside tp of 4
        (4, 4, 50e9, 1e-5),  # two members a node, with a card each
        (16, 1, 200e9, 1e-5),  # a whole node's cards
        (8, 8, 25e9, 1e-5),  # a member a node: its own card
        (2, 32, 25e9, 1e-5),
        (3, 1, 75e9, 1e-5),  # the third group of three is in two nodes
        (1, 1, 230e9, 1e-6),
    ],
)
def test_a_group_has_a_rings_rate(ranks, stride, bandwidth, latency):
    assert TWO.link(ranks, stride) == Link(latency, bandwidth)


def test_each_level_may_be_the_narrowest():
    assert THREE.link(8, 1) == Link(2e-6, 200e9)  # four members a half, 4 x 60 > 200
    assert THREE.link(4, 2) == Link(2e-6, 120e9)
    assert THREE.link(16, 1) == Link(1e-5, 80e9)
    assert THREE.link(16, 4) == Link(1e-5, 20e9)


def test_the_level_that_joins_two_groups():
    assert TWO.joining_levels(4, 2).tolist() == [[0] * 4] * 4
    assert TWO.joining_levels(4, 4).tolist() == [[0, 0, 1, 1]] * 2 + [[1, 1, 0, 0]] * 2  # two groups a node
    assert TWO.joining_levels(8, 8).tolist() == [[int(i != j) for j in range(8)] for i in range(8)]
    assert THREE.joining_levels(4, 4)[0].tolist() == [0, 1, 2, 2]
    assert TWO.joining_levels(3, 6).tolist() == [
        [0, 1, 1],
        [1, 0, 1],
        [1, 1, 0],
    ]


def test_where_each_sends_to_every_other():
    """With 16 ranks over two nodes a rank has seven others beside it and sends to eight by its own card."""
    assert TWO.direct(16, 1) == Link(1e-5, 25e9 * 15 / 8) and TWO.direct(8, 1) == Link(1e-6, 230e9)
    assert TWO.direct(8, 8) == Link(1e-5, 25e9) and TWO.direct(1, 1).bandwidth == 230e9
    assert THREE.direct(8, 1) == Link(2e-6, 60e9 * 7 / 4)


def test_a_group_too_large():
    with pytest.raises(ValueError, match="plan: 16 ranks 8 apart need 128 devices, got 64"):
        TWO.link(16, 8)
    with pytest.raises(ValueError, match="ranks and stride of at least 1, got 0, 8"):
        TWO.link(0, 8)
    with pytest.raises(ValueError, match="plan: 9 groups of 8 need 72 devices, got 64"):
        TWO.joining_levels(9, 8)


@pytest.mark.parametrize("name", DEVICES)
def test_presets(name):
    node, nodes = preset(name, 4), preset(name, 1024)
    assert node.levels[0].ranks == 4 and [level.ranks for level in nodes.levels] == [8, 1024]
    assert node.device is DEVICES[name] and nodes.link(8, 1).bandwidth == pytest.approx(LINKS[name].inside * 230 / 300)
    assert nodes.link(16, 8).bandwidth == LINKS[name].network


def test_presets_that_are_refused():
    for name, devices, message in (
        ("tpu", 8, "device must be one of"),
        ("h100", 12, "devices must fill nodes of 8, got 12"),
        ("h100", 0, "devices must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            preset(name, devices)


def test_this_machine():
    messages = {"all_reduce of 2": Line(2e-4, 0, 1e-9), "all_reduce of 4": Line(6e-4, 0, 0.0)}
    machine = Machine(2, {"float32": {2: Speeds({}, messages, 0.0), 4: Speeds({}, messages, 0.0)}})
    two, four = (this_machine(machine, n, torch.float32) for n in (2, 4))
    assert tuple(two.link(2, 1)) == pytest.approx((1e-4, 1e9, 0)) and four.link(4, 1) == Link(
        pytest.approx(1e-4), float("inf")
    )
    assert this_machine(machine, 1, torch.float32).link(1, 1).latency == 0
    bare = Machine(2, {"float32": {2: Speeds({}, {}, 0.0)}})
    with pytest.raises(ValueError, match="all_reduce over 2 ranks was not calibrated"):
        this_machine(bare, 2, torch.float32)


# ---- from a file ----

FILE = """
device = "a100-80gb"
devices = 64
[[levels]]
ranks = 8
bandwidth = 230e9
latency = 1e-6
[[levels]]
ranks = 64
bandwidth = 25e9
latency = 1e-5
"""
CUSTOM = '[device]\nname = "x"\npeak.float32 = 1e13\nbandwidth = 1e12\nmemory = 64e9\ngemm = 0.6\n'
toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is of Python 3.11")


def reading(path, text):
    path = path / "cluster.toml"
    path.write_text(text)
    return read(path)


@toml
def test_a_file_is_a_cluster(tmp_path):
    assert reading(tmp_path, FILE) == TWO
    custom = reading(tmp_path, FILE.replace('device = "a100-80gb"', "") + CUSTOM)
    assert custom.device.gemm == 0.6 and custom.device.attention == 0.5 and custom.device.peak == {"float32": 1e13}


@toml
@pytest.mark.parametrize(
    "old, new, message",
    [
        ("devices = 64", "", "cluster.toml: needs devices, got device, levels"),
        ("devices = 64", "devices = 64\nname = 3", "knows device, devices, levels, got name"),
        ("devices = 64", "devices = 64.0", "devices must be an integer, got 64.0"),
        ("devices = 64", "devices = true", "devices must be an integer, got True"),
        ("devices = 64", "devices = 32", "ranks of the last level must be all devices=32, got 64"),
        ("ranks = 8", "ranks = 64", "a multiple of those inside it, 64, and more, got 64"),
        ("ranks = 8", "ranks = 7", "a multiple of those inside it, 7, and more, got 64"),
        ("ranks = 8", "", "level 1: needs ranks, got bandwidth, latency"),
        ("ranks = 8", "ranks = 8\ncards = 1", "level 1: knows ranks, bandwidth, latency, got cards"),
        ("25e9", "inf", "level 2: bandwidth must be positive and finite, got inf"),
        ("25e9", "nan", "level 2: bandwidth must be positive and finite, got nan"),
        ("25e9", '"fast"', "level 2: bandwidth must be a number, got 'fast'"),
        ("1e-6", "-1e-6", "level 1: latency must be at least 0 and finite, got -1e-06"),
        ('"a100-80gb"', '"a100"', "device must be a table or one of v100, .*, got 'a100'"),
        ('"a100-80gb"', "3", "device must be a table, got 3"),
        ("devices = 64", "devices = ", "cannot be read as TOML"),
        ('"a100-80gb"', '"h100"\nlevels = []', r"levels must be \[\[levels\]\] tables, got \[\]"),
        ('"a100-80gb"', '"h100"\nlevels = 3', r"levels must be \[\[levels\]\] tables, got 3"),
        # a device of one's own
        ('name = "x"', "name = 3", "device: name must be a string of one printable line, got 3"),
        ('name = "x"', r'name = "\u001b[31mx"', "device: name must be a string of one printable line, got"),
        ("devices = 64", "devices = " + "[" * 900 + "]" * 900, "cannot be read as TOML: maximum recursion depth"),
        ("devices = 64", "devices = " + "[" * 5000, "must hold at most 1000 dots, lists and tables, got 500"),
        ("devices = 64", "a." * 20_000 + "a = 1", "must hold at most 1000 dots, lists and tables, got 2000"),
        ("devices = 64", "#" * (1 << 16), "must be at most 65536 bytes of TOML"),
        ("memory = 64e9", "", "device: needs memory, got"),
        ("memory = 64e9", "memory = 0", "device: memory must be positive and finite, got 0"),
        ("gemm = 0.6", "gemm = 1.6", r"device: gemm must lie in \(0, 1\], got 1.6"),
        ("gemm = 0.6", 'arch = "sm_70"', "device: arch must be one of sm_80, sm_90, gfx942, got 'sm_70'"),
        ("gemm = 0.6", "gem = 0.6", "device: knows name, peak, .*, got gem"),
        ("peak.float32 = 1e13", "peak = 3", "peak must be a table of flop/s by dtype, such as"),
        ("peak.float32", "peak.float33", "peak must be by dtypes such as bfloat16, got 'float33'"),
        ("1e13", "-1", "peak.float32 must be positive and finite, got -1"),
    ],
)
def test_files_that_are_refused(tmp_path, old, new, message):
    text = FILE if old in FILE else FILE.replace('device = "a100-80gb"', "") + CUSTOM
    text = text.split("[[levels]]")[0] if "levels =" in new else text
    with pytest.raises(ValueError, match=message) as error:
        reading(tmp_path, text.replace(old, new, 1))
    assert "\n" not in str(error.value)


@toml
def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match=f"{path} must be a regular file"):
            read(path)


@toml
def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cluster.toml cannot be read as TOML: .*No such file"):
        read(tmp_path / "cluster.toml")
