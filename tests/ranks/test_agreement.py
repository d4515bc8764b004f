"""Ranks that disagree are told so: one ValueError on every rank, with each rank's value, before anything travels."""

import contextlib
import dataclasses
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpfuse
from tests.common import make_tp
from tests.models.common import GPT_CONFIG, MODELS, batch
from tpfuse import TensorParallel, clip_grad_norm_
from tpfuse.collectives import reduce
from tpfuse.layers import ColumnParallelLinear, ParallelMLP, RowParallelLinear, TransformerBlock, VocabParallelEmbedding
from tpfuse.models import GPT, Bert
from tpfuse.ranks import agreement
from tpfuse.ranks.agreement import Agreement, Header, agree, any_rank, described
from tpfuse.ranks.messages import channel

BF16, F64 = torch.bfloat16, torch.float64
SAME = torch.arange(6).view(2, 3)


def refused(world, act):
    """The ValueError of ``act(differs)``, where ``differs`` holds on rank 1; no rank has been left behind."""
    with pytest.raises(ValueError) as caught:
        act(world.rank == 1)
    dist.barrier()
    return str(caught.value)


def alike(found, *said):
    """Every rank has said the same."""
    assert len(set(found)) == 1, found
    for words in said:
        assert re.search(words, found[0], re.DOTALL), found[0]


# ---- values ----


def values(world, others, x):
    return refused(world, lambda differs: agree(world.group, Header("f"), {"x": others if differs else x}))


@pytest.mark.parametrize(
    "x, other, said",
    [
        (1, 2, "f: x must be the same on every tensor-parallel rank, got rank 0: 1; rank 1: 2$"),
        (1, 1.0, "rank 0: 1; rank 1: 1.0"),
        (None, SAME, "rank 0: None; rank 1: torch.int64 "),
        (SAME, SAME + 1, r"rank 0: torch.int64 \(2, 3\) on cpu #\w{8}; rank 1: torch.int64 \(2, 3\) on cpu #"),
        (SAME, SAME.flip(1), "#"),
        (SAME, SAME + torch.tensor([[1, -2, 1], [0, 0, 0]]), "#"),  # the blind spot of a linear checksum
        (SAME, SAME.view(3, 2), r"rank 1: torch.int64 \(3, 2\)"),
        (SAME, SAME.int(), "rank 1: torch.int32"),
        (SAME > 2, SAME > 3, "torch.bool"),
        (torch.ones(3), torch.ones(3) * 1.1, r"rank 0: torch.float32 \(3,\) on cpu of 1, 1, 1"),
        (torch.ones(3), torch.ones(3).requires_grad_(), "requires grad"),
        (torch.tensor(2.0), torch.tensor(2.5), r"\(\) on cpu 2.0; rank 1: .* 2.5"),
        (torch.zeros(0), torch.zeros(0, 1), r"rank 1: torch.float32 \(0, 1\)"),
        (torch.ones(2), torch.tensor([1.0, torch.nan]), "nan"),
        (torch.ones(2, dtype=BF16), torch.ones(2, dtype=BF16) * 2, "bfloat16"),
    ],
)
def test_values_that_differ(ranks, x, other, said):
    alike(ranks(2, values, other, x), said)


def same_values(world):
    drawn = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    near = drawn + 1e-6 * world.rank  # another kernel's order of sums
    strided = SAME.repeat(1, 2)[:, ::2] if world.rank else SAME.repeat(1, 2)[:, ::2].contiguous()
    agree(world.group, Header("f"), dict(x=near, nan=torch.tensor([1, torch.nan]), strided=strided, f=print, none=None))


def test_rounding_and_strides_do_not_differ(ranks):
    ranks(3, same_values)


def two(world):
    return refused(world, lambda d: agree(world.group, Header("f", causes=(("b", "why"),)), dict(a=d, b=not d, c=3)))


def test_what_differs_is_a_table_with_the_cause(ranks):
    (said, _) = ranks(2, two)
    assert said == (
        "f: a and b must be the same on every tensor-parallel rank, got "
        "\n    a: rank 0: False; rank 1: True\n    b: rank 0: True; rank 1: False; why"
    )


def test_a_group_of_one_has_nothing_to_compare():
    agree(None, Header("f"), {"x": 1})
    assert any_rank(None, True) and not any_rank(None, False)


def any_of(world):
    return any_rank(world.group, world.rank == 1), any_rank(world.group, False)


def test_any_rank(ranks):
    assert ranks(3, any_of) == [(True, False)] * 3


# ---- a model's calls ----


def later(model, call, **changed):
    """Two calls that are alike, of two kinds, then one that differs."""
    model(**call)
    model(call["input_ids"])
    return model(**(call | changed))


def cut(call):
    return {key: x[:-1] for key, x in call.items()}


def shorter(call):
    return {key: x[:, 1:].contiguous() for key, x in call.items()}


def other(ids):
    return ids.where(ids != ids[0, 0], (ids[0, 0] + 1) % 50)


CALLS = {  # what rank 1 does otherwise: (call -> its changes, what is named)
    "ids": (lambda c: dict(input_ids=other(c["input_ids"])), "input_ids must .* sampler over the whole world"),
    "labels": (lambda c: dict(labels=other(c["labels"])), "labels must"),
    "no labels": (lambda c: dict(labels=None), "labels must .*rank 1: None"),
    "mask": (lambda c: dict(attention_mask=torch.ones_like(c["input_ids"])), "attention_mask must"),
    "no mask": (lambda c: dict(attention_mask=None), "attention_mask must"),
    "step": (lambda c: dict(step=7), "step must .*rank 0: None; rank 1: 7"),
    "sample": (lambda c: dict(first_sample=torch.tensor(3)), "first_sample must"),
    "normalizer": (lambda c: dict(loss_normalizer=3.0), "loss_normalizer must"),
    "logits": (lambda c: dict(return_logits=True), "return_logits must"),
    "positions": (lambda c: dict(position_ids=torch.zeros_like(c["input_ids"])), "position_ids must"),
    "batch": (cut, "input_ids and labels"),
    "length": (shorter, "input_ids and labels"),
    "dtype": (lambda c: dict(input_ids=c["input_ids"].int()), "input_ids must .*torch.int32"),
    "nonsense": (lambda c: dict(input_ids="tokens"), "input_ids must .*'tokens'"),
}


def model_call(world, name, first, sp=True):
    model, call = GPT(GPT_CONFIG, tp=make_tp(world, sp)), batch(GPT_CONFIG, pad="right")

    def do(differs):
        changed = CALLS[name][0](call) if differs else {}
        return model(**(call | changed)) if first else later(model, call, **changed)

    said = refused(world, do)
    state = int(model.step)
    model(**call)  # it goes on
    return said, state


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
@pytest.mark.parametrize("name", CALLS)
def test_calls_that_differ(ranks, name, first):
    found = ranks(2, model_call, name, first)
    alike([said for said, _ in found], "GPT: ", CALLS[name][1])
    assert {state for _, state in found} == {0 if first else 2}  # a call that was refused counts nothing


MODES = {
    "eval": (lambda model, stack: model.eval(), "training must .*rank 0: True; rank 1: False"),
    "a part in eval": (
        lambda model, stack: model.blocks[1].eval(),
        r"parts in another mode .*rank 1: 'blocks.1, .* and . more #",
    ),
    "frozen": (
        lambda model, stack: model.input_norm.weight.requires_grad_(False),
        "frozen parameters must .*rank 0: 'none #.*; rank 1: 'input_norm.weight #",
    ),
    "no grad": (lambda model, stack: stack.enter_context(torch.no_grad()), "grad mode must .*rank 1: False"),
    "autocast": (lambda model, stack: stack.enter_context(torch.autocast("cpu", BF16)), "autocast must .*bfloat16"),
    "checking": (lambda model, stack: stack.enter_context(tpfuse.checking()), "checking must"),
}


STATE = {  # what decides a call and is no argument of it, changed on rank 1 after the first call
    "a part in eval": (lambda model: model.blocks[1].eval(), "parts in another mode must"),
    "frozen": (lambda model: model.blocks[0].mlp.fc1.weight.requires_grad_(False), "frozen parameters must"),
    "dtype": (lambda model: model.to(BF16), "parameters of torch.float32 and parameters of torch.bfloat16 must"),
    "dtype of a part": (lambda model: model.blocks[0].to(F64), "parameters of torch.float64"),
    "dropout": (lambda model: setattr(model.blocks[0], "dropout", 0.5), "parts with dropout=0.5"),
    "attention dropout": (lambda model: setattr(model.blocks[0].attention, "dropout", 0.5), "parts with dropout=0.5"),
    "step": (lambda model: model.step.add_(1), "model.step must .*rank 0: 2; rank 1: 3"),
    "a step of one's own": (lambda model: setattr(model, "step", torch.tensor(9)), "model.step must .*rank 1: 9"),
    "seed": (lambda model: setattr(model, "seed", 1), "model.seed must .*rank 0: 0; rank 1: 1"),
}


def state_changed(world, name):
    model, call = GPT(dataclasses.replace(GPT_CONFIG, dropout=0.1), tp=make_tp(world, False)), batch(GPT_CONFIG)
    for _ in range(2):
        model(**call)
    return refused(world, lambda differs: (STATE[name][0](model) if differs else 0, model(**call)))


@pytest.mark.parametrize("name", STATE)
def test_state_that_differs_at_a_later_call(ranks, name):
    alike(ranks(2, state_changed, name), "GPT: ", STATE[name][1])


def crossed(world):
    models, call = [GPT(GPT_CONFIG, tp=make_tp(world, False), seed=seed) for seed in (0, 0)], batch(GPT_CONFIG)
    for model in models:
        model(**call)
    said = refused(world, lambda differs: models[differs](**call))
    return said, [model(**call).loss.item() for model in models]


def test_two_models_in_another_order(ranks):
    found = ranks(2, crossed)
    alike([said for said, _ in found], "GPT: which model, in the order .* must .*rank 0: ")


def crossed_backward(world):
    models, call = [GPT(GPT_CONFIG, tp=make_tp(world, False)) for _ in range(2)], batch(GPT_CONFIG)
    with tpfuse.checking():
        losses = [model(**call).loss for model in models]
    said = refused(world, lambda differs: losses[differs].backward(retain_graph=True))
    for loss in losses:
        loss.backward()
    return said


def test_two_backward_passes_in_another_order_under_checking(ranks):
    alike(ranks(2, crossed_backward), "GPT: the backward pass of which model, in the order .* must .*rank 0: ")


def mode(world, name, first, always):
    model, call = GPT(GPT_CONFIG, tp=make_tp(world)), batch(GPT_CONFIG)
    with contextlib.ExitStack() as stack:
        if always:
            stack.enter_context(tpfuse.checking())
        if not first:
            model(**call)

        def do(differs):
            if differs:
                MODES[name][0](model, stack)
            model(**call)

        return refused(world, do)


@pytest.mark.parametrize("name", MODES)
def test_modes_that_differ(ranks, name):
    alike(ranks(2, mode, name, True, False), MODES[name][1])


@pytest.mark.parametrize("name", [name for name in MODES if name != "checking"])
def test_under_checking_later_calls_are_compared_whole(ranks, name):
    alike(ranks(2, mode, name, False, True), MODES[name][1])


def bert(world):
    cls, config, options = MODELS["bert"]
    model = cls(config, tp=make_tp(world), **options)
    types = torch.zeros_like(batch(config)["input_ids"])
    return refused(world, lambda differs: model(**batch(config), token_type_ids=types + differs))


def test_bert(ranks):
    assert MODELS["bert"][0] is Bert
    alike(ranks(2, bert), "Bert: token_type_ids must")


GENERATE = dict(seed=1, max_new_tokens=4, do_sample=True, temperature=0.5, top_k=3, top_p=0.5, repetition_penalty=1.5)
GENERATE |= dict(min_p=0.1, num_return_sequences=2, num_beams=2, length_penalty=0.5, early_stopping=True)
GENERATE |= dict(eos_token_id=3, pad_token_id=4, attention_mask=SAME.clamp(max=1), on_token=lambda token: None)


def generation(world, key):
    model = GPT(GPT_CONFIG, tp=make_tp(world))
    call = dict(input_ids=SAME, max_new_tokens=3)
    model.generate(**call)
    more = {"input_ids": SAME + 1} if key == "input_ids" else {key: GENERATE.get(key)}
    return refused(world, lambda differs: model.generate(**(call | (more if differs else {}))))


@pytest.mark.parametrize("key", ["input_ids", *(key for key in GENERATE if key != "on_token")])
def test_generation_that_differs(ranks, key):
    alike(ranks(2, generation, key), "GPT: .*" + {"eos_token_id": "eos", "pad_token_id": "pad"}.get(key, key))


def stopping(world):
    model, seen = GPT(GPT_CONFIG, tp=make_tp(world)), []
    model.generate(SAME, max_new_tokens=5, on_token=lambda token: seen.append(token) or (world.rank and len(seen) == 2))
    return len(seen)


def test_a_rank_that_stops_stops_all(ranks):
    assert ranks(2, stopping) == [2, 2]


# ---- what is made ----


def replicas(world, what):
    mesh = world.mesh(2, 2)
    tp, replica = TensorParallel(mesh["tp"]), mesh["dp"].get_local_rank()
    changed = {"seed": replica} if what == "seed" else {"saving": ("fastest", "smallest")[replica]}
    return refused(world, lambda differs: GPT(GPT_CONFIG, tp=tp, dp=mesh["dp"], **changed))


@pytest.mark.parametrize("what", ["seed", "saving"])
def test_replicas_that_differ(ranks, what):
    alike(ranks(4, replicas, what), f"GPT: {what} must be the same on every data-parallel rank, got rank 0: ")


def made(world, what):
    options = dict(overlap="off") if what == "overlap" else dict(sequence_parallel=True)
    return refused(world, lambda differs: TensorParallel(world.group, **(options if differs else {})))


@pytest.mark.parametrize("what", ["overlap", "sequence_parallel"])
def test_groups_that_differ(ranks, what):
    alike(ranks(2, made, what), f"TensorParallel: {what} must be the same")


# ---- layers on their own ----

X = torch.arange(4 * 8, dtype=torch.float32).view(4, 8)
LAYERS = {  # layer, its call, what rank 1 does otherwise, what is named
    "mlp": (lambda tp: ParallelMLP(8, 16, tp=tp), dict(x=X), dict(x=X + 1), "ParallelMLP: x must"),
    "dtype": (lambda tp: ParallelMLP(8, 16, tp=tp), dict(x=X), dict(x=X.to(F64)), "x must .*float64"),
    "rows": (lambda tp: ColumnParallelLinear(8, 16, tp=tp), dict(x=X), dict(x=X[1:]), r"x must .*\(3, 8\)"),
    "row": (lambda tp: RowParallelLinear(16, 8, tp=tp), dict(x=X), dict(x=X[1:]), r"RowParallelLinear: x must"),
    "ids": (lambda tp: VocabParallelEmbedding(50, 8, tp=tp), dict(ids=SAME), dict(ids=SAME + 1), "ids must"),
    "block": (
        lambda tp: TransformerBlock(8, 2, tp=tp),
        dict(h=X, batch=2, seq=2),
        dict(h=X, batch=1, seq=4),
        "TransformerBlock: batch and seq must",
    ),
}


def layer(world, name):
    make, call, changed, _ = LAYERS[name]
    torch.manual_seed(0)
    made = make(make_tp(world, False))
    return refused(world, lambda differs: made(**(changed if differs else call)))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_their_own(ranks, name):
    alike(ranks(2, layer, name), LAYERS[name][3])


def shards(world):
    """What may differ: rows of a sequence shard, columns of a row-parallel layer."""
    torch.manual_seed(0)
    ParallelMLP(8, 16, tp=make_tp(world, True))(X + world.rank)
    RowParallelLinear(16, 8, tp=make_tp(world, False))(X + world.rank)


def test_shards_may_differ(ranks):
    ranks(2, shards)


def in_one(world):
    """A layer's parts compare nothing, nor does a model's."""
    torch.manual_seed(0)
    block, model = TransformerBlock(8, 2, tp=make_tp(world)), GPT(GPT_CONFIG, tp=make_tp(world))
    parts = [*list(block.modules())[1:], *model.modules()]
    return block._agreement is not None, any(getattr(part, "_agreement", None) for part in parts if part is not model)


def test_the_outermost_layer_compares(ranks):
    assert ranks(2, in_one) == [(True, False)] * 2


# ---- functions ----


def summed(world, changed):
    tp = make_tp(world, False)
    reduce(X, tp)  # the first call of a kind is compared, and of each kind that comes later
    return refused(world, lambda differs: reduce(changed if differs else X.clone().requires_grad_(), tp))


@pytest.mark.parametrize("changed, said", [(X[1:], r"\(3, 8\)"), (X.to(BF16), "bfloat16"), (X.to(F64), "float64")])
def test_collectives_of_two_lengths(ranks, changed, said):
    """Which gloo ends by an abort of the process."""
    alike(ranks(2, summed, changed), f"all_reduce, backward identity: x must .*{said}")


def clipped(world, how):
    model = GPT(GPT_CONFIG, tp=make_tp(world))
    model(**batch(GPT_CONFIG)).loss.backward()
    clip_grad_norm_(model, 1.0)

    def act(differs):
        if differs and how == "gradient":
            model.input_norm.weight.grad = None
        clip_grad_norm_(model, 2.0 if differs and how == "max_norm" else 1.0)

    return refused(world, act)


@pytest.mark.parametrize(
    "how, said", [("gradient", "without a gradient must .*input_norm.weight"), ("max_norm", "max_norm")]
)
def test_clipping_that_differs(ranks, how, said):
    alike(ranks(2, clipped, how), f"clip_grad_norm_: .*{said}")


# ---- what it costs ----


def messages(world):
    compare, sent = Agreement(Header("f"), each_call=True), []
    links = channel(world.group)
    heads, gather = links._from_all, agreement.gather
    links._from_all = lambda row: sent.append(row.nbytes) or heads(row)
    with mock.patch.object(agreement, "gather", lambda *args, **call: sent.append("table") or gather(*args, **call)):
        for x in (SAME, SAME, SAME + 1):
            compare(world.group, dict(x=x), {})
    del links._from_all
    return sent


def test_a_known_kind_costs_24_bytes(ranks):
    assert ranks(2, messages) == [[24, "table", 24, 24, 24]] * 2


def test_what_has_no_words_is_its_type():
    assert described(object()).text == "a object" and described(BF16).text == "torch.bfloat16"
