"""The loss of balance of a model with experts: transformers' value, and the same however a batch is split.

Spans: tpfuse/layers/balance.py, tpfuse/models/gpt.py and what carries sums from one block to the next.
"""

import pytest
import torch

from tests.common import assert_close, error
from tests.models.common import batch, gradients, make_tp, run
from tests.models.families import experts, test_mixtral
from tpfuse.layers import ExpertBalance
from tpfuse.models import GPT, Classifier, GPTConfig
from tpfuse.pipeline import Stage

F64 = torch.float64
SEQUENCE, BATCH = ExpertBalance("sequence", 0.5, 0.01), ExpertBalance("batch", 0.5)
saved = test_mixtral.saved


def config(**changes) -> GPTConfig:
    return GPTConfig.from_hf(experts.their_config("mixtral", **changes).to_dict())


def theirs(model, call, name="mixtral"):
    """The balance and gradients by transformers, whose sums are fp32 in an fp64 model too."""
    model.zero_grad()
    labels = torch.nn.functional.pad(call["labels"][:, 1:], (0, 1), value=-100)
    out = model(**{key: x for key, x in call.items() if key != "labels"}, output_router_logits=True)
    balance = BATCH.coefficient * out.aux_loss
    (torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten()) + balance).backward()
    grads = {f"d {key}": p.grad for key, p in model.named_parameters()}
    return balance.detach(), experts.an_expert_a_tensor(grads, name)


def ours(world, path, call):
    model = GPT.from_pretrained(path, tp=make_tp(world) if world else None, dtype=F64, balance=BATCH)
    out = model(**call)
    out.loss.backward()
    return out.balance_loss.detach(), {f"d {name}": g for name, g in gradients(model).items()}


@pytest.mark.parametrize("R, pad", [(1, "left"), (2, None), (4, "right")])
def test_values_and_gradients_are_those_of_transformers(ranks, saved, R, pad):
    model, path = saved
    call = batch(model.config, pad=pad)
    balance, exact = theirs(model, call)
    for found, values in ranks(R, ours, str(path), call):
        assert abs(found - balance) < 1e-6 and found > 0.4
        assert max(error(values[name], exact[name]) for name in values) < 1e-6


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe-mixed", "olmoe"])
def test_of_other_families(ranks, tmp_path, name):
    """Weights that are not divided by their sum, and of the layers with experts alone."""
    model = experts.theirs(name)
    model.save_pretrained(tmp_path)
    call = batch(model.config, pad="left")
    balance, exact = theirs(model, call, name)
    for found, values in ranks(2, ours, str(tmp_path), call):
        assert abs(found - balance) < 1e-6 and found > 0.4
        assert max(error(values[key], exact[key]) for key in values) < 1e-6


def test_a_config_may_ask_for_it():
    asks = config(output_router_logits=True, router_aux_loss_coef=0.25)
    assert GPT(asks).balance == ExpertBalance("batch", 0.25) and GPT(asks, balance=SEQUENCE).balance == SEQUENCE
    assert GPT(asks, lm_head=False).balance is None and GPT(config()).balance is None
    written = asks.to_hf()
    assert written["output_router_logits"] is True and written["router_aux_loss_coef"] == 0.25
    again = GPTConfig.from_hf(written)
    assert again.balanced and again.balance_coefficient == 0.25


def test_a_mistake_is_seen(saved, planted):
    model, path = saved
    call = batch(model.config)
    planted("tpfuse.models.gpt.balance_loss", lambda right, sums, *args, **named: right(sums[-1:], *args, **named))
    balance, exact = theirs(model, call)
    found, values = ours(None, str(path), call)
    assert abs(found - balance) > 1e-4 and max(error(values[name], exact[name]) for name in values) > 1e-4


COMPOSED = {
    "sequence parallel": (2, dict()),
    "replicated rows": (2, dict(sp=False)),
    "four": (4, dict()),
    "smallest": (2, dict(saving="smallest")),
    "full": (2, dict(recompute="full")),
    "full, one rank": (1, dict(recompute="full")),
}


@pytest.mark.parametrize("name", COMPOSED)
@pytest.mark.parametrize("balance", [SEQUENCE, BATCH], ids=["sequence", "batch"])
def test_composed(ranks, name, balance):
    """As on one rank, whatever is computed again in backward."""
    R, options = COMPOSED[name]
    sp = options.get("sp", True)
    options = {key: value for key, value in options.items() if key != "sp"} | dict(balance=balance)
    whole = config(num_key_value_heads=4)  # on four ranks too
    call = dict(batch(whole), step=3, first_sample=0)
    one, plain = (run(None, GPT, whole, call, options=o) for o in (dict(balance=balance), {}))
    assert abs(one["loss"] - plain["loss"]) > 0.1
    for found in ranks(R, run, GPT, whole, call, sp, F64, options):
        assert_close(found, one, F64)


def losses_and_gradient(model: GPT, calls):
    model.zero_grad()
    outputs = [model(**call) for call in calls]
    sum(output.loss for output in outputs).backward()
    return torch.stack([output.balance_loss for output in outputs]).sum(), model.blocks[0].mlp.router.grad.clone()


def test_micro_batches():
    """Of a sample each, with unequal numbers of labels; "batch" is of what a call has, and says so."""
    call = batch(config(), pad="right")
    labels = (call["labels"][:, 1:] != -100).sum()
    calls = [{key: value[i : i + 1] for key, value in call.items()} for i in range(3)]
    for balance, same in (SEQUENCE, True), (BATCH, False):
        model = GPT(config(), balance=balance).double()
        loss, gradient = losses_and_gradient(model, [call])
        split, of_split = losses_and_gradient(model, [dict(c, loss_normalizer=labels) for c in calls])
        assert (abs(split - loss) < 1e-12 and error(of_split, gradient) < 1e-11) == same


def test_reductions():
    """The loss of each label is without it; a sum has one as large as its cross entropy."""
    model, call = GPT(config(), balance=SEQUENCE).double(), batch(config())
    mean, total, each = (model(**call, reduction=reduction) for reduction in ("mean", "sum", "none"))
    labels = (call["labels"][:, 1:] != -100).sum()
    assert abs(total.balance_loss - labels * mean.balance_loss) < 1e-11
    assert abs(each.loss.sum() + total.balance_loss - total.loss) < 1e-11
    assert abs(each.balance_loss - mean.balance_loss) < 1e-14
    assert model(call["input_ids"]).balance_loss is None


def test_packed_documents_weigh_as_their_labels():
    model, ids = GPT(config(), balance=SEQUENCE).double(), batch(config(), size=1)["input_ids"]
    bounds = torch.tensor([0, 5, 7], dtype=torch.int32)
    packed = model(ids, labels=ids, cu_seqlens=bounds, max_seqlen=5).balance_loss
    alone = [model(part, labels=part).balance_loss for part in (ids[:, :5], ids[:, 5:])]
    assert abs(packed - (4 * alone[0] + 1 * alone[1]) / 5) < 1e-12


@pytest.mark.slow
def test_compiled():
    one_layer = config(num_hidden_layers=1)
    model, compiled = (GPT(one_layer, balance=SEQUENCE) for _ in range(2))
    call = batch(one_layer)
    compiled.compile(backend="aot_eager")
    eager = losses_and_gradient(model, [call])
    assert all(error(a, b) < 1e-5 for a, b in zip(losses_and_gradient(compiled, [call]), eager, strict=True))


# ---- what is refused ----


@pytest.mark.parametrize("change, message", [
    (dict(config=GPTConfig(vocab_size=9, max_positions=8, hidden_size=8, num_layers=1, num_heads=2)), "needs experts"),
    (dict(lm_head=False), "needs the language-model head"),
    (dict(classifier=Classifier(2)), "needs the language-model head"),
    (dict(balance=ExpertBalance("none")), "kind must be one of sequence, batch, got 'none'"),
    (dict(stage=Stage(0, 2), balance=BATCH), "over pipeline stages balance must be of kind 'sequence'"),
])  # fmt: skip
def test_what_is_refused(change, message):
    with pytest.raises(ValueError, match=f"GPT: .*{message}"):
        GPT(**dict(config=config(), balance=SEQUENCE) | change)


def of_unlike_balance(world):
    with pytest.raises(ValueError) as found:
        GPT(config(), tp=make_tp(world), balance=SEQUENCE if world.rank else BATCH)
    return str(found.value)


def test_ranks_that_disagree(ranks):
    for message in ranks(2, of_unlike_balance):
        assert message.startswith("GPT: balance must be the same on every tensor-parallel rank")
