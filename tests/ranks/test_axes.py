"""What the table of docs/faults.md says is compared, each row over each axis: one ValueError on every rank, or the
reason why there is nothing to compare.

Spans: tpfuse/ranks/agreement.py and everything that compares by it.
"""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tpfuse
from tests.models.common import STEP_CONFIG, batch
from tpfuse import OkTopk, TensorParallel, data_parallel, ok_topk_hook, save_checkpoint
from tpfuse.collectives import reduce
from tpfuse.layers import TransformerBlock
from tpfuse.models import GPT
from tpfuse.pipeline import schedule
from tpfuse.pipeline.copies import copied

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
# stages, replicas, context- and tensor-parallel ranks
AXES = {"tp": (1, 1, 1, 2), "cp": (1, 1, 2, 1), "dp": (1, 2, 1, 1), "pp": (2, 1, 1, 1)}
CONFIG = replace(STEP_CONFIG, num_layers=2)
CALL = batch(CONFIG, size=2)


class Rank(NamedTuple):
    """A rank of a world over one axis; ``odd``: the one that does otherwise."""

    axis: str
    mesh: DeviceMesh
    odd: bool
    folder: Path

    def tp(self, **options):
        """This rank's tensor- and context-parallel ranks."""
        return TensorParallel(self.mesh["tp"], cp=self.mesh["cp"], **options)

    def model(self, make=GPT, config=CONFIG, **options):
        """This rank's model, of its replica or stage."""
        options = dict(tp=self.tp()) | options
        if self.mesh["dp"].size() > 1:
            options["dp"] = self.mesh["dp"]
        if self.mesh["pp"].size() > 1:
            options["stage"] = self.mesh["pp"].get_local_rank(), 2, "1f1b"
        return make(config, **options)

    def schedule(self, model, micro_batches=2):
        return schedule(model, self.mesh["pp"], "1f1b", micro_batches)

    def step(self, model, between=lambda model: None, call=CALL):
        """A step; ``between`` is what the odd rank does before it."""
        if self.axis == "pp":
            pipeline = self.schedule(model)
            run = lambda: pipeline.step(call["input_ids"], labels=call["labels"])
        else:
            replica = data_parallel(model, self.mesh["dp"]) if self.axis == "dp" else model
            run = lambda: replica(**call).loss.backward()
        if self.odd:
            between(model)
        run()


def other(rank, call=CALL):
    """A batch that only the odd rank has otherwise."""
    return {name: t.flip(1) if rank.odd else t for name, t in call.items()}


def turned(model):
    """A value that several ranks hold is another: of a norm, or of the tied embedding of a stage."""
    norms = (p for name, p in model.named_parameters() if "norm" in name)
    next(iter(copied(model).values() or norms)).data.view(-1)[0] += 1


def seeded(model):
    model.seed = 7


def pretrained(rank):
    folder = rank.folder / str(int(rank.odd))
    return rank.model(lambda config, **options: GPT.from_pretrained(folder, **options))


def ok_topk(rank):
    ddp = data_parallel(rank.model(), rank.mesh["dp"])
    ddp.register_comm_hook(OkTopk(0.1 if rank.odd else 0.05, group=rank.mesh["dp"].get_group()), ok_topk_hook)
    ddp(**CALL).loss.backward()


def checked(rank):
    model = rank.model()
    with tpfuse.checking():
        rank.step(model, turned)


def saved(rank):
    model = rank.model()
    if rank.odd:
        turned(model)
    save_checkpoint(rank.folder / "run", model, torch.optim.SGD(model.parameters(), lr=0.1), step=1)


def staged(rank):
    rank.schedule(rank.model(), 4 if rank.odd else 2)


SCHEDULES = "`pipeline.schedule(...)`, a pipeline's step"
ALONE = "it knows no such ranks"
OWN = "each replica has samples of its own; what decides the call is compared in the step"
# The row's first words: {axis: (what the ranks do, words of the error), or why nothing is compared}
ROWS = {
    "`TensorParallel(...)`": {
        "tp": (lambda r: r.tp(sequence_parallel=r.odd), "TensorParallel: sequence_parallel"),
        "cp": (lambda r: r.tp(cp_kind="keys" if r.odd else "heads"), "TensorParallel: cp_kind"),
        "dp": (lambda r: r.model(tp=r.tp(bitwise=2 if r.odd else None)), "bitwise"),
        "pp": (lambda r: r.schedule(r.model(tp=r.tp(bitwise=2 if r.odd else None))), "bitwise"),
    },
    "a model's constructor": {
        "tp": (lambda r: r.model(seed=int(r.odd)), "GPT: seed"),
        "cp": (lambda r: r.model(seed=int(r.odd)), "GPT: seed"),
        "dp": (lambda r: r.model(seed=int(r.odd)), "GPT: seed"),
        "pp": (lambda r: r.schedule(r.model(seed=int(r.odd))), "seed"),
    },
    "`from_pretrained`": {
        "tp": (pretrained, "the weights in the files"),
        "cp": (pretrained, "the weights in the files"),
        "dp": (pretrained, "the weights in the files"),
        "pp": (lambda r: r.schedule(pretrained(r)), "the weights in the files"),
    },
    "a model's call, `generate`": {
        "tp": (lambda r: r.step(r.model(), call=other(r)), "GPT: input_ids"),
        "cp": (lambda r: r.step(r.model(), call=other(r)), "GPT: input_ids"),
        "dp": OWN,
        "pp": (lambda r: r.step(r.model(), call=other(r)), "input_ids"),
    },
    SCHEDULES: {
        "tp": (staged, "micro_batches"),
        "cp": (staged, "micro_batches"),
        "dp": (staged, "micro_batches"),
        "pp": (staged, "micro_batches"),
    },
    "replicas under `data_parallel`": {
        "tp": "the row of a call's state",
        "cp": "the row of a call's state",
        "dp": (lambda r: r.step(r.model(), lambda m: m.blocks[0].eval()), "parts in another mode"),
        "pp": "the row of a pipeline's step",
    },
    "a layer of your own model": {
        "tp": (
            lambda r: TransformerBlock(8, 2, tp=r.tp())(torch.ones(4, 8), batch=1 + r.odd),
            "TransformerBlock",
        ),
        "cp": (
            lambda r: TransformerBlock(8, 2, tp=r.tp())(torch.ones(4, 8), batch=1 + r.odd),
            "TransformerBlock: batch",
        ),
        "dp": ALONE,
        "pp": ALONE,
    },
    "`tpfuse.collectives`": {
        "tp": (lambda r: reduce(torch.ones(3 + r.odd), r.tp()), "all_reduce"),
        "cp": (lambda r: reduce(torch.ones(3 + r.odd), r.tp().cp), "same on every context-parallel rank"),
        "dp": ALONE,
        "pp": ALONE,
    },
    "a sparse all-reduce": {
        "tp": (ok_topk, "density"),
        "cp": (ok_topk, "density"),
        "dp": (ok_topk, "density"),
        "pp": "it is a hook of DistributedDataParallel, which takes no stages",
    },
    "a call's state": {axis: (lambda r: r.step(r.model(), seeded), "seed") for axis in AXES},
    "`with tpfuse.checking():`": {axis: (checked, "the same bits") for axis in AXES},
    "`save_checkpoint`": {axis: (saved, "bits") for axis in AXES},
}


def each(world, axis, layout, rows, folder):
    """What each row's difference says on this rank."""
    rank, said = Rank(axis, world.stages(*layout), world.rank == world.size - 1, folder), {}
    for row in rows:
        with pytest.raises(Exception) as caught:
            ROWS[row][axis][0](rank._replace(folder=folder / str(list(ROWS).index(row))))
        said[row] = f"{caught.type.__name__}: {caught.value}"
        dist.barrier()
    return said


@pytest.mark.parametrize("axis", AXES)
def test_every_row_over_every_axis(ranks, tmp_path, axis):
    for odd in (0, 1):
        GPT(CONFIG, seed=odd).save_pretrained(tmp_path / str(list(ROWS).index("`from_pretrained`")) / str(odd))
    rows = [row for row, axes in ROWS.items() if not isinstance(axes[axis], str)]
    for said in ranks(2, each, axis, AXES[axis], [row for row in rows if row != SCHEDULES or axis == "pp"], tmp_path):
        for row, text in said.items():
            assert text.startswith("ValueError: ") and ROWS[row][axis][1] in text, (row, text)


@pytest.mark.parametrize("axis", ["tp", "cp", "dp"])
def test_schedules_that_differ_over_one_axis_of_two(ranks, tmp_path, axis):
    """The ranks of the other stage know of no difference among themselves, and do not wait for those that do."""
    for said in ranks(4, each, axis, (2, *AXES[axis][1:]), [SCHEDULES], tmp_path):
        assert said[SCHEDULES].startswith("ValueError: pipeline: micro_batches must be the same on every")


def test_every_row_of_the_page_is_here():
    table = PAGE.read_text().partition("| where | what is compared |\n|---|---|\n")[2].partition("\n\n")[0]
    lines = table.splitlines()
    assert len(lines) == len(ROWS) and all(line.startswith(f"| {row}") for line, row in zip(lines, ROWS))
