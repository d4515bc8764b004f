"""Models over context-parallel ranks against one process, in fp64 with dropout: loss, hidden states, every gradient.

The kinds are those whose bits are compared elsewhere: every family, adapters, hooks, experts, odd sizes.

Spans: tpfuse/sequence_parallel/context.py, and all that uses the rows of a piece.
"""

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from bench.bits.kinds import ADAPTED_KINDS, ALL_KINDS, MakeKind
from tests.common import error
from tests.models.common import gradients, whole_logits
from tests.planted import Mistaken
from tpfuse import TensorParallel
from tpfuse.layers import TransformerBlock, VocabParallelEmbedding
from tpfuse.layers.expert_ranks import expert_ranks
from tpfuse.layers.shards import named_specs
from tpfuse.models import GPT, BertConfig
from tpfuse.models.files.write import full_tensor

NOISE = 1e-15  # gradients of key biases, which softmax does not see, are rounding alone
MASK = torch.arange(13)[None] >= torch.tensor([[0], [3], [6]])
FORMS = {
    "odd": dict(shape=(3, 13)),  # pieces of 7 and 6, or 4, 4, 4 and 1 positions
    "key mask": dict(shape=(3, 13), attention_mask=MASK),
    "packed": dict(shape=(1, 31), cu_seqlens=torch.tensor([0, 10, 17, 29], dtype=torch.int32)),  # across pieces
}
LAYOUTS = {  # tensor- and context-parallel ranks, sequence parallelism, kind, overlap: three ways in turn
    "1x2": (1, 2, True, "heads"),
    "1x2 keys": (1, 2, True, "keys"),
    "1x2 rounds": (1, 2, True, "heads", "pairwise"),
    "2x2": (2, 2, True, "heads"),
    "2x2 keys": (2, 2, True, "keys"),
    "2x2 rounds": (2, 2, True, "heads", "pairwise"),
    "1x4": (1, 4, True, "heads"),
    "1x4 keys": (1, 4, True, "keys"),
    "2x2 no sp": (2, 2, False, "auto"),
    "2x1 keys": (2, 1, True, "keys"),  # a group of one, whose sums are those of several
}
DAILY = [
    ("gpt2 odd", "packed", "1x2"),
    ("gpt2", "odd", "1x2 rounds"),
    ("qwen3 odd", "odd", "2x2"),
    ("gemma odd", "odd", "1x4 keys"),
    ("qwen2 moe odd lora", "odd", "2x2 keys"),
    ("qwen3 odd", "packed", "2x1 keys"),
    ("bert odd", "key mask", "2x2 no sp"),
]
UNPACKED = [kind for kind, config in ALL_KINDS.items() if isinstance(config, BertConfig) and config.rope is None]


def adapters(model):
    """Every gradient of an adapter as a full tensor."""
    return {name: full_tensor(p.grad, s, tp) for name, p, s, tp in named_specs(model) if p.requires_grad}


def results(kind, form, saving, tp):
    model = MakeKind(kind, torch.float64, saving)(tp).train()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora.B" in name:  # begins at 0, and A's gradients with it
                p += 0.01
    call = dict(FORMS[form])
    shape = call.pop("shape")
    ids = torch.randint(90, shape, generator=torch.Generator().manual_seed(0))
    out = model(ids, labels=ids, step=3, first_sample=2, return_logits=True, output_hidden_states=True, **call)
    out.loss.backward()
    named = adapters(model) if kind in ADAPTED_KINDS else gradients(model)
    states = {f"hidden_states.{i}": h.detach() for i, h in enumerate(out.hidden_states)}
    logits = whole_logits(out.logits, model.config.vocab_size, tp)
    return dict(loss=out.loss.detach(), logits=logits) | states | named


def ranks_of(world, layout):
    tensor, context, sp, cp_kind, *overlap = LAYOUTS[layout]
    mesh = world.pieces(1, context, tensor)
    overlap = overlap[0] if overlap else "auto"
    return TensorParallel(mesh["tp"], sequence_parallel=sp, cp=mesh["cp"], cp_kind=cp_kind, overlap=overlap)


def on_ranks(world, kind, form, saving, layout):
    return results(kind, form, saving, ranks_of(world, layout))


@functools.cache
def one(kind, form, saving):
    return results(kind, form, saving, TensorParallel())


def compare(ranks, kind, form, layout, saving="fastest", function=on_ranks):
    tensor, context, *_ = LAYOUTS[layout]
    exact = one(kind, form, saving)
    for got in ranks(tensor * context, function, kind, form, saving, layout):
        assert got.keys() == exact.keys()
        errors = {name: error(got[name], exact[name]) for name in exact if exact[name].abs().max() > NOISE}
        wrong = {name: e for name, e in errors.items() if not e <= 1e-10}
        assert len(errors) > len(exact) - 5 and not wrong, wrong


@pytest.mark.parametrize("kind, form, layout", DAILY)
def test_one_process(ranks, kind, form, layout):
    compare(ranks, kind, form, layout)


def every():
    """Each kind by each of the three ways, the third rarely, at the sizes of one kind in three."""
    for n, kind in enumerate(ALL_KINDS):
        forms = [form for form in FORMS if form != "packed" or kind not in UNPACKED]
        for i, layout in enumerate([*LAYOUTS][n % 3 * 3 :][:3], n):
            case = kind, forms[i % len(forms)], layout, ("fastest", "smallest")[i % 2]
            yield pytest.param(*case, marks=[pytest.mark.rare] * (i - n == 2))


@pytest.mark.slow
@pytest.mark.parametrize("kind, form, layout, saving", [*every()])
def test_every_kind(ranks, kind, form, layout, saving):
    compare(ranks, kind, form, layout, saving)


def not_summed(right, x, tp):
    """Weights as they are: their gradients stay sums over one piece."""
    return x


@pytest.mark.parametrize("target", ["tpfuse.layers.linear.on_pieces", "tpfuse.layers.embedding.on_pieces"])
def test_gradients_of_pieces_are_seen(ranks, target):
    with pytest.raises(AssertionError, match="weight"):
        compare(ranks, "gpt2 odd", "odd", "1x2", function=Mistaken(on_ranks, target, not_summed))


# ---- training ----

STEPS = 50


def curve(tp):
    """-> the losses of steps of AdamW on strings of a language of 90 words, of each of which three may follow."""
    g = torch.Generator().manual_seed(0)
    follow = torch.randint(90, (90, 3), generator=g)
    model = MakeKind("qwen3 odd", torch.float64, "fastest")(tp).train()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        ids = [torch.randint(90, (4,), generator=g)]
        for _ in range(28):
            ids.append(follow[ids[-1], torch.randint(3, (4,), generator=g)])
        ids = torch.stack(ids, 1)
        loss = model(ids, labels=ids, step=step).loss
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@functools.cache
def one_curve():
    return curve(TensorParallel())


def curve_on_ranks(world, layout):
    return curve(ranks_of(world, layout))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [n if n in ("2x2 keys", "1x4") else pytest.param(n, marks=pytest.mark.rare) for n in LAYOUTS]
)
def test_a_curve_of_losses(ranks, layout):
    """The same steps at every layout, with dropout, as many as make a mistake in one of them grow."""
    exact, (tensor, context, *_) = one_curve(), LAYOUTS[layout]
    assert exact[-1] < exact[0] - 1
    for losses in ranks(tensor * context, curve_on_ranks, layout):
        assert error(losses, exact) <= 1e-9, (losses - exact).abs()


# ---- bad input, on every rank ----


def refusals(world):
    """-> what each wrong call says here; the model goes on after all of them."""
    mesh = world.pieces(1, 2, 2)
    tp = TensorParallel(mesh["tp"], sequence_parallel=True, cp=mesh["cp"], cp_kind="heads")
    config, odd = ALL_KINDS["gpt2"], world.rank == 3
    model, ids = GPT(config, tp=tp).train(), torch.arange(12).view(2, 6)
    calls = dict(
        ids=lambda: model(ids + odd, labels=ids),
        shape=lambda: model(ids[:, : 6 - odd], labels=ids[:, : 6 - odd]),
        mask=lambda: model(ids, attention_mask=torch.ones_like(ids) if odd else None),
        mode=lambda: model.train(not odd)(ids, labels=ids),
        step=lambda: model.train()(ids, labels=ids, step=int(odd)),
        seed=lambda: GPT(config, tp=tp, seed=int(odd)),
        heads=lambda: GPT(replace(config, num_heads=2, num_layers=1), tp=tp),
        generate=lambda: model.eval().generate(ids, max_new_tokens=1),
        experts=lambda: expert_ranks("GPT", dist.group.WORLD, tp),
    )
    found = {name: said(call) for name, call in calls.items()}
    model.train()(ids, labels=ids, step=0).loss.backward()
    return found


def said(call):
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def test_what_differs_over_pieces_is_said_on_every_rank(ranks):
    same = "must be the same on every tensor- and context-parallel rank"
    for found in ranks(4, refusals):
        for name, key in dict(ids="input_ids", shape="input_ids", mask="attention_mask", step="step").items():
            assert f"{key}{' and labels' * (name == 'shape')} {same}" in found[name], found[name]
        assert f"training and parts in another mode {same}" in found["mode"] or f"training {same}" in found["mode"]
        assert f"GPT: seed {same}" in found["seed"]
        assert "1 query heads in 1 groups a tensor-parallel rank are not divisible" in found["heads"]
        assert found["generate"].startswith("generate: tokens come one by one")
        assert "experts over replicas are not built for cp=" in found["experts"]


def alone(world, sp):
    """A block alone, whose rows are other ones on every rank, and a layer without its neighbours' ids."""
    mesh = world.pieces(1, 2, 1)
    tp = TensorParallel(mesh["tp"], sequence_parallel=sp, cp=mesh["cp"])
    torch.manual_seed(0)
    block, head = TransformerBlock(16, 2, tp=tp), VocabParallelEmbedding(11, 16, tp=tp)
    rows = head(torch.arange(3) + 3 * world.rank)
    wrong = said(lambda: block(rows, batch=1, rng=torch.tensor([0, world.rank, 0])))
    short = said(lambda: block(rows, batch=1, seq=8))
    return block(rows, batch=1).detach(), wrong, short


@pytest.mark.parametrize("sp", [True, False])
def test_layers_alone(ranks, sp):
    torch.manual_seed(0)
    block, head = TransformerBlock(16, 2), VocabParallelEmbedding(11, 16)
    exact = block(head(torch.arange(6)), batch=1)
    first, second = ranks(2, alone, sp)
    assert error(torch.cat([first[0], second[0]]), exact.detach()) <= 1e-6
    for _, wrong, short in (first, second):
        assert "TransformerBlock: rng must be the same on every context-parallel rank" in wrong
        assert "x has 6 rows over the ranks, which must be at least seq * batch = 8" in short
