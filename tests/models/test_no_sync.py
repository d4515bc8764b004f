"""A training step and a decoded token neither wait for the GPU nor copy to it, so both can be captured in a CUDA graph.

The first step may: it moves the counter of steps, makes tables and compares the ranks' inputs.

Spans: models/, layers/ and kernels/: whole training steps.
"""

import sys
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.models.common import BERT_CONFIG, GPT_CONFIG, batch
from tests.models.families.test_llama_like import config_of
from tests.no_sync import GPU, Waits, no_sync
from tpfuse import TensorParallel, clip_grad_norm_, param_groups
from tpfuse.models import GPT, Bert
from tpfuse.tools.ledger.dryrun import fake_world

B, S, DOCUMENTS = 3, 24, 40  # more documents than tokens of a row: torch.isin sorts from 31 on
DYNAMIC = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
CONFIGS = {
    "gpt2": GPT_CONFIG,
    "llama": config_of("llama", 2),
    "qwen3": config_of("qwen3", 2),
    "gpt_neox": config_of("gpt_neox", 8),
    "longrope": replace(
        config_of("phi3", 2), rope=config_of("phi3", 2).rope | dict(original_max_position_embeddings=9)
    ),
    "dynamic": replace(config_of("llama", 2), rope=DYNAMIC),
    "bert": BERT_CONFIG,
}


def integers(*shape, dtype=torch.int64):
    return torch.zeros(shape, dtype=dtype, device=GPU)


def padded(name):
    ids = integers(B, S)
    return dict(input_ids=ids, labels=ids, attention_mask=ids, loss_normalizer=20.0, first_sample=3)


def packed(name):
    ids = integers(1, 80)
    return dict(input_ids=ids, labels=ids, cu_seqlens=integers(DOCUMENTS + 1, dtype=torch.int32), max_seqlen=S)


def placed(name):
    ids = integers(B, S)
    return dict(input_ids=ids, labels=ids, position_ids=ids, return_logits=True)


CALLS = {"padded": padded, "packed": packed, "placed": placed}
SLOW = (
    ("gpt_neox", "padded"),
    ("gpt_neox", "packed"),
    ("gpt_neox", "placed"),
    ("longrope", "padded"),
    ("longrope", "packed"),
)
STEPS = [
    pytest.param(name, call, marks=[pytest.mark.slow] * ((name, call) in SLOW))
    for name in CONFIGS
    for call in CALLS
    if (name, call) != ("bert", "packed")
]


def make(name, **options):
    options |= dict(masked_lm=True) if name == "bert" else {}
    with torch.device("meta"):
        return (Bert if name == "bert" else GPT)(CONFIGS[name], **options)


@pytest.fixture
def capturable(monkeypatch):
    """The optimizer's own part on meta tensors as on GPUs."""
    monkeypatch.setattr(sys.modules["torch.optim.adam"], "_get_capturable_supported_devices", lambda **_: ["meta"])


def watched_step(model, call):
    """-> what one training step starts, the first apart"""
    optimizer = torch.optim.AdamW(param_groups(model, 0.1), lr=1e-3, capturable=True, foreach=True)

    def step():
        model(**call).loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    with no_sync() as watch:
        step()
    return watch.started


@pytest.mark.parametrize("saving", ["fastest", "smallest"])
@pytest.mark.parametrize("name, call", STEPS)
def test_a_training_step(capturable, name, call, saving):
    started = watched_step(make(name, saving=saving), CALLS[call](name))
    assert started["_dkdv_kernel"] == CONFIGS[name].num_layers and started["_fwd_kernel"] > CONFIGS[name].num_layers


@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("name, call", STEPS)
def test_a_training_step_of_two_ranks(capturable, name, call, sp):
    with fake_world(2) as mesh:
        tp = TensorParallel(mesh["tp"], sequence_parallel=sp)
        assert watched_step(make(name, tp=tp), CALLS[call](name))["all_to_all" if sp else "all_gather"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_the_callers(capturable, dtype):
    """``step`` as a tensor on the device."""
    model = make("gpt2").to(dtype)
    watched_step(model, padded("gpt2") | dict(step=integers()))


CHOICES = {"greedy": {}, "penalty": dict(repetition_penalty=1.3)}
CHOICES["sampled"] = dict(do_sample=True, temperature=0.8, top_k=5, top_p=0.9, repetition_penalty=1.3)


@pytest.mark.parametrize("R", [1, 2])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", ["gpt2", "dynamic", "qwen3"])
def test_generation(name, choice, R):
    """Of the prompt too, where no attention mask says which of its tokens are there."""
    with fake_world(R) as mesh:
        model = make(name, tp=TensorParallel(mesh["tp"]) if R > 1 else None)
        model.generate(integers(B, 2), max_new_tokens=1)  # makes the tables of positions
        with no_sync() as watch:
            tokens = model.generate(integers(B, 4), max_new_tokens=7, **CHOICES[choice])
    assert tokens.shape == (B, 11) and watch.started["_split_kernel"] == 6 * CONFIGS[name].num_layers


def test_generation_that_may_end():
    """The host asks for the first time after eight tokens."""
    model = make("gpt2")
    with no_sync() as watch, pytest.raises(Waits):
        model.generate(integers(B, 4), max_new_tokens=20, eos_token_id=[1, 2])
    assert watch.started["_split_kernel"] == 7 * CONFIGS["gpt2"].num_layers


class Tape(TorchDispatchMode):
    """Records ops with the numbers of the host they were given, and runs them again, as a CUDA graph does."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self, wanted):
        now = {}
        for func, args, kwargs, before in self.calls:
            args, kwargs = tree_map_only(torch.Tensor, lambda t, now=now: now.get(id(t), t), (args, kwargs))
            after = func(*args, **kwargs)
            now |= {id(a): b for a, b in zip(tree_leaves(before), tree_leaves(after)) if isinstance(a, torch.Tensor)}
        return now[id(wanted)]


@pytest.mark.parametrize("config", [GPT_CONFIG, BERT_CONFIG], ids=["gpt", "bert"])
def test_masks_change_from_replay_to_replay(config):
    """The counter of steps is a tensor that a step advances; a step that is an integer stays what it was."""
    call, options = batch(config), dict(masked_lm=True) if config is BERT_CONFIG else {}
    model, other = ((Bert if options else GPT)(config, **options) for _ in range(2))
    with Tape() as tape:
        loss = model(**call).loss
    losses = [loss, tape.replay(loss), tape.replay(loss)]
    assert all(torch.equal(a, other(**call).loss) for a in losses) and model.step == 3
    assert len({float(a) for a in losses}) == 3
    counter = torch.zeros((), dtype=torch.int64)
    for step, differs in ((counter, True), (0, False)):
        with Tape() as tape:
            loss = model(**call, step=step).loss
        counter += 1
        assert torch.equal(tape.replay(loss), loss) != differs
