"""A token's step as a CUDA graph would replay it: the same ops with the same numbers at every position, on tensors that
stay where they are.

Without a GPU a tape takes the graph's place: it does the ops of one step again, and calls no Python between them.
"""

import warnings
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import tpfuse
from tests.common import make_tp
from tests.models.common import GPT_CONFIG, default_dtype
from tests.models.generation.test_direct import CONFIGS
from tests.models.generation.test_generate import prompts
from tests.models.test_no_sync import CHOICES, integers, make
from tests.no_sync import no_sync
from tpfuse import TensorParallel
from tpfuse.kernels.runtime import philox
from tpfuse.models import GPT
from tpfuse.models.generation import generate, graph, passes, sampling
from tpfuse.models.generation.request import Length, checked
from tpfuse.models.generation.sampling import Sampling
from tpfuse.tools.ledger.dryrun import fake_world

NEW = 7


def begun(model, ids, mask=None, new=NEW, **options):
    """The step behind the prompts."""
    request = checked(model, (ids, mask), Sampling(**options), 1, Length(new, eos_token_id=[3]))
    with torch.no_grad():
        return request, generate._begun(model.eval(), request, ())


# ---- what a step asks of the host ----


def stays(step):
    """Where a step's tensors lie."""
    kept = [step.text, step.token, step.done, step.position, step.column, step.choose.scores.present]
    place = step.forward.place
    return [id(t) for t in (*kept, place.index, place.lengths, *(cache.kv for cache in step.forward.caches))]


EVERY_DAY = {("gpt2", "sampled", 1), ("qwen3", "greedy", 2)}
STEPS = [(name, choice, R) for name in ("gpt2", "dynamic", "qwen3") for choice in CHOICES for R in (1, 2)]


@pytest.mark.parametrize(
    "name, choice, R", [pytest.param(*step, marks=[pytest.mark.slow] * (step not in EVERY_DAY)) for step in STEPS]
)
def test_two_positions_ask_the_same(name, choice, R):
    """Of a GPU: ops, kernels, grids, numbers, shapes and strides."""
    with fake_world(R) as mesh:
        model = make(name, tp=TensorParallel(mesh["tp"]) if R > 1 else None)
        _, step = begun(model, integers(3, 4), **CHOICES[choice])
        with torch.no_grad(), no_sync() as watch:
            lengths, lies = [0], stays(step)
            for _ in range(4):
                step.take(step.prompt_logits) if len(lengths) == 1 else step()
                lengths.append(len(watch.calls))
    _, second, third, fourth = (watch.calls[a:b] for a, b in zip(lengths, lengths[1:], strict=False))
    assert second == third == fourth and stays(step) == lies
    assert any(call[0] == "_split_kernel" for call in second)


# ---- what it gives ----


def both(world, name, adapter):
    """A step's logits and tokens with a fixed cache, and with one that grows."""
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        model = GPT(replace(CONFIGS[name], init_std=0.3), tp=make_tp(world)).eval()
    if adapter:
        tpfuse.add_lora(model, rank=2, alpha=4)
    found = []
    for fixes in (True, False):
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(passes, "applies", lambda model, ids: False)
            if not fixes:
                patch.setattr(passes.Pass, "fix", lambda self: None)
            _, step = begun(model, *prompts((8, 5, 1)))
            assert (step.forward.place is not None) == fixes
            logits = [step.prompt_logits]
            for _ in range(NEW - 1):
                step.take(logits[-1])
                logits.append(step.logits())
        found.append((torch.stack(logits), step.text))
    return found


@pytest.mark.parametrize("name, adapter", [("gpt2", True), ("llama", False), ("windows", False)])
@pytest.mark.parametrize("R", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_fixed_cache_gives_what_a_growing_one_gives(ranks, R, name, adapter):
    for (logits, text), (want, want_text) in ranks(R, both, name, adapter):
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-12 * float(want.abs().max()))
        assert torch.equal(text, want_text) and len(text[:, 8:].unique()) > 3


class Tape(TorchDispatchMode):
    """Records the ops of a step, with the numbers of the host, without doing them for good; then does them again."""

    def __init__(self, step):
        super().__init__()
        self.calls, self.replays = [], 0
        held = [step.text, step.token, step.done, step.position, step.column, step.choose.scores.present]
        held += [step.forward.place.index, step.forward.place.lengths, *(c.kv for c in step.forward.caches)]
        before = [t.clone() for t in held]
        with self:
            step()
        for t, was in zip(held, before, strict=True):
            t.copy_(was)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def __call__(self):
        now, self.replays = {}, self.replays + 1
        for func, args, kwargs, before in self.calls:
            args, kwargs = tree_map_only(torch.Tensor, lambda t, now=now: now.get(id(t), t), (args, kwargs))
            after = func(*args, **kwargs)
            now |= {id(a): b for a, b in zip(tree_leaves(before), tree_leaves(after)) if isinstance(a, torch.Tensor)}


OPTIONS = {
    "greedy": {},
    "ends": dict(eos_token_id=list(range(20)), pad_token_id=0),
    "sampled": dict(do_sample=True, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.3, seed=4),
    "several": dict(do_sample=True, num_return_sequences=2, eos_token_id=list(range(30))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "windows"])
def test_replays_make_the_tokens(monkeypatch, name):
    model, (ids, mask), tapes = GPT(replace(CONFIGS[name], init_std=0.3), seed=1), prompts((8, 5, 1)), []
    monkeypatch.setattr(passes, "applies", lambda model, ids: False)
    monkeypatch.setattr(sampling, "FEW", torch.inf)  # which tokens may be chosen, and numpy's words, are on no tape
    monkeypatch.setattr(philox, "_is_small", lambda counter: False)

    def captured(step):
        tapes.append(Tape(step))
        return tapes[-1]

    monkeypatch.setattr(graph, "captured", captured)
    for options in OPTIONS.values():
        call = dict(attention_mask=mask, max_new_tokens=16, **options)
        want = model.generate(ids, **call)
        with monkeypatch.context() as patch:
            patch.setattr(generate, "may_capture", lambda model, step, new: True)
            call["cuda_graph"], heard = True, []
            assert torch.equal(model.generate(ids, **call), want)
            assert torch.equal(model.generate(ids, on_token=lambda t: heard.append(t), **call), want)  # noqa: B023
            assert torch.equal(torch.stack(heard, 1), want[:, 8:])
    assert len(tapes) == 2 * len(OPTIONS) and {tape.replays for tape in tapes} >= {16 - 3}


@pytest.mark.parametrize("options, captures", [(dict(cuda_graph=True), True), ({}, False)])
def test_what_stands_against_a_graph(monkeypatch, options, captures):
    """As if the model were on a GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    model, made = GPT(GPT_CONFIG), []
    monkeypatch.setattr(generate, "GraphStep", lambda step: made.append(step) or step)
    ids, many = torch.ones(2, 3, dtype=torch.int64), dict(max_new_tokens=12, **options)
    model.generate(ids, **many)
    assert len(made) == captures
    model.generate(ids, max_new_tokens=9, **options)  # too few
    model.generate(ids, logits_processor=lambda ids, scores: scores, **many)
    hook = model.blocks[1].mlp.register_forward_hook(lambda *args: None)
    model.generate(ids, **many)
    hook.remove()
    assert len(made) == captures
    model.generate(ids, **many)
    assert len(made) == 2 * captures


def test_a_step_is_captured_on_its_own_device(monkeypatch):
    """Whatever device a process captured on before, whose stream torch.cuda.graph would take."""
    device = torch.device("cuda", 1)
    for name in ("CUDAGraph", "current_stream", "stream", "Stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    step = MagicMock(text=SimpleNamespace(device=device))
    assert graph.captured(step) is torch.cuda.CUDAGraph.return_value.replay
    torch.cuda.Stream.assert_called_once_with(device)
    assert torch.cuda.graph.call_args.kwargs["stream"] is torch.cuda.Stream.return_value and step.called


@pytest.mark.gpu
@pytest.mark.parametrize("choice", OPTIONS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_graph_makes_the_tokens(name, choice):
    """Captured and replayed on a GPU, more than once on one model."""
    model = GPT(replace(CONFIGS[name], init_std=0.3), seed=1).cuda()
    ids, mask = (x.cuda() for x in prompts((8, 5, 1)))
    call = dict(attention_mask=mask, max_new_tokens=32, **OPTIONS[choice])
    want = model.generate(ids, **call)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a capture that fails
        assert all(torch.equal(model.generate(ids, cuda_graph=True, **call), want) for _ in range(2))


# ---- torch.compile ----


class Graphs(list):
    """A backend that keeps the graphs it is given, and runs them as they are."""

    def __call__(self, module, inputs):
        self.append(module)
        return module.forward


@pytest.fixture
def padded_model(monkeypatch):
    """A model whose tokens are made on the path of training, and padded prompts."""
    monkeypatch.setattr(passes, "applies", lambda model, ids: False)
    return GPT(GPT_CONFIG, seed=1), *prompts((8, 5, 1))


@pytest.mark.slow
def test_a_step_compiles_once(padded_model):
    (model, ids, mask), graphs = padded_model, Graphs()
    want = model.generate(ids, attention_mask=mask, max_new_tokens=12, eos_token_id=3)
    _, step = begun(model, ids, mask, new=12)
    compiled, many = torch.compile(step, backend=graphs), []
    with torch.no_grad():
        step.take(step.prompt_logits)
        for _ in range(11):
            compiled()
            many.append(len(graphs))
    assert many[0] > 0 and many[1:] == many[1:2] * 10
    assert torch.equal(step.text[:, : want.shape[1]], want) and want.shape[1] > 8 + 3


@pytest.mark.slow
def test_compiled_blocks_compile_once(padded_model):
    (model, ids, mask), graphs = padded_model, Graphs()
    want = model.generate(ids, attention_mask=mask, max_new_tokens=12)
    for block in model.blocks:
        block.compile(backend=graphs)
    many = []
    got = model.generate(ids, attention_mask=mask, max_new_tokens=12, on_token=lambda token: many.append(len(graphs)))
    assert torch.equal(got, want) and many[0] > 0 and many[3:] == many[3:4] * 9
