"""The bench of bits: small runs of it, and what it prints where bits or bytes differ."""

import json

import pytest

from bench.bits import arguments, cost, rows
from bench.bits.__main__ import main
from bench.bits.kinds import ALL_KINDS, LAYOUTS


def test_all_is_the_default():
    args = arguments([])
    assert args.kind == list(ALL_KINDS) and args.dtype == ["bf16", "fp32"] and args.saving == ["fastest", "smallest"]
    assert arguments(["--kind", "llama"]).kind == ["llama"]


def test_tables():
    counts = dict(loss=(2, 2), outputs=(8, 9), gradients=(0, 9), norm=(2, 2), weights=(0, 4))
    row = rows.Row("llama", "fp32", "fastest", LAYOUTS[1], counts, "op a: 1 of 2 elements differ, largest 1 ulp")
    same = row._replace(counts=dict(loss=(2, 2)), difference="")
    assert not row.same and same.same
    printed = rows.text([row, same])
    assert "8/9" in printed and "op a: 1 of 2" in printed and printed.endswith("1 of 2 layouts have the same bits")
    measured = cost.Cost(512, "bf16", 2, seconds=[1.0, 2.0, 3.0], ratio=[1.0, 1.1, 1.2], sent=(10, 34), expected=34)
    assert cost.text([measured]).splitlines()[2].split() == "512 bf16 2 2.000 1.10 1.00 to 1.20 10 34 34".split()


@pytest.mark.slow
def test_a_run(capsys, tmp_path):
    argv = ["--kind", "llama", "--dtype", "fp32", "--saving", "fastest", "--json", str(tmp_path / "bits.json")]
    assert main(argv) == 0
    assert f"{len(LAYOUTS)} of {len(LAYOUTS)} layouts have the same bits" in capsys.readouterr().out
    values = json.loads((tmp_path / "bits.json").read_text())
    assert [row["layout"] for row in values] == list(map(str, LAYOUTS))
    assert all(equal == count > 0 for row in values for equal, count in row["counts"].values())


@pytest.mark.slow
def test_the_bytes_are_as_expected(capsys):
    """The exit code says so, and is 1 if another formula is expected."""
    assert main(["--cost", "--width", "256", "--dtype", "fp32", "--rounds", "2"]) == 0
    (one, two) = (line.split() for line in capsys.readouterr().out.splitlines()[2:])
    assert one[-3:] == ["0", "0", "0"] and int(two[-2]) - int(two[-3]) == 16 * 256 * 3
