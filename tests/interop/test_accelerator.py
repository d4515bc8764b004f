"""accelerate's own loop on a model split over (dp, tp), against the same loop in one process."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from tests.interop.launched import launched, rows, said, split, weights
from tests.models.common import whole
from tpfuse import AcceleratorMixin

accelerate = pytest.importorskip("accelerate")
LAYOUTS = [(1, 2), (2, 1), (2, 2)]
CURE = "class Accelerator(tpfuse.AcceleratorMixin, accelerate.Accelerator)"


class Accelerator(AcceleratorMixin, accelerate.Accelerator):
    pass


def config(dp, tp):
    return accelerate.ParallelismConfig(tp_size=tp, dp_shard_size=dp) if tp > 1 else None


def loaders(dp):
    collate = torch.utils.data.default_collate
    train = DataLoader(rows(ragged=False), batch_size=4 // dp, shuffle=True, collate_fn=collate)
    return train, DataLoader(rows(7, seed=2), batch_size=4 // dp, collate_fn=collate)


def loop(world, layout, folder):
    dp, tp = layout
    with launched(world):
        torch.manual_seed(0)
        seeded = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
        options = dict(gradient_accumulation_steps=2, dataloader_config=seeded)
        accelerator = Accelerator(cpu=True, parallelism_config=config(dp, tp), **options)
        model = split(world, dp, tp, attn_pdrop=0.2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=dp, gamma=0.5)
        wrapped, optimizer, train, evaluated, scheduler = accelerator.prepare(model, optimizer, *loaders(dp), scheduler)
        norms, losses = [], []

        def run(count):
            for batch, _ in zip(train, range(2 * count), strict=False):
                with accelerator.accumulate(wrapped):
                    loss = wrapped(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norms.append(float(accelerator.clip_grad_norm_(wrapped.parameters(), 0.5)))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                losses.append(float(accelerator.reduce(loss.detach(), "mean")))

        model.train()
        run(2)
        accelerator.save_state(f"{folder}/state")
        before = weights(model)
        run(1)
        assert any((weights(model)[name] != weight).any() for name, weight in before.items())
        accelerator.load_state(f"{folder}/state")
        assert all((weights(model)[name] == weight).all() for name, weight in before.items())
        run(1)
        counted = metrics(accelerator, wrapped, evaluated)
        whole = accelerator.get_state_dict(wrapped)
        return dict(norms=norms, losses=losses, lr=scheduler.get_last_lr(), counted=counted, weights=whole)


def evaluated_on_one(world, dp, tp):
    """-> what a step says where one replica has called ``eval()``, and the gradients' norm of a right one"""
    with launched(world):
        accelerator, model = Accelerator(cpu=True, parallelism_config=config(dp, tp)), split(world, dp, tp)
        wrapped = accelerator.prepare(model)
        batch = next(iter(loaders(dp)[0]))

        def step(odd):
            wrapped.train(not (odd and world.rank >= tp))
            wrapped.zero_grad()
            accelerator.backward(wrapped(**batch).loss)
            return max(float(p.grad.abs().max()) for p in model.parameters())

        step(odd=False)
        with pytest.raises(ValueError) as caught:
            step(odd=True)
        return str(caught.value), step(odd=False) > 0


@pytest.mark.parametrize("dp, tp", [(2, 2), (2, 1)])
def test_replicas_that_differ(ranks, dp, tp):
    for text, goes_on in ranks(dp * tp, evaluated_on_one, dp, tp):
        assert goes_on
        assert text.startswith("accelerate: training must be the same on every data-parallel rank, got rank 0: True")


@torch.no_grad()
def metrics(accelerator, model, loader):
    model.eval()
    seen, objects, sizes = [], [], []
    for batch in loader:
        model(**batch)
        seen.append(accelerator.gather_for_metrics(batch["labels"]))
        objects += accelerator.gather_for_metrics([str(row.tolist()) for row in batch["labels"]])
        sizes.append(int(accelerator.reduce(torch.tensor(len(batch["labels"])), "sum")))
        assert len(accelerator.gather(batch["labels"])) == sizes[-1]
    return torch.cat(seen).tolist(), objects, sizes


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loop_is_that_of_one_process(ranks, tmp_path, layout):
    (want,) = ranks(1, loop, (1, 1), str(tmp_path / "one"))
    assert len(want["counted"][0]) == 7
    for got in ranks(layout[0] * layout[1], loop, layout, str(tmp_path / "split")):
        assert got["norms"] == pytest.approx(want["norms"], rel=1e-5) and got["lr"] == want["lr"]
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-5)
        assert got["counted"][:2] == want["counted"][:2]
        for name, weight in want["weights"].items():
            assert (got["weights"][name] - weight).abs().max() < 1e-6


def clipped(world, layout, bitwise=None):
    """-> the norms and the whole clipped gradients of one layer, for two kinds of clipping, or the errors."""
    with launched(world):
        accelerator, model = Accelerator(cpu=True, parallelism_config=config(*layout)), split(world, *layout, bitwise)
        wrapped = accelerator.prepare(model)
        batch = torch.utils.data.default_collate(rows(4, ragged=False))
        name, results = "blocks.0.mlp.fc1.weight", []
        part = [model.parallel.get_parameter(name), model.parallel.get_parameter("input_norm.weight")]
        for parameters, kind in (list(wrapped.parameters()), float("inf")), (part, 2), (part[0], 1):
            wrapped.zero_grad()
            accelerator.backward(wrapped(**batch).loss)
            clip = lambda p=parameters, kind=kind: accelerator.clip_grad_norm_(p, 1e-3, kind)
            results.append(said(clip) if bitwise else (float(clip()), whole(model.parallel, grad=True)[name]))
        return results


def test_any_norm_of_any_parameters(ranks):
    (want,) = ranks(1, clipped, (1, 1))
    for got in ranks(2, clipped, (1, 2)):
        for (norm, grad), (exact, whole_grad) in zip(got, want, strict=True):
            assert norm == pytest.approx(exact, rel=1e-5)
            torch.testing.assert_close(grad, whole_grad, rtol=1e-4, atol=1e-8)
    for message in sum(ranks(2, clipped, (1, 2), 4), []):
        assert "clip_grad_norm_: of bitwise give model.parameters(), and norm_type=2" in message


def refused(world, layout, sizes):
    with launched(world):
        model = split(world, *layout)
        before = weights(model)
        sizes = accelerate.ParallelismConfig(**sizes) if sizes else None
        accelerator = Accelerator(cpu=True, parallelism_config=sizes)
        message = said(lambda: accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))
        assert all(torch.equal(weights(model)[name], weight) for name, weight in before.items())
        return message


def test_without_its_sizes_it_is_refused(ranks):
    for message in ranks(2, refused, (1, 2), {}):
        assert message == "accelerate: give parallelism_config=ParallelismConfig(tp_size=2, dp_shard_size=1), got None"
    for message in ranks(2, refused, (1, 2), dict(dp_shard_size=2)):
        assert "ParallelismConfig(tp_size=2, dp_shard_size=1), got tp_size=1, dp_shard_size=2" in message


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(8))


def streamed(world, layout, split_batches, dispatch_batches):
    """-> the batches of this rank, or the error."""
    options = dict(split_batches=split_batches, dispatch_batches=dispatch_batches)
    options = dict(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(**options))
    with launched(world):
        make = lambda: Accelerator(parallelism_config=config(*layout), **options)
        if dispatch_batches and (layout[0] > 1 or split_batches):
            return said(make)
        return [batch.tolist() for batch in make().prepare(DataLoader(Stream(), batch_size=4))]


HALVES, QUARTERS = ([0, 1, 2, 3], [4, 5, 6, 7]), ([[0, 1], [4, 5]], [[2, 3], [6, 7]])
ALL = list(HALVES)


@pytest.mark.parametrize(
    "layout, split_batches, read",
    [
        ((2, 2), False, [[rows] for rows in HALVES for _ in range(2)]),
        ((2, 2), True, [rows for rows in QUARTERS for _ in range(2)]),
        ((2, 1), False, [[rows] for rows in HALVES]),
        ((1, 2), False, [ALL, ALL]),
        ((1, 2), True, [ALL, ALL]),
    ],
)
def test_an_iterable_data_set_is_divided_among_the_replicas(ranks, layout, split_batches, read):
    assert ranks(layout[0] * layout[1], streamed, layout, split_batches, None) == read


@pytest.mark.parametrize("layout, split_batches", [((2, 2), False), ((1, 2), True), ((1, 2), False)])
def test_batches_that_one_rank_reads_are_for_one_replica(ranks, layout, split_batches):
    for answer in ranks(layout[0] * layout[1], streamed, layout, split_batches, True):
        if (layout, split_batches) == ((1, 2), False):
            assert answer == ALL
        else:
            assert f"split_batches={split_batches}; give dispatch_batches=False" in answer


def gathered(world, folder):
    """-> objects of all kinds, of which a rank has its own; what two models give."""
    with launched(world):
        accelerator = Accelerator(cpu=True, parallelism_config=config(1, 2))
        values = np.array([0.5, 1.5]), range(2), "ab", dict(a=1)
        objects = [accelerator.gather_for_metrics(value) for value in values]
        accelerator._models += [split(world, 1, 2), split(world, 1, 2)]
        errors = [said(lambda: accelerator.save_state(folder)), said(lambda: accelerator.load_state(folder))]
        accelerator._models.clear()
        return objects, errors


def test_objects_of_any_kind_are_gathered_once(ranks, tmp_path):
    for objects, errors in ranks(2, gathered, str(tmp_path)):
        assert objects == [[0.5, 1.5], [0, 1], ["a", "b"], ["a"]]
        for name, text in zip(("save_state", "load_state"), errors, strict=True):
            assert f"{name}: prepare one model of tpfuse with one optimizer, got (2, 0)" in text


def outside(world, folder):
    """-> the errors of a bare Accelerator, by method."""
    with launched(world):
        model = split(world, 1, 2)
        before = weights(model)
        accelerator = accelerate.Accelerator(cpu=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        calls = dict(
            prepare=lambda: accelerator.prepare(optimizer, model.parallel),
            prepare_model=lambda: accelerator.prepare_model(model=model, evaluation_mode=True),
            save_model=lambda: accelerator.save_model(model, f"{folder}/model"),
            save_state=lambda: accelerator.save_state(f"{folder}/state"),
            load_state=lambda: accelerator.load_state(f"{folder}/state"),
        )
        accelerator._models.append(model)
        errors = {name: said(call) for name, call in calls.items()}
        accelerator._models.clear()
        accelerator.prepare(torch.nn.Linear(2, 2))  # no split model
        accelerator.state.parallelism_config = config(1, 2)  # accelerate's own tensor parallelism, as on a GPU
        assert CURE in said(lambda: accelerator.prepare_model(model))
        assert all(torch.equal(weights(model)[name], weight) for name, weight in before.items())
        return errors


def test_outside_the_mixin_is_refused(ranks, tmp_path):
    for errors in ranks(2, outside, str(tmp_path)):
        for name, message in errors.items():
            assert f"accelerate.Accelerator.{name}: the model is split over tensor-parallel ranks" in message
            assert CURE in message
    assert not list(tmp_path.iterdir())


def saved(world, layout, folder):
    with launched(world):
        model = split(world, *layout)
        accelerator = Accelerator(cpu=True, parallelism_config=config(*layout))
        accelerator.save_model(accelerator.prepare(model), folder)
        return weights(model)


def test_save_model_writes_the_whole(ranks, tmp_path):
    (whole, _) = ranks(2, saved, (1, 2), str(tmp_path))
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() <= whole.keys()  # of tied tensors accelerate keeps one
    assert all(torch.equal(written[name], whole[name]) for name in written)


@pytest.mark.slow
@pytest.mark.parametrize("imports", ["import tpfuse, accelerate", "import accelerate, tpfuse"])
def test_the_class_is_patched_whoever_comes_first(imports):
    module = "accelerate.Accelerator.save_state.__wrapped__.__module__"
    code = f"{imports}; tpfuse.guard_torch(); assert {module} == 'accelerate.accelerator'"
    subprocess.run([sys.executable, "-c", code], check=True)
