"""Checkpoints of pipeline stages: the whole model, resumed at any sizes and schedule and in one process, or refused."""

import json
import os
import signal
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from tests.common import assert_equal
from tests.models.common import default_dtype
from tests.pipeline.common import GPT2, MODELS, ROWS, batches, made, micro_batches
from tests.planted import planted
from tests.training.checkpoint.common import names
from tpfuse import TensorParallel, add_lora, clip_grad_norm_, load_checkpoint, param_groups, save_checkpoint
from tpfuse.layers.lora import adapted_layers
from tpfuse.layers.shards import named_specs
from tpfuse.pipeline import SCHEDULES, schedule
from tpfuse.training.checkpoint import load as reading
from tpfuse.training.checkpoint import save as writing

ONE = (1, 1, 1), None


class Staged:
    """A model over ``layout``, (pp, dp, tp), and what trains it by the schedule ``name``; None: a whole model."""

    def __init__(self, world, layout, name, config=GPT2, lora=False, over_replicas=False, **options):
        self.mesh, self.name = world.stages(*layout), name
        pp, self.dp = self.mesh["pp"], self.mesh["dp"]
        options |= {} if name is None else dict(stage=(pp.get_local_rank(), pp.size(), name))
        options |= dict(dp=self.dp) if self.dp.size() > 1 else {}
        options |= dict(experts=self.mesh["dp", "tp"]) if over_replicas else {}
        with default_dtype(torch.float64):
            self.model = made(config, tp=TensorParallel(self.mesh["tp"]), **options)
            if lora:
                add_lora(self.model, rank=2, alpha=4)
            self.optimizer = torch.optim.AdamW(param_groups(self.model, weight_decay=0.1), lr=1e-3)
        if name is not None:
            self.pipeline = schedule(self.model, pp, name, micro_batches(self.mesh))

    def steps(self, first, last):
        """-> (loss, norm of the gradient) of each"""
        found = []
        for ids, labels in list(batches(last))[first:]:
            size = ROWS // self.dp.size()
            mine = slice(self.dp.get_local_rank() * size, (self.dp.get_local_rank() + 1) * size)
            if self.name is None:
                loss = self.model(ids, labels=labels).loss
                loss.backward()
            else:
                loss = self.pipeline.step(ids[mine], labels=labels[mine])
            norm = clip_grad_norm_(self.model, 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            found.append((loss.item(), norm.item()))
        return found

    def save(self, directory, step, **options):
        return save_checkpoint(directory, self.model, self.optimizer, step=step, **options)

    def load(self, directory):
        return load_checkpoint(directory, self.model, self.optimizer)

    def state(self):
        """What is here of every tensor: its name, its slice of the whole, its elements; then what is no tensor."""
        found = {}
        for name, p, spec, tp in named_specs(self.model):
            every = {"": p.detach()} | self.optimizer.state.get(p, {})
            for key, value in every.items():
                place = spec.local(tp) if value.shape == p.shape else ...
                found[f"{name} {key}".strip()] = (place, value.clone())
        found["step"] = (..., self.model.step.clone())
        return found


def run(world, where, directory, steps, save, options):
    """Resumes what is in ``directory`` and trains to ``steps``; saves there or not -> losses and norms, state."""
    training = Staged(world, *where, **options)
    loaded = training.load(directory) if directory else None
    found = training.steps(0 if loaded is None else loaded[0], steps)
    if save:
        training.save(directory, steps, extra={"at": steps})
    return found, training.state(), loaded


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    """(where, options) -> what four steps without a break give on every rank."""
    known = {}

    def make(where, **options):
        key = where, json.dumps(options, default=repr)
        if key not in known:
            known[key] = ranks(size_of(where), run, where, None, 4, False, options)
        return known[key]

    return make


@pytest.fixture(scope="module")
def written(ranks, tmp_path_factory):
    """(where, options) -> the directory of a run of two steps, and the state of every rank at its end."""
    known = {}

    def make(where, **options):
        key = where, json.dumps(options, default=repr)
        if key not in known:
            directory = str(tmp_path_factory.mktemp("run"))
            known[key] = directory, ranks(size_of(where), run, where, directory, 2, True, options)
        return known[key]

    return make


def size_of(where):
    (pp, dp, tp), _ = where
    return pp * dp * tp


def check_resumed(ranks, trained, written, before, after, **options):
    directory, _ = written(before, **options)
    exact, undisturbed = trained(ONE, **options)[0], trained(after, **options) if before == after else None
    for rank, (steps, found, loaded) in enumerate(ranks(size_of(after), run, after, directory, 4, False, options)):
        assert loaded == (2, {"at": 2})
        if undisturbed is not None:  # bit for bit
            assert steps == undisturbed[rank][0][2:]
            assert_equal({k: x for k, (_, x) in found.items()}, {k: x for k, (_, x) in undisturbed[rank][1].items()})
        assert torch.tensor(steps).sub(torch.tensor(exact[0][2:])).abs().max() < 1e-9
        for name, (place, x) in found.items():
            assert (x - exact[1][name][1][place]).abs().max() < 1e-9, name


F1B, ZBV, CHIMERA, INTERLEAVED = (((2, 1, 1), name) for name in ("1f1b", "zbv", "chimera", "interleaved"))
WHERE = [
    ONE,
    ((1, 1, 2), None),
    *(((2, 1, 1), name) for name in SCHEDULES),
    ((2, 1, 2), "zbv"),
    ((2, 1, 2), "chimera"),
    ((2, 2, 1), "1f1b"),
    ((2, 2, 1), "interleaved"),
    ((4, 1, 1), "chimera"),
    ((4, 1, 1), "1f1b"),
    ((2, 2, 2), "zero-bubble"),
]
RESUMES = [(F1B, F1B), (CHIMERA, ONE), (ONE, ZBV), (((2, 1, 2), "zbv"), ((4, 1, 1), "chimera"))]
# each layout before another one and after one; layouts before themselves, bit for bit; rare: pairs of the same layouts
MORE = [(before, WHERE[(i * 5 + 3) % len(WHERE)]) for i, before in enumerate(WHERE)]
MORE += [(where, where) for where in WHERE[3::6]]
RARE = [(F1B, ONE), (CHIMERA, INTERLEAVED), (ZBV, ((2, 2, 1), "1f1b")), *((where, where) for where in WHERE[6::6])]
MARKS = {pair: [pytest.mark.slow] for pair in MORE} | {pair: [pytest.mark.slow, pytest.mark.rare] for pair in RARE}
MARKS = dict.fromkeys(RESUMES, []) | {pair: marks for pair, marks in MARKS.items() if pair not in RESUMES}


@pytest.mark.parametrize("before, after", [pytest.param(*pair, marks=marks) for pair, marks in MARKS.items()])
def test_resuming_goes_on_where_it_stopped(ranks, trained, written, before, after):
    check_resumed(ranks, trained, written, before, after)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*(kind for kind in MODELS if kind != "gpt2"), "adapters"])
def test_every_kind_of_model(ranks, trained, written, kind):
    """Tensor-parallel slices of stages read by other stages, of one of two chains each."""
    options = dict(lora=True) if kind == "adapters" else dict(config=MODELS[kind])
    check_resumed(ranks, trained, written, ((2, 1, 2), "chimera"), INTERLEAVED, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, after", [(((2, 2, 2), "zbv"), ((2, 2, 1), "1f1b")), (((2, 2, 1), "1f1b"), ((2, 2, 1), "1f1b"))]
)
def test_experts_over_replicas(ranks, trained, written, before, after):
    check_resumed(ranks, trained, written, before, after, config=MODELS["mixtral"], over_replicas=True)


@pytest.mark.slow
def test_adapters_of_all_stages_are_in_the_file(ranks, trained, written):
    check_resumed(ranks, trained, written, F1B, F1B, lora=True)
    (meta,) = Path(written(F1B, lora=True)[0]).glob("step-*/meta.json")
    adapters = json.loads(meta.read_text())["adapters"]
    assert {path.split(".")[1] for path in adapters} == set(map(str, range(GPT2.num_layers)))
    assert all(adapter == {"scale": 2.0, "merged": False} for adapter in adapters.values())


def rescaled(world, where, directory):
    """What a load says where rank 1 has another scale, and a save."""
    training = Staged(world, *where, lora=True)
    if world.rank == 1:
        path, _, adapter = next(iter(adapted_layers(training.model)))
        adapter.scale = 3.0
    loaded = said(ValueError, lambda: training.load(directory))
    return loaded, said(ValueError, lambda: training.save(directory, 3))


def test_adapters_that_are_other_ones(ranks, written):
    first, second = ranks(2, rescaled, CHIMERA, written(F1B, lora=True)[0])
    assert first == second
    assert "the adapter of blocks.0.attention.qkv has scale=3.0" in first[0] and "was written with '2.0'" in first[0]
    assert "adapters must be the same on every rank, got blocks.0.attention.qkv with {'scale': 2.0" in first[1]


def forgetful(world, *args):
    with planted("tpfuse.training.checkpoint.state.put_optimizers", lambda right, *args: None):
        return run(world, *args)


def test_without_the_optimizers_state_it_would_show(ranks, trained, written):
    exact = trained(ONE)[0][1]
    for _, found, _ in ranks(2, forgetful, F1B, written(ONE)[0], 4, False, {}):
        weights = {name: x for name, (_, x) in found.items() if " " not in name and name != "step"}
        assert max((x - exact[name][1]).abs().max() for name, x in weights.items()) > 1e-5


# ---- what is in the file ----


def contents(directory):
    """The elements of every tensor's parts in the files, each part as often as it is there."""
    path, found = Path(directory), []
    for file in sorted((path / (path / "latest").read_text().strip()).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found += [(name, opened.get_tensor(name)) for name in opened.keys()]  # noqa: SIM118
    return found


@pytest.mark.parametrize("where", [F1B, CHIMERA], ids=["1f1b", "chimera"])
def test_the_whole_model_is_there_once(written, where):
    """The embedding, which the head shares, is on both ranks, and under Chimera everything."""
    directory, every = written(where)
    found = contents(directory)
    assert len(found) == len(dict(found))  # no tensor is split here, and none is twice
    for _, held, _ in every:
        for name, (_, value) in held.items():
            if name != "step":
                parameter, _, key = name.partition(" ")
                assert torch.equal(dict(found)[f"optimizer.{parameter}.{key}" if key else f"model.{parameter}"], value)
    exact = {name for name in dict(contents(written(ONE)[0]))}
    assert dict(found).keys() == exact
    files = list((Path(directory) / "step-00000002").glob("*.safetensors"))
    assert len(files) == 2 and max(f.stat().st_size for f in files) < 0.7 * sum(f.stat().st_size for f in files)


def what_is_read(world, where, directory):
    read, fill = set(), reading.fill

    def noting(path, target, stored):
        read.add(target.name)
        return fill(path, target, stored)

    with mock.patch.object(reading, "fill", noting):
        training = Staged(world, *where)
        training.load(directory)
    own = {name for name, _ in training.model.named_parameters()}
    return {name.split(".", 1)[1] for name in read if name.startswith("model.")} == own, len(read) < 4 * 130


def test_a_rank_reads_its_own_stages_alone(ranks, written):
    assert ranks(2, what_is_read, F1B, written(ONE)[0]) == [(True, True)] * 2


def in_the_background(world, directory):
    training = Staged(world, *ZBV)
    training.steps(0, 1)
    there = training.save(f"{directory}/there", 1)
    saving = training.save(f"{directory}/here", 1, background=True)
    training.steps(1, 2)
    here = saving.result()
    return {f.name: f.read_bytes() for f in here.iterdir()} == {f.name: f.read_bytes() for f in there.iterdir()}


def test_a_save_in_the_background_is_the_same(ranks, tmp_path):
    assert ranks(2, in_the_background, str(tmp_path)) == [True, True]


# ---- what is refused ----


def said(kind, attempt):
    with pytest.raises(kind) as caught:
        attempt()
    dist.barrier()
    return str(caught.value)


@contextmanager
def as_ever(training):
    """Nothing is changed."""
    before = training.state()
    yield
    assert_equal({k: x for k, (_, x) in training.state().items()}, {k: x for k, (_, x) in before.items()})


def refused_saves(world, directory):
    rank = world.rank
    training = Staged(world, *F1B)
    training.steps(0, 1)
    training.save(directory, 1)
    found, optimizer = {}, training.optimizer
    found["step"] = said(ValueError, lambda: training.save(directory, 2 + rank))
    optimizer.param_groups[1]["lr"] = 0.5 * rank
    found["lr"] = said(ValueError, lambda: training.save(directory, 2))
    optimizer.param_groups[1]["lr"] = optimizer.param_groups[0]["lr"]
    embedding = training.model.embedding.weight
    if rank == 1:  # the head's copy is not trained
        kept = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["params"] = [p for p in kept if p is not embedding]
        moments = optimizer.state.pop(embedding)
    found["copy"] = said(ValueError, lambda: training.save(directory, 2))
    if rank == 1:
        optimizer.param_groups[0]["params"], optimizer.state[embedding] = kept, moments
    for key, stage, config in (
        ("stage", (0, 2, "1f1b"), GPT2),
        ("schedule", (rank, 2, "1f1b" if rank else "zbv"), GPT2),
        ("config", (rank, 2, "1f1b"), replace(GPT2, eps=1e-6 if rank else 1e-5)),
    ):
        with default_dtype(torch.float64):
            model = made(config, stage=stage)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        found[key] = said(ValueError, lambda model=model, sgd=sgd: save_checkpoint(directory, model, sgd, step=2))

    def full(*args):
        raise OSError("No space left on device")

    with mock.patch.object(writing, "write_shard", full if rank == 1 else writing.write_shard):
        found["disk"] = said(OSError, lambda: training.save(directory, 2))
    assert training.load(directory) == (1, None)
    return found


SAVES = {
    "step": "step must be the same on every rank, got 2 on rank 0 and 3 on rank 1",
    "lr": "param_groups must be the same on every rank, got lr 0.0 in group 1 on rank 0 and 0.5 on rank 1",
    "copy": "got embedding.weight in group 0 on rank 0 and in no group on rank 1",
    "stage": "the model is not whole: no rank holds the stages of rank 1 of 2 of its pipeline",
    "schedule": "stage must be of one pipeline on every rank, got ",
    "config": "config must be the same on every rank",
    "disk": "No space left on device",
}


def test_a_save_that_stages_do_not_agree_on(ranks, tmp_path):
    first, second = ranks(2, refused_saves, str(tmp_path))
    assert first == second
    for key, words in SAVES.items():
        assert first[key].startswith("save_checkpoint: ") and words in first[key], (key, first[key])
    assert names(tmp_path) == {"step-00000001", "latest"}


def refused_loads(world, directory):
    tries = {
        "stage": dict(stage=(0, 2, "1f1b")),
        "config": dict(config=replace(GPT2, eps=1e-6)),
        "layers": dict(config=replace(GPT2, num_layers=3)),
        "lora": dict(lora=True),
    }
    found = {}
    for key, options in tries.items():
        stage = options.pop("stage", None)
        training = Staged(world, *F1B, **options)
        if stage is not None:
            with default_dtype(torch.float64):
                training.model = made(GPT2, stage=stage)
                training.optimizer = torch.optim.AdamW(param_groups(training.model, 0.1))
        training.model.requires_grad_(True)
        with as_ever(training):
            found[key] = said(ValueError, lambda training=training: training.load(directory))
    return found


LOADS = {
    "stage": "holds model.blocks.1.mlp_norm.weight, which this model has no place for",
    "config": "the model's config has eps=1e-06",
    "layers": "which this model has no place for",
    "lora": "lora.A must be",
}


def test_a_load_that_does_not_fit_changes_nothing(ranks, written):
    directory, _ = written(ONE)
    for found in ranks(2, refused_loads, directory):
        for key, words in LOADS.items():
            assert found[key].startswith("load_checkpoint: ") and words in found[key], (key, found[key])


# ---- killed ----


def die(world, directory, where, place, rank, background):
    training = Staged(world, *where)
    training.load(directory)

    def killed(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(writing, place, killed if world.rank == rank else getattr(writing, place)):
        saving = training.save(directory, 3, background=background)
        if background:
            saving.result()


@pytest.mark.parametrize(
    "place, rank, background",
    [
        ("write_shard", 1, False),
        pytest.param("write_shard", 0, False, marks=pytest.mark.slow),
        pytest.param("write_shard", 1, True, marks=pytest.mark.slow),
        pytest.param("publish", 0, False, marks=pytest.mark.slow),
        pytest.param("check_shared", 1, False, marks=pytest.mark.slow),
    ],
)
def test_a_stage_that_is_killed_is_named_and_the_checkpoint_before_stays(ranks, tmp_path, place, rank, background):
    where = (4, 1, 1), "1f1b"
    (_, before, _), *_ = ranks(4, run, where, str(tmp_path), 2, True, {})
    with pytest.raises(Exception, match=f"rank {rank} died") as caught:  # the one that was killed
        ranks(4, die, str(tmp_path), where, place, rank, background)
    others = str(caught.value.__cause__)  # every rank's
    assert "was not done in time" not in others
    assert others.count(f"not whole and is not published: rank {rank} has ended") >= 3, others
    _, after, loaded = ranks(1, run, ONE, str(tmp_path), 2, True, {})[0]
    assert loaded == (2, {"at": 2})
    assert_equal({k: after[k][1] for k in before}, {k: x for k, (_, x) in before.items()})
    assert names(tmp_path) == {"step-00000002", "step-00000002-1", "latest"}
