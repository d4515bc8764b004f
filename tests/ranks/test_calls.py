"""Ranks in different calls: one ValueError on every rank that names the calls, no abort, and the group goes on.

Spans: tpfuse/ranks/messages.py and the functions that begin with a message of its kind.
"""

import re

import pytest
import torch
import torch.distributed as dist

import tpfuse
from tests.common import make_tp
from tests.models.common import GPT_CONFIG, batch
from tpfuse import TensorParallel, add_lora, clip_grad_norm_, save_checkpoint
from tpfuse.collectives import reduce
from tpfuse.layers import TransformerBlock, VocabParallelEmbedding
from tpfuse.models import GPT

X = torch.arange(4 * 8, dtype=torch.float32).view(4, 8)
BATCH = batch(GPT_CONFIG)


class Here:
    """What the calls are made on."""

    def __init__(self, world, folder):
        self.tp, self.folder = make_tp(world, False), folder
        self.model, self.other = GPT(GPT_CONFIG, tp=self.tp), GPT(GPT_CONFIG, tp=self.tp)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.matrices = tpfuse.WholeMatrices(self.model.blocks)
        self.model(**BATCH).loss.backward()
        self.model.generate(BATCH["input_ids"][:1], max_new_tokens=2)
        clip_grad_norm_(self.model, 1.0)


CALLS = {  # what is called, and its name in the error
    "forward": (lambda h: h.model(**BATCH), "GPT.forward"),
    "generate": (lambda h: h.model.generate(BATCH["input_ids"], max_new_tokens=2), "generate"),
    "model": (lambda h: GPT(GPT_CONFIG, tp=h.tp), "GPT.__init__"),
    "layer": (lambda h: VocabParallelEmbedding(50, 8, tp=h.tp), "VocabParallelEmbedding.__init__"),
    "block": (lambda h: TransformerBlock(8, 2, tp=h.tp), "TransformerBlock.__init__"),
    "tp": (lambda h: TensorParallel(h.tp.group), "TensorParallel.__init__"),
    "add_lora": (lambda h: add_lora(h.model, rank=2, alpha=4), "add_lora"),
    "clip": (lambda h: clip_grad_norm_(h.model, 1.0), "clip_grad_norm_"),
    "save": (lambda h: save_checkpoint(h.folder, h.model, h.optimizer, step=1), "save_checkpoint"),
    "load": (lambda h: tpfuse.load_checkpoint(h.folder, h.model), "load_checkpoint"),
    "pretrained": (lambda h: GPT.from_pretrained(h.folder, tp=h.tp), "GPT.from_pretrained"),
    "save_pretrained": (lambda h: h.model.save_pretrained(h.folder / "hf"), "GPT.save_pretrained"),
    "collective": (lambda h: reduce(X, h.tp), "reduce"),
    "replicas": (lambda h: tpfuse.check_replicas(h.model, [h.optimizer]), "check_replicas"),
    "gather": (lambda h: h.matrices.gather_gradients(), "WholeMatrices.gather_gradients"),
}
PAIRS = [(a, b) for i, a in enumerate(CALLS) for b in list(CALLS)[i + 1 :]]


def pairs(world, folder, names):
    """Each rank makes its call of a pair -> the words of the errors; after each pair both make one call together."""
    here, said = Here(world, folder), []
    for i, mine in enumerate(names):
        try:
            CALLS[mine[world.rank]][0](here)
            said.append("")
        except ValueError as error:
            said.append(re.sub("^(save|load)_checkpoint: ", "", str(error)))
        here.other(**BATCH)
        reduce(torch.ones(1, i + 1), here.tp)
        dist.barrier()
    return said


def check(said, names):
    for mine, *texts in zip(names, *said, strict=True):
        assert texts[0] == texts[1] and "in the background" not in texts[0], (mine, texts)  # where nothing was saved
        for rank, call in enumerate(mine):
            assert f"rank {rank} is in {CALLS[call][1]}" in texts[0], (mine, texts)


def test_two_calls_meet_in_an_error_that_names_both(ranks, tmp_path):
    some = PAIRS[::9]
    check(ranks(2, pairs, tmp_path, some), some)


@pytest.mark.slow
def test_each_two_calls(ranks, tmp_path):
    both = PAIRS + [pair[::-1] for pair in PAIRS]
    check(ranks(2, pairs, tmp_path, both), both)
