"""Checkpoints of several optimizers, whole matrices' among them: resumed at any split, and what is refused.

Spans: tpfuse/training/checkpoint/state.py, and the optimizers' part of save.py, load.py and replicas.py.
"""

import functools
import json
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.common import assert_equal, error
from tests.models.common import STEP_CONFIG, batch, default_dtype, whole
from tests.pipeline.common import said
from tests.planted import planted
from tests.training.test_matrices import Shampoo
from tpfuse import KFAC, MainGrad, TensorParallel, WholeMatrices, check_replicas, load_checkpoint, save_checkpoint
from tpfuse.models import GPT
from tpfuse.pipeline import schedule
from tpfuse.training.checkpoint.meta import sealed

F64 = torch.float64
GATED = replace(STEP_CONFIG, num_layers=2, gated=True, num_kv_heads=4)  # every weight of another number of dimensions


def kfac(model):
    first = KFAC(model, lr=0.01, weight_decay=0.1, refresh=2)
    return first, torch.optim.AdamW(first.remaining(model), lr=1e-3)


def matrices(kind, **options):
    def make(model):
        whole_ones = WholeMatrices(model.blocks)
        first = kind(whole_ones.parameters(), lr=0.01, **options)
        first.register_step_pre_hook(whole_ones.gather_gradients)
        return first, torch.optim.AdamW(whole_ones.others(model), lr=1e-3)

    return make


OPTIMIZERS = {"kfac": kfac, "muon": matrices(torch.optim.Muon), "shampoo": matrices(Shampoo)}
LIMITS = {"kfac": 1e-9, "muon": 1e-2, "shampoo": 1e-9}  # Muon iterates in bf16


class Run:
    """A model with two optimizers, at (pp, dp, tp)."""

    def __init__(self, world, layout, kind, dtype=F64):
        mesh = world.stages(*layout)
        stage = None if layout[0] == 1 else (mesh["pp"].get_local_rank(), layout[0], "1f1b")
        with default_dtype(dtype):
            self.model = GPT(GATED, tp=TensorParallel(mesh["tp"]), stage=stage)
        self.pipeline = None if stage is None else schedule(self.model, mesh["pp"], "1f1b", 2)
        self.optimizers = OPTIMIZERS[kind](self.model)

    def steps(self, begin, end):
        for step in range(begin, end):
            call = batch(GATED, size=4, seed=step)
            if self.pipeline is None:
                self.model(**call, step=step).loss.backward()
            else:
                self.pipeline.step(**call, step=step)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.model.zero_grad()


def trained(world, layout, kind, folder, begin, end, save=False, dtype=F64):
    """Trains on from what is there -> the weights that are here."""
    run = Run(world, layout, kind, dtype)
    if begin:
        assert load_checkpoint(folder, run.model, run.optimizers) == (begin, None)
    run.steps(begin, end)
    if save:
        save_checkpoint(folder, run.model, list(run.optimizers), step=end)
    names = dict(run.model.named_parameters()) if layout[0] > 1 else whole(run.model)
    return {name: p.detach().clone() for name, p in names.items()}


ONE, TP2, TP4, STAGES = (1, 1, 1), (1, 1, 2), (1, 1, 4), (2, 1, 1)
RESUMES = [("kfac", TP2, TP2), ("kfac", TP2, ONE), ("kfac", ONE, TP2), ("muon", TP2, TP2), ("shampoo", TP2, ONE)]
MORE = [
    ("kfac", TP2, STAGES),
    ("kfac", STAGES, TP4),
    ("muon", STAGES, TP2),
    ("muon", ONE, TP4),
    ("shampoo", STAGES, TP4),
    ("shampoo", TP2, TP2),
]


@pytest.mark.parametrize("kind, before, after", RESUMES + [pytest.param(*c, marks=pytest.mark.slow) for c in MORE])
def test_resuming_goes_on_where_it_stopped(ranks, tmp_path, kind, before, after):
    """Three steps and two more, of which KFAC refreshes one."""
    size = lambda layout: layout[0] * layout[1] * layout[2]
    exact = ranks(size(before), trained, before, kind, None, 0, 5) if before == after else None
    (one,) = ranks(1, trained, ONE, kind, None, 0, 5)
    ranks(size(before), trained, before, kind, tmp_path, 0, 3, True)
    for rank, found in enumerate(ranks(size(after), trained, after, kind, tmp_path, 3, 5)):
        if exact is not None:
            assert_equal(found, exact[rank])
        assert max(error(p, one[name]) for name, p in found.items()) < LIMITS[kind]


def forgetful(world, *args):
    with planted("tpfuse.training.checkpoint.state.put_optimizers", lambda right, *args: None):
        return trained(world, *args)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_without_the_optimizers_state_it_would_show(ranks, tmp_path, kind):
    (one,) = ranks(1, trained, ONE, kind, None, 0, 5)
    ranks(1, trained, ONE, kind, tmp_path, 0, 3, True)
    (found,) = ranks(1, forgetful, ONE, kind, tmp_path, 3, 5)
    assert max(error(p, one[name]) for name, p in found.items()) > 1e-2


def beside_main_grad(world, layout, kind, folder, begin, end):
    """Steps of bf16 weights, the optimizers on fp32 ones -> those, and what is here of the optimizers' state."""
    with default_dtype(torch.bfloat16):
        model = GPT(GATED, tp=TensorParallel(world.stages(*layout)["tp"]))
    main = MainGrad(model)
    optimizers = OPTIMIZERS[kind](model)
    if begin:
        load_checkpoint(folder, model, optimizers)
    for step in range(begin, end):
        model(**batch(GATED, size=4, seed=step), step=step).loss.backward()
        main.reduce()
        for optimizer in optimizers:
            optimizer.step()
        main.zero()
    if not begin:
        save_checkpoint(folder, model, optimizers, step=end)
    states = [optimizers[0].state[p] for p in optimizers[0].param_groups[0]["params"]]
    flat = {f"{i}.{key}": _local(x) for i, state in enumerate(states) for key, x in state.items()}
    return {f"weight {i}": p.detach().clone() for i, p in enumerate(main.parameters())} | flat


def _local(x):
    return (x.to_local() if isinstance(x, DTensor) else x).clone()


@pytest.mark.parametrize("kind", ["kfac", pytest.param("muon", marks=pytest.mark.slow)])
def test_fp32_weights_of_whole_matrices_come_back(ranks, tmp_path, kind):
    saved = ranks(2, beside_main_grad, TP2, kind, tmp_path, 0, 3)
    for loaded, exact in zip(ranks(2, beside_main_grad, TP2, kind, tmp_path, 3, 3), saved, strict=True):
        assert_equal(loaded, exact)
    (one,) = ranks(1, beside_main_grad, ONE, kind, tmp_path, 3, 3)
    whole_ones = {key for key in one if not key.startswith("weight")}
    assert whole_ones and one.keys() == saved[0].keys()
    assert_equal({key: one[key] for key in whole_ones}, {key: saved[0][key] for key in whole_ones})
    assert all(x.dtype == torch.float32 for x in one.values())


def of_sixteen_bits(world, folder):
    """Factors of bf16 weights are fp32 in the file too, and come back with their bits."""
    run, other = (Run(world, TP2, "kfac", torch.bfloat16) for _ in range(2))
    run.steps(0, 3)
    save_checkpoint(folder, run.model, run.optimizers, step=3, background=True).result()
    load_checkpoint(folder, other.model, other.optimizers)
    states = [[x.optimizers[0].state[p] for p in x.optimizers[0].param_groups[0]["params"]] for x in (run, other)]
    assert {x.dtype for state in states[1] for x in state.values()} == {torch.float32}
    for saved, loaded in zip(*states, strict=True):
        assert_equal(loaded, saved)
    return len(states[1])


def test_factors_keep_their_dtype(ranks, tmp_path):
    assert ranks(2, of_sixteen_bits, tmp_path) == [4 * GATED.num_layers] * 2


def of_dtype(kind, dtype, with_main):
    with default_dtype(dtype):
        model = GPT(GATED)
    return model, MainGrad(model) if with_main else None, OPTIMIZERS[kind](model)


def stepped_once(model, main, optimizers):
    """-> what the optimizers have of each weight."""
    model(**batch(GATED, size=4), step=0).loss.backward()
    if main is not None:
        main.reduce()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    states = enumerate(state for optimizer in optimizers for state in optimizer.state.values())
    return {f"{i}.{key}": x.clone() for i, state in states for key, x in state.items()}


F32, BF16, WITH_MAIN = (torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)


@pytest.mark.filterwarnings("ignore:load_checkpoint. training goes on")
@pytest.mark.parametrize("before, after", [((F64, False), F32), (BF16, WITH_MAIN), (WITH_MAIN, BF16)])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_in_another_dtype(tmp_path, kind, before, after):
    """The state is in the dtypes that a run has which began in that dtype."""
    first, second = of_dtype(kind, *before), of_dtype(kind, *after)
    saved = stepped_once(*first)
    save_checkpoint(tmp_path, first[0], first[2], step=1)
    dtypes = {key: x.dtype for key, x in stepped_once(*second).items()}
    assert load_checkpoint(tmp_path, second[0], second[2]) == (1, None)
    states = enumerate(state for optimizer in second[2] for state in optimizer.state.values())
    loaded = {f"{i}.{key}": x for i, state in states for key, x in state.items()}
    assert {key: x.dtype for key, x in loaded.items()} == dtypes
    assert max(error(x.double(), saved[key].double()) for key, x in loaded.items()) < 1e-2
    assert all(x.isfinite().all() for x in stepped_once(*second).values())


def drifted(world, folder):
    """An element of a factor, of which every rank has the whole, is another on one rank."""
    run = Run(world, TP2, "kfac")
    run.steps(0, 1)
    check_replicas(run.model, run.optimizers)
    if world.rank == 1:
        next(iter(run.optimizers[0].state.values()))["input"][3, 5] += 1e-9
    errors = said(lambda: check_replicas(run.model, run.optimizers))
    return errors, said(lambda: save_checkpoint(folder, run.model, run.optimizers, step=1))


def test_a_factor_that_differs_is_named(ranks, tmp_path):
    for found in ranks(2, drifted, tmp_path):
        for text in found:
            assert "optimizer.blocks.0.attention.qkv.weight.input" in text and "must have the same bits" in text
    assert not any(tmp_path.glob("step-*"))


# ---- one process from here on ----


def one_run(kind="kfac"):
    model = GPT(GATED)
    optimizers = OPTIMIZERS[kind](model)
    model(**batch(GATED, size=4)).loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return model, optimizers


def test_what_is_refused_says_why(tmp_path):
    model, (first, second) = one_run()
    everything = torch.optim.AdamW(model.parameters())
    assert "is stepped twice, by KFAC, AdamW" in said(
        lambda: save_checkpoint(tmp_path, model, [first, everything], step=1)
    )
    for wrong in ("adamw", [first, model], 5):
        assert "optimizer must be one of torch, or a list of them" in said(
            functools.partial(save_checkpoint, tmp_path, model, wrong, step=1)
        )
    assert not any(tmp_path.glob("step-*"))
    save_checkpoint(tmp_path, model, [first, second], step=1)
    before = whole(model)
    for other in ([second, first], first, everything):
        assert "was written with KFAC, AdamW" in said(functools.partial(load_checkpoint, tmp_path, model, other))
    assert load_checkpoint(tmp_path, model) == (1, None)  # the model alone
    assert_equal(whole(model), before)


@pytest.mark.parametrize("key, value", [("refresh", 0), ("damping", 0.0), ("decay", 1.0), ("steps", -1)])
def test_a_files_numbers_obey_the_optimizers_rules(tmp_path, key, value):
    model, optimizers = one_run()
    path = save_checkpoint(tmp_path, model, optimizers, step=1) / "meta.json"
    meta = json.loads(path.read_text())
    meta["param_groups"][0][key] = value
    path.write_bytes(sealed({name: x for name, x in meta.items() if name != "sha256"}))
    assert f"{key} of group 0 of {path.parent} must " in said(lambda: load_checkpoint(tmp_path, model, optimizers))


def test_a_matrix_larger_than_its_file_is_not_whole(tmp_path):
    """No memory is taken for a shape that only meta.json says."""
    model, optimizers = one_run()
    path = save_checkpoint(tmp_path, model, optimizers, step=1) / "meta.json"
    meta = json.loads(path.read_text())
    meta["tensors"]["optimizer.blocks.0.mlp.fc1.weight.input"][1] = [1 << 20, 1 << 20]
    path.write_bytes(sealed({name: x for name, x in meta.items() if name != "sha256"}))
    with pytest.raises(OSError, match="fc1.weight.input is not whole: 2304 of 1099511627776 elements are there"):
        load_checkpoint(tmp_path, model, optimizers)
