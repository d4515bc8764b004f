"""Several parameters in one tensor of a file: a rank reads its own rows, and the tensor is written whole."""

from dataclasses import replace

import pytest
import torch

from tests.common import fake_tp
from tests.models.families.test_llama_like import config_of
from tpfuse import TensorParallel
from tpfuse.layers.spec import Spec
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
