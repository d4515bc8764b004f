"""Hooks of torch on the parts of a layer and of a model: all of them fire, and change nothing but what they change."""

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import prune

from tests.common import make_tp
from tests.models.common import default_dtype
from tpfuse import make_rng, watch
from tpfuse.layers import Normed, ParallelAttention, ParallelMLP, TransformerBlock
from tpfuse.layers.hooks import hooked, onlooker
from tpfuse.models import GPT, Bert, BertConfig, GPTConfig

D, HEADS, BATCH, SEQ, TOLERANCE = 16, 4, 2, 6, 1e-12
KINDS = {
    "pre-norm": dict(),
    "smallest": dict(saving="smallest"),
    "side by side": dict(wiring="parallel", place="inner"),
    "post-norm": dict(wiring="post", causal=False, activation="gelu"),
    "stack": dict(place="inner"),
    "stack, post-norm": dict(place="inner", wiring="post", causal=False),
    "llama": dict(norm="rms", gated=True, activation="silu", bias=False, num_kv_heads=2, place="inner", qk_norm=True),
    "branch norms": dict(wiring="sandwich", qk_norm=True, qk_norm_all=True),
    "branch norms in place": dict(wiring="branch"),
    "one kv head": dict(num_kv_heads=1),  # over two ranks: shared
}
FIRES = "before", "after", "backward before", "backward"


def listen(model):
    """Hooks of each kind on every module but the outermost -> (what has fired, handles)."""
    fired, handles = set(), []
    for name, part in model.named_modules():
        if not name or isinstance(part, nn.ModuleList):
            continue

        def note(kind, name=name):
            return lambda *_: fired.add((name, kind)) and None

        handles += [
            part.register_forward_pre_hook(note("before")),
            part.register_forward_hook(note("after")),
            part.register_full_backward_pre_hook(note("backward before")),
            part.register_full_backward_hook(note("backward")),
        ]
    return fired, handles


def all_of(model):
    names = [n for n, part in model.named_modules() if n and not isinstance(part, nn.ModuleList)]
    return {(name, kind) for name in names for kind in FIRES}


def make(kind, tp=None):
    torch.manual_seed(0)
    options = dict(dropout=0.1, attention_dropout=0.1) | KINDS[kind]
    block = TransformerBlock(D, HEADS, dtype=torch.float64, layer=2, tp=tp, **options)
    with torch.no_grad():
        for p in block.parameters():
            p *= 3.0
    return block


def step(block):
    """Forward and backward on this rank's rows -> everything that comes out."""
    torch.manual_seed(1)
    stack = block.place != "alone"
    rows = [torch.randn(SEQ * BATCH, D, dtype=torch.float64) for _ in range(2 if stack else 1)]
    own = [x.chunk(block.tp.row_shards)[block.tp.row_rank].clone().requires_grad_() for x in rows]
    given = [own[0], *(Normed(n) for n in own[1:])]
    out = block(*given, batch=BATCH, rng=make_rng(3, 5))
    out = [out] if isinstance(out, torch.Tensor) else [out[0], out[1].n[0]]
    block.zero_grad()
    sum((y * torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)).sum() for y in out).backward()
    return [*out, *(x.grad for x in own), *(p.grad.clone() for p in block.parameters())]


def around(model, step):
    """What a step gives before, during and after hooks on every part; and the hooks that did not fire."""
    before = step()
    fired, handles = listen(model)
    during = step()
    for handle in handles:
        handle.remove()
    return before, during, step(), all_of(model) - fired


def _both(world, kind, sp):
    block = make(kind, None if world is None else make_tp(world, sp))
    return around(block, lambda: step(block))


def check(before, during, after, missing):
    assert not missing
    for a, b, c in zip(before, during, after, strict=True):
        assert torch.equal(a, c)  # fused again
        assert (a - b).abs().max() <= TOLERANCE * a.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_every_hook_of_a_block_fires(kind):
    check(*_both(None, kind, False))


BRIEF = "side by side", "branch norms", "branch norms in place"
SPLIT = [(kind, sp) for kind in KINDS for sp in (True, False)]


@pytest.mark.parametrize(
    "kind, sp", [pytest.param(*c, marks=[pytest.mark.slow] * (c[0] in BRIEF and not c[1])) for c in SPLIT]
)
def test_every_hook_of_a_split_block_fires(ranks, kind, sp):
    for result in ranks(2, _both, kind, sp):
        check(*result)


SIZES = dict(vocab_size=32, max_positions=16, hidden_size=D, num_layers=2, num_heads=HEADS)
MODELS = {
    "gpt2": (GPT, GPTConfig(**SIZES), {}),
    "smallest": (GPT, GPTConfig(**SIZES, tie_embeddings=False), dict(saving="smallest")),
    "bert": (Bert, BertConfig(**SIZES), dict(masked_lm=True)),
}


def _model(world, name, sp):
    cls, config, options = MODELS[name]
    with default_dtype(torch.float64):
        model = cls(config, tp=None if world is None else make_tp(world, sp), **options)
    ids = torch.randint(32, (3, 5), generator=torch.Generator().manual_seed(1))

    def step():
        model.zero_grad()
        loss = model(ids, labels=ids, step=1).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    return around(model, step)


@pytest.mark.parametrize("name", MODELS)
def test_every_hook_of_a_model_fires(name):
    check(*_model(None, name, False))


@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no sp"])
@pytest.mark.parametrize("name", MODELS)
def test_every_hook_of_a_split_model_fires(ranks, name, sp):
    for result in ranks(2, _model, name, sp):
        check(*result)


@pytest.mark.parametrize("part", ["attention", "mlp.fc1", "attention_norm"])
def test_a_hook_that_changes_an_output_has_effect(part):
    block = make("pre-norm")
    x = torch.randn(SEQ * BATCH, D, dtype=torch.float64)
    plain = block(x, batch=BATCH, rng=make_rng(3, 5))
    block.get_submodule(part).register_forward_hook(lambda m, args, y: 0 * y)
    changed = block(x, batch=BATCH, rng=make_rng(3, 5))
    assert (changed - plain).abs().max() > 1e-3
    if part == "attention":
        h = x + block.mlp(block.attention_norm(x)) * 0
        assert changed.shape == h.shape


@pytest.mark.parametrize("layer", [ParallelMLP(D, 2 * D), ParallelAttention(D, HEADS)], ids=["mlp", "attention"])
def test_layers_alone(layer):
    fired, _ = listen(layer)
    layer(torch.randn(4, D, requires_grad=True), **(dict(batch=2) if hasattr(layer, "qkv") else {})).sum().backward()
    assert fired == all_of(layer)


def test_global_hooks():
    block, seen = make("pre-norm"), set()
    handle = torch_module.register_module_forward_hook(lambda m, *_: seen.add(m) and None)
    try:
        step(block)
    finally:
        handle.remove()
    assert seen == set(block.modules())


def test_the_dictionaries_of_torch_that_are_looked_at():
    for kind in ("forward", "forward_pre", "backward", "backward_pre"):
        assert hasattr(torch_module, f"_global_{kind}_hooks"), f"_global_{kind}_hooks"
        assert isinstance(getattr(nn.Linear(1, 1), f"_{kind}_hooks"), dict), f"_{kind}_hooks"


def test_pruning_trains_what_is_left():
    """A pruned weight is an attribute that a forward pre-hook makes anew."""
    block = make("pre-norm")
    x = torch.randn(SEQ * BATCH, D, dtype=torch.float64)
    prune.l1_unstructured(block.mlp.fc1, "weight", 0.5)
    for _ in range(2):
        block(x, batch=BATCH, rng=make_rng(3, 5)).square().sum().backward()
    grad, mask = block.mlp.fc1.weight_orig.grad, block.mlp.fc1.weight_mask
    assert grad.abs().sum() > 0 and (grad * (1 - mask) == 0).all()


def test_a_model_that_generates():
    cls, config, _ = MODELS["gpt2"]
    model, ids = cls(config).eval(), torch.randint(32, (2, 4))
    plain = model.generate(ids, max_new_tokens=4)
    fired, _ = listen(model)
    assert torch.equal(model.generate(ids, max_new_tokens=4), plain)
    assert {name for name, _ in fired} == {name for name, _ in all_of(model)}


def test_onlookers_change_nothing():
    block, seen = make("pre-norm"), []
    block.mlp.register_forward_hook(onlooker(lambda *_: seen.append(1)))
    with watch(block):
        assert not hooked(block)
        step(block)
    assert not seen


def _hooks_left(world):
    block = TransformerBlock(D, HEADS, tp=make_tp(world))
    kept = [name for name, part in block.named_modules() if part._forward_pre_hooks]
    return kept, hooked(block)


def test_parts_lose_the_hook_that_compares_calls(ranks):
    assert ranks(2, _hooks_left) == [([""], False)] * 2


@pytest.mark.slow
def test_compiled():
    """As torch has it: hooks that are there when a block is compiled run in the graph."""
    block, x = make("pre-norm"), torch.randn(SEQ * BATCH, D, dtype=torch.float64)
    call = dict(batch=BATCH, rng=make_rng(3, 5))
    block.mlp.register_forward_hook(lambda m, args, y: 2 * y)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert (compiled(x, **call) - block(x, **call)).abs().max() < 1e-12
