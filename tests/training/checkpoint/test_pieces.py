"""One layout in the file at any number of ranks: a checkpoint crosses the border of as many ranks as kv heads, and
comes back bit for bit.

Spans: tpfuse/training/checkpoint/ and Origin of tpfuse/layers/spec.py, which says where a part lies in the whole.
"""

import json
from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from tests.common import assert_equal
from tests.models.common import STEP_CONFIG, batch, whole
from tests.training.checkpoint.common import state
from tpfuse import OkTopk, TensorParallel, add_lora, as_dtensor, load_checkpoint, param_groups, save_checkpoint
from tpfuse.models import GPT
from tpfuse.training.ok_topk import Unit

LLAMA = dict(family="llama", norm="rms", gated=True, activation="silu", rope=dict(rope_theta=1e4))
CONFIG = replace(STEP_CONFIG, **LLAMA, num_kv_heads=1)
CASES = {  # kv heads are as many as half the ranks
    "one kv head": (2, CONFIG, ""),
    "two kv heads": (4, replace(CONFIG, num_kv_heads=2), ""),
    "norms of all heads": (2, replace(CONFIG, qk_norm=True, qk_norm_all=True), ""),
    "adapters": (2, CONFIG, "lora"),
    "adapters of k and v": (2, CONFIG, "lora k_proj v_proj"),
    "FSDP": (4, CONFIG, "fsdp"),
    "a hook": (2, CONFIG, "hook"),
}


class Run:
    """A model with its optimizer, and what else a case has."""

    def __init__(self, world, config, kind):
        sharded = kind == "fsdp" and world is not None and world.size > 1
        mesh = None if world is None else world.mesh(2, 2) if sharded else world.mesh(1, world.size)
        self.model = GPT(config, tp=TensorParallel(None if mesh is None else mesh["tp"]))
        if kind.startswith("lora"):
            targets = dict(targets=kind.split()[1:]) if " " in kind else {}
            add_lora(self.model, rank=2, alpha=4, **targets)
        if sharded:
            as_dtensor(self.model, mesh["tp"])
            for module in (*self.model.blocks, self.model):
                fully_shard(module, mesh=mesh["dp"])
        self.optimizer = torch.optim.AdamW(param_groups(self.model, 0.1), lr=1e-3)
        self.hook = OkTopk(0.1, group=mesh["dp"].get_group()) if kind == "hook" else None

    def step(self):
        self.model(**batch(CONFIG, size=4), step=0, first_sample=0).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def wholes_of(model):
    """Every parameter as a full tensor, q and kv joined as at one rank."""
    tensors, joined = whole(model), {}
    for name, x in tensors.items():
        head, _, leaf = name.rpartition(".")
        if leaf in ("q", "q_bias", "B_q"):
            kv = tensors[f"{head}.{leaf.replace('q', 'kv')}"]
            of = {"q": "weight", "q_bias": "bias", "B_q": "B"}[leaf]
            joined[f"{head}.{of}"] = torch.cat([x.view(len(kv), -1, *x.shape[1:]), kv], 1)
        elif leaf == "B_kv" and f"{head}.B_q" not in tensors:
            joined[f"{head}.B"] = x
        elif leaf not in ("kv", "kv_bias", "B_kv"):
            joined[name] = x
    return joined


def written(world, folder, config, kind):
    """-> parameters and state of a run at one rank, which is saved after two steps"""
    run = Run(world, config, kind)
    for _ in range(2):
        run.step()
    if run.hook is not None:
        parameters = list(run.model.parameters())
        run.hook.units = [Unit(parameters, torch.randn(sum(p.numel() for p in parameters)))]
    save_checkpoint(folder / "first", run.model, run.optimizer, step=2, hook=run.hook)
    return wholes_of(run.model), state(run.model, run.optimizer)


def crossed(world, folder, config, kind):
    """Loads what one rank wrote, saves it again, takes a step and saves that -> parameters as loaded"""
    run = Run(world, config, kind)
    assert load_checkpoint(folder / "first", run.model, run.optimizer, hook=run.hook) == (2, None)
    loaded = wholes_of(run.model)
    save_checkpoint(folder / "again", run.model, run.optimizer, step=2, hook=run.hook)
    run.step()
    save_checkpoint(folder / "stepped", run.model, run.optimizer, step=3, hook=run.hook)
    return loaded


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_crosses_the_border_of_kv_heads_and_comes_back(ranks, tmp_path, case):
    size, config, kind = CASES[case]
    ((weights, before),) = ranks(1, written, tmp_path, config, kind)
    for loaded in ranks(size, crossed, tmp_path, config, kind):
        assert_equal(loaded, weights)
    run = Run(None, config, kind.replace("hook", ""))
    load_checkpoint(tmp_path / "again", run.model, run.optimizer)
    assert_equal(state(run.model, run.optimizer), before)
    first, again = (
        json.loads((tmp_path / name / "step-00000002" / "meta.json").read_text()) for name in ("first", "again")
    )
    for key in ("tensors", "param_groups"):
        if kind != "hook" or key != "tensors":
            assert first[key] == again[key]
    other = Run(None, config, kind.replace("hook", ""))
    load_checkpoint(tmp_path / "stepped", other.model, other.optimizer)
    run.step()
    for name, x in wholes_of(run.model).items():  # the same step as over the ranks
        assert torch.allclose(wholes_of(other.model)[name], x, atol=2e-4), name
