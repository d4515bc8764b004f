"""The table of wirings: its steps at every place, and blocks and stacks of each against equations in plain torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.common import assert_close, make_tp, my_rows
from tests.layers.sharded import Case, build, compare, data, reference, run, step
from tpfuse.kernels.runtime.philox import make_rng
from tpfuse.layers import LayerNorm, Normed, TransformerBlock
from tpfuse.layers.wiring import (
    PLACES,
    WIRINGS,
    Branch,
    Join,
    Norm,
    enters,
    first_branch,
    norm_names,
    run_backward,
    steps_at,
    without_last_norm,
)
from tpfuse.layers.wiring import run as run_steps

F64 = torch.float64

# ---- the table ----


def spelled(step):
    """A step in words; parentheses are a norm's."""
    if isinstance(step, Norm):
        return f"{step.to} <- {step.norm}(h)"
    if isinstance(step, Branch):
        return step.name
    branch = step.branch if step.branch_norm is None else f"{step.branch_norm}({step.branch})"
    total = f"h + {branch}" if step.norm is None else f"{step.norm}(h + {branch})"
    return f"{step.to} <- {'h = ' * step.stream}{total}"


ATTENTION, MLP = "attention", "mlp"
PRE = ATTENTION, "mlp <- attention_norm(h + attention)", MLP
SANDWICH = ATTENTION, "mlp <- attention_norm(h + attention_branch_norm(attention))", MLP
BRANCH = ATTENTION, "mlp <- h + attention_branch_norm(attention)", MLP
PARALLEL = "mlp <- attention_norm(h)", ATTENTION, "None <- h + attention", MLP
POST = ATTENTION, "mlp <- h = attention_norm(h + attention)", MLP, "next <- h = mlp_norm(h + mlp)"
NORM_IN = "attention <- input_norm(h)"
PRE_STACK = *PRE, "next <- mlp_norm(h + mlp)"
SANDWICH_STACK = *SANDWICH, "next <- mlp_norm(h + mlp_branch_norm(mlp))"
PARALLEL_STACK = *PARALLEL, "next <- mlp_norm(h + mlp)"
STEPS = {
    ("pre", "alone"): (NORM_IN, *PRE, "next <- h + mlp"),
    ("pre", "inner"): PRE_STACK,
    ("pre", "last"): PRE_STACK,
    ("post", "alone"): POST,
    ("post", "inner"): POST,
    ("post", "last"): POST,
    ("sandwich", "alone"): (NORM_IN, *SANDWICH, "next <- h + mlp_branch_norm(mlp)"),
    ("sandwich", "inner"): SANDWICH_STACK,
    ("sandwich", "last"): SANDWICH_STACK,
    ("branch", "alone"): (*BRANCH, "next <- h + mlp_branch_norm(mlp)"),
    ("branch", "inner"): (*BRANCH, "next <- h + mlp_branch_norm(mlp)"),
    ("branch", "last"): (*BRANCH, "next <- mlp_norm(h + mlp_branch_norm(mlp))"),
    ("parallel", "alone"): (NORM_IN, *PARALLEL, "next <- h + mlp"),
    ("parallel", "inner"): PARALLEL_STACK,
    ("parallel", "last"): PARALLEL_STACK,
}
NORMS = {
    ("pre", "alone"): ("input_norm", "attention_norm"),
    ("pre", "inner"): ("attention_norm", "mlp_norm"),
    ("post", "alone"): ("attention_norm", "mlp_norm"),
    ("sandwich", "alone"): ("input_norm", "attention_branch_norm", "attention_norm", "mlp_branch_norm"),
    ("sandwich", "last"): ("attention_branch_norm", "attention_norm", "mlp_branch_norm", "mlp_norm"),
    ("branch", "inner"): ("attention_branch_norm", "mlp_branch_norm"),
    ("branch", "last"): ("attention_branch_norm", "mlp_branch_norm", "mlp_norm"),
    ("parallel", "alone"): ("input_norm", "attention_norm"),
    ("parallel", "last"): ("attention_norm", "mlp_norm"),
}


def test_the_steps_of_every_wiring_at_every_place():
    table = {(wiring, place): steps_at(wiring, place) for wiring in WIRINGS for place in PLACES}
    assert {key: tuple(map(spelled, steps)) for key, steps in table.items()} == STEPS
    assert {key: tuple(norm_names(table[key])) for key in NORMS} == NORMS
    assert [wiring for wiring in WIRINGS if enters(wiring)] == ["pre", "sandwich", "parallel"]
    assert {first_branch(steps) for steps in table.values()} == {"attention"}


@pytest.mark.parametrize("wiring, place", STEPS)
def test_a_block_without_its_last_norm_ends_in_the_sum(wiring, place):
    *before, end = steps_at(wiring, place)
    *same, cut = without_last_norm((*before, end))
    assert same == before and cut.norm is None and cut == end._replace(norm=None)


class Symbols:
    """A runner on words: each says what it is computed from."""

    def norm(self, step, h):
        return h, f"{step.norm}({h})"

    def branch(self, step, n):
        return f"{step.name}({n})"

    def join(self, step, parts, h):
        return f"{h}+{parts}", f"n{step.branch}"


class Adjoints:
    """Its adjoint: a gradient names the steps that added to it, each with what it was handed."""

    def norm(self, step, dh, dn):
        return f"{dh} {step.norm}:{dn}"

    def branch(self, step, dparts):
        return f"{step.name}'"

    def join(self, step, dh, dn):
        return f"{dh} {step.branch}:{dn}", None


@pytest.mark.parametrize(
    "wiring, place, h, gradients",
    [
        ("pre", "inner", "h+attention(n)+mlp(nattention)", ("dh mlp:dn attention:mlp'", "attention'")),
        (
            "pre",
            "alone",
            "h+attention(input_norm(h))+mlp(nattention)",
            ("dh mlp:dn attention:mlp' input_norm:attention'", None),
        ),
        (
            "parallel",
            "inner",
            "h+attention(n)+mlp(attention_norm(h))",
            ("dh mlp:dn attention:None attention_norm:mlp'", "attention'"),
        ),
    ],
)
def test_a_branch_reads_what_is_made_for_it_and_its_gradient_goes_there(wiring, place, h, gradients):
    steps = steps_at(wiring, place)
    assert run_steps(steps, Symbols(), "h", "n") == (h, "nmlp")
    assert run_backward(steps, Adjoints(), "dh", "dn") == gradients


# ---- equations ----

ALONE = Case(TransformerBlock, (16, 4, 20), (8, 16), (8, 16), dict(activation="gelu"), dict(batch=2))


def plain_attention(layer, n, batch):
    """Plain torch on the layer's own weights; rows s * batch + b."""
    w, b = layer.qkv.weight, layer.qkv.bias
    qkv = F.linear(n, w.flatten(0, 2), b.flatten()).view(-1, batch, *w.shape[:3])  # [S, B, H, 3, E]
    q, k, v = qkv.permute(3, 1, 2, 0, 4)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(o.permute(2, 0, 1, 3).reshape(len(n), -1), layer.out.weight, layer.out.bias)


def plain_mlp(layer, n):
    return F.linear(F.gelu(F.linear(n, layer.fc1.weight, layer.fc1.bias)), layer.fc2.weight, layer.fc2.bias)


def equations(block, wiring, x):
    """The block of the paper that wiring.py cites, from norm, attention and MLP in plain torch."""
    norm = lambda name, t: F.layer_norm(
        t, t.shape[-1:], (m := getattr(block, name)).weight, getattr(m, "bias", None), m.eps
    )
    attention, mlp = (lambda n: plain_attention(block.attention, n, 2)), (lambda n: plain_mlp(block.mlp, n))
    if wiring == "parallel":
        return x + attention(norm("input_norm", x)) + mlp(norm("attention_norm", x))
    if wiring == "pre":
        h = x + attention(norm("input_norm", x))
        return h + mlp(norm("attention_norm", h))
    if wiring == "post":
        h = norm("attention_norm", x + attention(x))
        return norm("mlp_norm", h + mlp(h))
    if wiring == "sandwich":
        h = x + norm("attention_branch_norm", attention(norm("input_norm", x)))
        return h + norm("mlp_branch_norm", mlp(norm("attention_norm", h)))
    h = x + norm("attention_branch_norm", attention(x))
    return h + norm("mlp_branch_norm", mlp(h))


def exact(block, wiring, x, dy):
    return reference(lambda x: equations(block, wiring, x), x, dy, dict(block.named_parameters()))


@pytest.mark.parametrize("wiring", WIRINGS)
def test_a_block_is_its_equations(ranks, wiring):
    """As one node of autograd, as ops of which each is one, and over two ranks."""
    case = ALONE(wiring=wiring)
    block, (x, dy) = build(case, None, F64), data(case, F64)
    values = exact(block, wiring, x, dy)
    weights = {name: p.detach() for name, p in block.named_parameters()}
    for saving in "fastest", "smallest":
        assert_close(step(build(case(saving=saving), None, F64), case, x, dy), values, F64)
    compare(case, F64, (values, weights), ranks(2, run, case, True, F64, x, dy))


def swapped(steps, one, other):
    """The same steps, with two norms in each other's place."""
    names = {one: other, other: one}
    return tuple(type(step)(*(names.get(field, field) for field in step)) for step in steps)


pre, post, sandwich, branch, parallel = WIRINGS.values()
MISTAKES = {
    "pre: norms swapped": ("pre", swapped(pre, "attention_norm", "input_norm")),
    "pre: branches side by side": ("pre", parallel),
    "post: n is not the stream": ("post", (post[0], post[1]._replace(stream=False), *post[2:])),
    "post: norms swapped": ("post", swapped(post, "attention_norm", "mlp_norm")),
    "sandwich: norms of branches swapped": ("sandwich", swapped(sandwich, "attention_branch_norm", "mlp_branch_norm")),
    "sandwich: a branch's norm is left out": (
        "sandwich",
        (*sandwich[:2], sandwich[2]._replace(branch_norm=None), *sandwich[3:]),
    ),
    "branch: norms swapped": ("branch", swapped(branch, "attention_branch_norm", "mlp_branch_norm")),
    "parallel: norms swapped": ("parallel", swapped(parallel, "attention_norm", "input_norm")),
    "parallel: the MLP reads the sum": (
        "parallel",
        (parallel[0], parallel[2], Join("attention", "attention_norm", to="mlp"), *parallel[4:]),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_wiring_is_seen(monkeypatch, mistake):
    wiring, steps = MISTAKES[mistake]
    case = ALONE(wiring=wiring)
    right, (x, dy) = build(case, None, F64), data(case, F64)
    values = exact(right, wiring, x, dy)
    monkeypatch.setitem(WIRINGS, wiring, steps)
    block = build(case, None, F64)
    absent = [name for name in values.keys() - {"x", "y"} if name not in dict(block.named_parameters())]
    block.load_state_dict({name: w for name, w in right.state_dict().items() if name not in absent})
    for p in block.parameters():
        p.grad = torch.zeros_like(p)
    y = step(block, case, x, dy)["y"]
    with pytest.raises(AssertionError, match="'y'"):
        assert_close({"y": y}, {"y": values["y"]}, F64)


# ---- stacks ----


def stack_and_blocks(world, wiring):
    """Blocks stacked, inner and last, and the same blocks alone one after another: their values and gradients."""
    tp = make_tp(world) if world else None
    make = lambda **options: build(ALONE(wiring=wiring, dropout=0.1, attention_dropout=0.1, **options), tp, F64)
    stack = nn.ModuleList(make(layer=i, place=place) for i, place in enumerate(("inner", "inner", "last")))
    alone = nn.ModuleList(make(layer=i) for i in range(3))
    entry = build(Case(LayerNorm, (16,), (), ()), tp, F64)
    sources = {f"0.input_norm.{leaf}": p for leaf, p in entry.named_parameters()}  # of the blocks' alone
    for name, p in stack.named_parameters():
        i, _, rest = name.partition(".")
        if enters(wiring) and rest.startswith("mlp_norm"):  # block i owns the norm that enters the next
            rest, i = rest.replace("mlp_norm", "input_norm"), int(i) + 1
        sources[f"{i}.{rest}"] = p
    with torch.no_grad():
        for name, p in alone.named_parameters():
            p.copy_(sources[name])
    x, dy = (my_rows(t, alone[0].tp) for t in data(ALONE, F64))
    x, call = x.clone().requires_grad_(), dict(batch=2, rng=make_rng(7, 3))
    y = x
    for block in alone:
        y = block(y, **call)
    gradients = torch.autograd.grad(y, [x, *alone.parameters()], dy)
    h, normed = x, Normed((entry(x) if enters(wiring) else x).expand(alone[0].tp.size, *x.shape))
    for block in stack:
        h, normed = block(h, normed, **call)
    stacked = torch.autograd.grad(h, [x, *(sources[name] for name, _ in alone.named_parameters())], dy)
    names = "x", *(name for name, _ in alone.named_parameters())
    last = stack[-1].mlp_norm
    n = h if wiring == "post" else F.layer_norm(h, (16,), last.weight, last.bias, last.eps)
    return (y, dict(zip(names, gradients))), (h, dict(zip(names, stacked))), (normed.rows, n)


@pytest.mark.parametrize("wiring", WIRINGS)
def test_a_stack_is_the_same_blocks_alone(ranks, wiring):
    """Block i owns its first norm, or block i - 1 does: the same values, masks and gradients.  The n that leaves the
    last block is the final norm of h."""
    for (y, gradients), (h, stacked), (n, normed) in [
        stack_and_blocks(None, wiring),
        *ranks(2, stack_and_blocks, wiring),
    ]:
        assert torch.equal(h, y)
        assert_close({"n": n, **stacked}, {"n": normed, **gradients}, F64)
