"""Several parameters in one tensor of a file, and several tensors of a parameter: a rank reads its own, and writes them
whole."""

from dataclasses import replace

import pytest
import torch

from tests.common import fake_tp
from tests.models.families.test_llama_like import config_of
from tpfuse import TensorParallel
from tpfuse.layers.spec import Spec
from tpfuse.models.families.names import experts
from tpfuse.models.families.phi3 import phi3_sources
from tpfuse.models.files.source import written

E, D, HEADS, GROUPS = 2, 3, 8, 2  # q, k and v stand one after another
ROWS = torch.arange((HEADS + 2 * GROUPS) * E * D).view(-1, D)
SOURCES, NAME = phi3_sources(config_of("phi3", GROUPS)), "layers.0.self_attn.qkv_proj.weight"
WEIGHT, Q, KV = (SOURCES[f"blocks.0.attention.qkv.{leaf}"] for leaf in ("weight", "q", "kv"))
FUSED, APART = Spec((GROUPS, HEADS // GROUPS + 2, E, D), 0, 0.0), Spec((HEADS, E, D), 0, 0.0)
KV_APART = Spec((GROUPS, 2, E, D), 0, 0.0)


class Noted:
    """A tensor that notes which of its rows are read."""

    def __init__(self):
        self.rows = []

    def __getitem__(self, index):
        self.rows += range(*index[0].indices(len(ROWS)))
        return ROWS[index]


def test_what_is_read_is_written():
    full, q, kv = (
        s.read(lambda name: ROWS, spec, TensorParallel()) for s, spec in ((WEIGHT, FUSED), (Q, APART), (KV, KV_APART))
    )
    theirs = ROWS.split([HEADS * E, GROUPS * E, GROUPS * E])
    assert torch.equal(q.flatten(0, 1), theirs[0]) and torch.equal(full[:, :-2].flatten(0, 2), theirs[0])
    for i, part in enumerate(theirs[1:]):
        assert torch.equal(kv[:, i].flatten(0, 1), part) and torch.equal(full[:, i - 2].flatten(0, 1), part)
    for parameters in ([(WEIGHT, full)], [(Q, q), (KV, kv)], [(KV, kv), (Q, q)]):
        ((name, again),) = written(parameters)
        assert name == NAME and torch.equal(again, ROWS)


@pytest.mark.parametrize("R", [2, 4])
def test_a_rank_reads_its_own_rows(R):
    """Of 2 kv heads over 4 ranks, each is read by two."""
    some = [(WEIGHT, FUSED)] if R == 2 else [(Q, APART), (KV, replace(KV_APART, copies=2, leaf_copies=2))]
    for rank in range(R):
        noted = Noted()
        for source, spec in some:
            source.read(lambda name, noted=noted: noted, spec, fake_tp(R, rank))
        group = rank * GROUPS // R
        own = range(rank * HEADS // R * E, (rank + 1) * HEADS // R * E)
        kv = [(HEADS + i * GROUPS + group) * E + e for i in range(2) for e in range(E)]
        assert sorted(noted.rows) == [*own, *kv]


def test_a_part_alone_is_no_tensor():
    with pytest.raises(ValueError, match=f"{NAME} is not all there"):
        list(Q.write(torch.zeros(APART.shape)))


# ---- experts, apart and merged ----

COUNT, F = 4, 5
GATES, UPS = (torch.arange(COUNT * F * D).view(COUNT, F, D) + 1000 * i for i in range(2))
DOWNS = torch.arange(COUNT * D * F).view(COUNT, D, F)
APART_TENSORS = {f"moe.experts.{e}.gate.weight": GATES[e] for e in range(COUNT)}
APART_TENSORS |= {f"moe.experts.{e}.up.weight": UPS[e] for e in range(COUNT)}
APART_TENSORS |= {f"moe.experts.{e}.down.weight": DOWNS[e] for e in range(COUNT)}
MERGED_TENSORS = {"mlp.experts.gate_up_proj": torch.cat([GATES, UPS], 1), "mlp.experts.down_proj": DOWNS}
EXPERTS = experts("moe", "mlp", COUNT, ("gate", "up", "down"))
FC1, FC2 = Spec((COUNT, F, 2, D), 0, 0.0), Spec((COUNT, D, F), 0, 0.0)


def noting(tensors, noted):
    """Reads tensors lazily, and notes the experts of which something is read."""

    class Lazy:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, index):
            found = tensors[self.name][index]
            number = self.name.split(".")[2]
            whole = range(COUNT) if index is ... else range(*(index[0].indices(COUNT)))
            noted.update([int(number)] if number.isdigit() else whole)
            return found

    return Lazy


@pytest.mark.parametrize("R, rank", [(1, 0), (2, 0), (2, 1), (4, 3)])
@pytest.mark.parametrize("tensors", [APART_TENSORS, MERGED_TENSORS], ids=["apart", "merged"])
def test_a_rank_reads_its_own_experts(tensors, R, rank):
    own, noted = range(rank * COUNT // R, (rank + 1) * COUNT // R), set()
    fc1, fc2 = (
        EXPERTS[leaf].found_by(tensors).read(noting(tensors, noted), spec, fake_tp(R, rank))
        for leaf, spec in (("fc1", FC1), ("fc2", FC2))
    )
    assert noted == set(own)
    mine = slice(own.start, own.stop)
    assert torch.equal(fc1, torch.stack([GATES[mine], UPS[mine]], 2)) and torch.equal(fc2, DOWNS[mine])


def test_experts_are_written_apart():
    fc1 = torch.stack([GATES, UPS], 2)
    stored = dict(written([(EXPERTS["fc1"], fc1), (EXPERTS["fc2"], DOWNS)]))
    assert stored.keys() == APART_TENSORS.keys()
    assert all(torch.equal(stored[name], APART_TENSORS[name]) for name in stored)


def test_which_layout_is_read():
    """Its own where any of it is there, so that what lacks is named; the other one where that alone is."""
    source = EXPERTS["fc2"]
    assert source.found_by(APART_TENSORS | MERGED_TENSORS) is source and source.found_by(()) is source
    assert source.found_by(["moe.experts.3.down.weight"]) is source
    assert source.found_by(MERGED_TENSORS).names == ("mlp.experts.down_proj",)
