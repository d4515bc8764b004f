"""Steps of training at several layouts, in this session's processes; each family of models."""

import itertools
import json

import pytest
import torch
import torch.distributed as dist

from tests.bitwise.training import KINDS, SMALL_KINDS
from tpfuse.models import GPT, Bert, BertConfig, Classifier
from tpfuse.models.classify import named_in
from tpfuse.sequence_parallel.forms import leafwise
from tpfuse.tools.bits.command import MakeModel, random_batches
from tpfuse.tools.bits.layouts import COLUMNS, Layout, compare


def _compared(world, make, layouts, bitwise, steps):
    return compare(make, random_batches(make.config, 3, 13, steps, classifier=make.classifier), layouts, bitwise)


def _in_order(world, make, layouts):
    """Row-parallel GEMMs undivided: a fault of one op."""
    leaves, leafwise.row_fwd = leafwise.row_fwd, lambda x, w, leaf, tile: x @ w.t()
    try:
        return _compared(world, make, layouts, 8, 2)
    finally:
        leafwise.row_fwd = leaves


def test_layouts(ranks):
    make = MakeModel(KINDS["gpt2 odd"], None, torch.float32, "fastest")
    layouts = [Layout(1, True), Layout(2, True)]
    bits, _ = ranks(2, _compared, make, layouts, 8, 2)
    assert bits.same and str(bits).endswith("the same bits at every layout") and [r.layout for r in bits] == layouts
    for row in bits:
        assert all(equal == count > 0 for equal, count in row.counts().values()) and not row.skipped
        assert row.counts()["loss"] == (2, 2) and sum(n for _, n in row.counts().values()) == len(row.rows)
    assert set(bits[0].counts()) == set(COLUMNS)


@pytest.mark.parametrize(
    "kind, head",
    [
        ("gpt2", Classifier(3, per="token")),  # whose masks leave zeros of either sign
        ("gpt2", Classifier(1)),
        ("bert odd", Classifier(3, problem_type="multi_label_classification")),
    ],
    ids=["tokens", "a number a sequence", "labels a sequence"],
)
def test_a_directory_of_a_classifier(ranks, tmp_path, kind, head):
    config = KINDS[kind]
    model = Bert if isinstance(config, BertConfig) else GPT
    model(config, classifier=head).save_pretrained(tmp_path)
    stored = named_in(json.loads((tmp_path / "config.json").read_text()), config.hf)
    assert (stored.num_labels, stored.per, stored.problem_type) == (head.num_labels, head.per, head.problem_type)
    make = MakeModel(config, tmp_path, torch.float32, "fastest", classifier=stored)
    bits, _ = ranks(2, _compared, make, [Layout(2, True)], 8, 1)
    assert bits.same and bits[0].counts()["loss"] == (1, 1)


def _new_groups(world, make):
    counts = []
    for _ in range(2):
        _compared(world, make, [Layout(2)], 8, 1)
        counts.append(dist.get_pg_count())
    return counts


def test_groups_are_made_once(ranks):
    """A group keeps threads, and a bench compares hundreds of models in one process."""
    (first, second), _ = ranks(2, _new_groups, MakeModel(KINDS["gpt2"], None, torch.float32, "fastest"))
    assert first == second


@pytest.mark.slow
def test_a_fault_is_named(ranks):
    make = MakeModel(KINDS["gpt2"], None, torch.float32, "smallest")
    bits, _ = ranks(2, _in_order, make, [Layout(2)])
    (row,) = bits
    assert not bits.same and row.first_difference.name == "blocks.0.attention.out linear_exchange"
    values = row.json()
    assert values["size"] == 2 and values["first"]["differ"] > 0 and values["loss"][1] == 2
    assert str(bits).endswith("bits differ")


# ---- every family ----


@pytest.mark.slow
@pytest.mark.parametrize("name, dtype", [*zip(SMALL_KINDS, itertools.cycle((torch.float32, torch.bfloat16)))])
def test_every_family(ranks, name, dtype):
    """One step, for what it starts from is the same at every layout, and its weights are compared."""
    make, layouts = MakeModel(SMALL_KINDS[name], None, dtype, "fastest"), [Layout(2), Layout(4, True)]
    bits, *_ = ranks(4, _compared, make, layouts, 8, 1)
    assert bits.same and [row.layout for row in bits] == layouts, str(bits)
