"""Adapters beside parallel layers: sharded and whole, against torch on one process, what they cost, and training with
them."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from tests.common import Recorder, assert_close, assert_equal, error, make_tp
from tests.layers.sharded import Case, assert_seen, build, check, data, reference, step
from tests.models.common import GPT_CONFIG, batch, default_dtype
from tests.models.common import whole as parameters
from tests.models.families.test_llama_like import config_of
from tests.pipeline.common import said
from tpfuse import (
    TensorParallel,
    add_lora,
    as_dtensor,
    clip_grad_norm_,
    load_checkpoint,
    merge_lora,
    param_groups,
    save_checkpoint,
    unmerge_lora,
)
from tpfuse.layers import ColumnParallelLinear, RowParallelLinear, TransformerBlock, lora
from tpfuse.models import GPT

F64 = torch.float64


def adapted(cls, *targets):
    """``cls`` with adapters and nothing frozen, so that every gradient is there to compare; sharded.build gives B
    values."""

    def init(self, *args, **options):
        cls.__init__(self, *args, **options)
        add_lora(self, rank=3, alpha=6.0, targets=targets).requires_grad_(True)

    return type(f"Adapted{cls.__name__}", (cls,), dict(__init__=init, __module__=__name__))


Column, Row, Block = (
    adapted(ColumnParallelLinear, ""),
    adapted(RowParallelLinear, ""),
    adapted(TransformerBlock, *lora.TARGETS),
)
AdaptedColumnParallelLinear, AdaptedRowParallelLinear, AdaptedTransformerBlock = (
    Column,
    Row,
    Block,
)  # pickled by these names
BLOCK = dict(num_kv_heads=4, norm="rms", gated=True, activation="silu", bias=False, saving="smallest")
CASES = {  # 12, 24 and 4 kv heads divide by 4; a rank of 3 divides nothing
    "column": Case(Column, (10, 24), (8, 10), (8, 24), y_is="columns"),
    "column, a shape, gelu": Case(
        Column, (10, (4, 3, 2), False), (8, 10), (8, 24), dict(activation="gelu"), y_is="columns"
    ),
    "row": Case(Row, (12, 10), (8, 12), (8, 10), x_is="columns"),
    "block": Case(Block, (16, 8, 12), (8, 16), (8, 16), BLOCK, dict(batch=2)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("R, sp", [(1, False), (2, True), (4, True), (4, False)])
def test_sharded_is_whole(ranks, R, sp, case):
    check(ranks, case, R, sp, F64)


@pytest.mark.parametrize("name", ["column", "row"])
def test_equal_to_torch(name):
    case = CASES[name]
    layer = build(case, None, F64)
    x, dy = data(case, F64)
    merged = lambda: layer.weight + 6.0 / 3 * layer.lora.B @ layer.lora.A.view(3, -1)
    exact = reference(lambda x: F.linear(x, merged(), layer.bias), x, dy, dict(layer.named_parameters()))
    assert_close(step(layer, case, x, dy), exact, F64)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tensors_in_place_of_parameters(case):
    layer = build(case, None, F64)
    x, dy = data(case, F64)
    exact = layer(x, **case.call)
    exact.backward(dy)
    tensors = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    called = functional_call(layer, tensors, (x,), case.call)
    called.backward(dy)
    assert torch.equal(called, exact)
    assert_equal({name: t.grad for name, t in tensors.items()}, {name: p.grad for name, p in layer.named_parameters()})


def not_summed(right, x, tp):
    return x


@pytest.mark.parametrize("function, name, gradient", [("on_rows", "column", "lora.A"), ("copy", "row", "lora.B")])
def test_a_sum_left_out_is_seen(ranks, function, name, gradient):
    assert_seen(ranks, CASES[name], f"tpfuse.layers.lora.{function}", not_summed, gradient)


# ---- a model's ----


def model_of(world, config, sp=True, dtype=F64, rank=3, **options):
    with default_dtype(dtype):
        model = GPT(config, tp=None if world is None else make_tp(world, sp), seed=1)
    return add_lora(model, rank=rank, alpha=6.0, **options)


@torch.no_grad()
def randomized(model):
    """B is no longer zero; the same at every split."""
    for name, p in model.named_parameters():
        if "lora.B" in name:
            path, _, leaf = name.rpartition(".")
            spec = model.get_submodule(path).specs[leaf]
            full = torch.randn(spec.shape, generator=torch.Generator().manual_seed(len(name)), dtype=F64)
            p += 0.1 * full[spec.local(model.tp)]
    return model


def fresh(world, config, seed):
    """-> A of every layer, and the loss with adapters and without"""
    model, call = model_of(world, config, seed=seed).eval(), batch(config)
    start = {name: p for name, p in parameters(model).items() if ".lora.A" in name}
    with torch.no_grad():
        adapted = model(**call).loss
        for _, layer, _ in lora.adapted_layers(model):
            layer.lora = None
        return start, adapted, model(**call).loss


@pytest.mark.parametrize("config", [GPT_CONFIG, config_of("llama", 2)], ids=["gpt", "llama"])
def test_a_fresh_adapter_changes_nothing_and_does_not_know_the_split(ranks, config):
    """2 kv heads over 4 ranks are another layout of the weights, and of A it is not.  With an adapter a gated product
    is one GEMM in place of two (kernels/gemm/op.py), which may add in another order."""
    alike = lambda a, b: torch.equal(a, b) or config.gated and error(a, b) < 1e-15
    start, adapted, plain = fresh(None, config, 5)
    assert alike(adapted, plain) and len(start) == 8
    stds = {name: a.std().item() * (3 * a.shape[-1]) ** 0.5 for name, a in start.items()}
    assert all(0.7 < s < 1.3 for s in stds.values()), stds
    assert not any(
        torch.equal(a, b) for i, a in enumerate(start.values()) for b in list(start.values())[:i] if a.shape == b.shape
    )
    for R in (2, 4):
        for got, adapted, plain in ranks(R, fresh, config, 5):
            assert_equal(got, start)
            assert alike(adapted, plain)


def merged(world, config, sp, start=False):
    """The loss with adapters beside the weights, in them, and beside them again."""
    model = model_of(world, config, sp).eval()
    model = model if start else randomized(model)
    call = batch(config)
    with torch.no_grad():
        before, weights = model(**call).loss, parameters(model)
        inside = merge_lora(model)(**call).loss
        after = unmerge_lora(model)(**call).loss
    assert_close(parameters(model), weights, F64)
    return torch.stack([before, inside, after])


@pytest.mark.parametrize("R, sp", [(1, False), (2, True), (4, False)])
def test_merged_is_the_same_model(ranks, R, sp):
    """2 kv heads over 4 ranks too, whose adapters are other parameters here, with other random values."""
    config = config_of("llama", 2)
    plain, exact = merged(None, config, False, start=True)[0], merged(None, config, False)
    for got in ranks(R, merged, config, sp):
        assert error(got, got[:1].expand(3)) < 1e-10 and abs(got[0] - plain) > 1e-4
        assert R == 4 or error(got, exact) < 1e-10


def spied(world, sp):
    """-> shapes of the wgrads, and messages of forward and backward"""
    model = model_of(world, replace(GPT_CONFIG, dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0), sp)
    call = batch(GPT_CONFIG, size=2, seq=8)
    with Recorder() as seen:
        model(**call).loss.backward()
    assert all((p.grad is not None) == (".lora." in name) for name, p in model.named_parameters())
    return [tuple(c.outputs[0].shape) for c in seen.calls if c.name == "linear_wgrad"], [
        shape for _, shape, _ in seen.messages()
    ]


def test_what_is_frozen_costs_nothing(ranks):
    """Every wgrad is thin, and so is every message but the model's own: the embedding's exchange, 4 of whole rows a
    layer and way (but for the gradient of the first layer's input), and the head's.  Gathers for a frozen weight's
    wgrad would come on top."""
    for wgrads, messages in ranks(2, spied, True):
        assert len(wgrads) == 2 * 4 * 2 and all(min(shape) == 3 for shape in wgrads), wgrads
        sizes = [math.prod(shape) for shape in messages]
        rows = [n for n in sizes if n >= 8 * GPT_CONFIG.hidden_size]
        assert len(rows) == 1 + 2 * 4 + 1 + 1 + (2 * 4 - 1), messages
        assert max(n for n in sizes if n < 8 * GPT_CONFIG.hidden_size) == 3 * GPT_CONFIG.hidden_size


def test_an_update_that_16_bits_would_lose_is_not_lost():
    """One in the last place of bf16 weights, whose sum with W would be W."""
    torch.manual_seed(0)
    layer = add_lora(ColumnParallelLinear(64, 64, dtype=torch.bfloat16, init_std=1.0), rank=2, alpha=2.0, targets=[""])
    assert layer.lora.A.dtype == layer.lora.B.dtype == torch.float32
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        before = layer(x)
        layer.lora.B.normal_(std=3e-3)
        delta = layer.lora.deltas()["weight"]
        assert torch.equal((layer.weight.float() + delta).bfloat16(), layer.weight) or delta.abs().max() < 2**-6
        moved = layer.lora(x).double()
    assert error(moved, x.double() @ delta.double().T) < 2e-2
    assert layer(x).dtype == before.dtype == torch.bfloat16
    layer(x).sum().backward()
    assert layer.lora.B.grad.dtype == torch.float32 and layer.lora.B.grad.abs().max() > 0


@pytest.mark.slow
def test_autocast_and_compiled():
    """In 16 bit with gradients in fp32, near the fp32 ones; compiled as one graph, the same bits."""
    call = batch(GPT_CONFIG)
    model = randomized(model_of(None, GPT_CONFIG, dtype=torch.float32))
    exact = gradients(model, call)
    model.zero_grad()
    assert_equal(gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), call), exact)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients(model, call)
    assert all(g.dtype == torch.float32 and error(g, exact[name]) < 5e-2 for name, g in got.items()) and len(got) == 16


# ---- frozen parameters without adapters ----


def gradients(model, call):
    model(**call, step=0).loss.backward()
    return {name.removeprefix("_orig_mod."): p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("saving", ["fastest", "smallest"])
@pytest.mark.parametrize("kept", ["bias", "fc2.weight", "fc1.weight", "attention", "norm"])
def test_a_frozen_parameter_changes_no_other_gradient(kept, saving):
    with default_dtype(F64):
        model = GPT(GPT_CONFIG, saving=saving)
    call = batch(GPT_CONFIG)
    exact = {name: g for name, g in gradients(model, call).items() if kept in name}
    model.zero_grad()
    for name, p in model.named_parameters():
        p.requires_grad_(kept in name)
    assert_equal(gradients(model, call), exact)


# ---- training ----

SAMPLES = 4


class Tuning:
    """Adapters of a GPT with dropout on a (dp, tp) mesh, trained as anybody would."""

    def __init__(self, world, dp, size, sp):
        self.mesh, self.dp = world.mesh(dp, size), dp
        tp = TensorParallel(self.mesh["tp"], sequence_parallel=sp)
        with default_dtype(F64):
            self.model = GPT(replace(GPT_CONFIG, num_layers=1), tp=tp, dp=self.mesh["dp"])
        add_lora(self.model, rank=2, alpha=4.0, targets=("qkv", "fc2"))
        self.replica = self.model
        if dp > 1:
            self.replica = DistributedDataParallel(self.model, process_group=self.mesh["dp"].get_group())
        groups = param_groups(self.model, weight_decay=0.1)
        assert len(groups[0]["params"]) == 4 and not groups[1]["params"]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)

    def steps(self, first, last):
        norms = []
        for step_ in range(first, last):
            call = batch(self.model.config, size=SAMPLES, seed=step_)
            at = self.mesh["dp"].get_local_rank() * SAMPLES // self.dp
            mine = slice(at, at + SAMPLES // self.dp)
            normalizer = (call["labels"][:, 1:] != -100).sum().item() / self.dp
            call = {key: x[mine] for key, x in call.items()}
            self.replica(**call, step=step_, first_sample=at, loss_normalizer=normalizer).loss.backward()
            norms.append(clip_grad_norm_(self.model, 0.02).item())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return norms


def tuned(world, dp, tp, sp, path=None):
    """4 steps; with a path, the last two from a checkpoint that another world wrote."""
    tuning = Tuning(world, dp, tp, sp)
    if path is None:
        norms = tuning.steps(0, 4)
    else:
        assert load_checkpoint(path, tuning.model, tuning.optimizer)[0] == 2
        norms = tuning.steps(2, 4)
    return norms, parameters(tuning.model)


def half(world, dp, tp, path):
    tuning = Tuning(world, dp, tp, True)
    tuning.steps(0, 2)
    save_checkpoint(path, tuning.model, tuning.optimizer, step=2)


@pytest.mark.slow
def test_training_over_dp_and_tp_and_from_a_checkpoint(ranks, tmp_path):
    norms, exact = ranks(1, tuned, 1, 1, False)[0]
    assert min(norms) > 0.02  # clipping did something
    ranks(2, half, 1, 2, str(tmp_path))
    saved = str(tmp_path)
    for dp, tp, sp, path in ((2, 2, True, None), (1, 4, False, None), (1, 4, True, saved), (1, 1, False, saved)):
        for got_norms, got in ranks(dp * tp, tuned, dp, tp, sp, path):
            assert got_norms == pytest.approx(norms[-len(got_norms) :], rel=1e-8)
            for name, p in exact.items():
                assert error(got[name], p) < 1e-9, name
                assert ".lora." in name or torch.equal(got[name], p)  # what is frozen stays


# ---- errors ----


def of_dtensors(world):
    mesh = world.mesh(1, world.size)
    model = as_dtensor(GPT(GPT_CONFIG, tp=TensorParallel(mesh["tp"])), mesh)
    with pytest.raises(ValueError) as caught:
        add_lora(model, rank=2, alpha=4)
    assert all(p.requires_grad and ".lora." not in name for name, p in model.named_parameters())
    return str(caught.value)


def test_a_model_of_dtensors_is_refused(ranks):
    for message in ranks(2, of_dtensors):
        assert message.endswith("is a DTensor; call add_lora before as_dtensor and fully_shard")


def of_shards(world):
    mesh = world.mesh(2, 1)
    model = add_lora(GPT(GPT_CONFIG, tp=TensorParallel(mesh["tp"])), rank=1, alpha=4, targets=["fc1"])
    fully_shard(as_dtensor(model, mesh), mesh=mesh["dp"])
    before = [p.to_local().clone() for p in model.parameters()]
    error = said(lambda: merge_lora(model))
    return error, all(torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before, strict=True))


def test_shards_are_not_merged(ranks):
    for message, unchanged in ranks(2, of_shards):
        assert unchanged and "merge_lora: fully_shard holds" in message and "save_adapter, and merge it in" in message


def test_errors_are_named():
    model = GPT(GPT_CONFIG)
    with pytest.raises(
        ValueError, match="no layer is called q_proj; there are c_attn, c_fc, c_proj, fc1, fc2, out, qkv"
    ):
        add_lora(model, rank=2, alpha=4, targets=["qkv", "q_proj"])
    with pytest.raises(ValueError, match="dropout on an adapter's input is not built, got dropout=0.1"):
        add_lora(model, rank=2, alpha=4, dropout=0.1)
    with pytest.raises(ValueError, match="rank must be a positive integer, got 0"):
        add_lora(model, rank=0, alpha=4)
    with pytest.raises(ValueError, match="rank must be at most 65536, got 1000000000"):  # before it is allocated
        add_lora(model, rank=10**9, alpha=4)
    for targets in (None, [5], "qkv"):
        with pytest.raises(ValueError, match="targets must be names of layers, got"):
            add_lora(model, rank=2, alpha=4, targets=targets)
    with pytest.raises(ValueError, match="no layer is called anything"):
        add_lora(model, rank=2, alpha=4, targets=[])
    with pytest.raises(ValueError, match="Linear has no tensor-parallel linear layer"):
        add_lora(torch.nn.Linear(2, 2), rank=2, alpha=4)
    with pytest.raises(ValueError, match="merge_lora: the model has no adapters"):
        merge_lora(model)
    assert all(p.requires_grad for p in model.parameters())  # nothing has happened
    add_lora(model, rank=2, alpha=4)
    with pytest.raises(ValueError, match="the model has adapters already"):
        add_lora(model, rank=2, alpha=4)
    with pytest.raises(ValueError, match="unmerge_lora: the adapters are not merged already"):
        unmerge_lora(model)


def mistaken(world):
    """-> what is said where rank 1 alone is wrong: of a target, of a rank, of merging alone"""
    odd, model = world.rank == 1, GPT(GPT_CONFIG, tp=make_tp(world))
    errors = [said(lambda: add_lora(model, rank=2, alpha=4, targets=["nope" if odd else "qkv"]))]
    errors.append(said(lambda: add_lora(model, rank=0 if odd else 2, alpha=4)))
    add_lora(model, rank=2, alpha=4, targets=["out", "qkv"] if odd else ["qkv", "out"])  # a set has any order
    return [*errors, said(lambda: merge_lora(model) if odd else unmerge_lora(model))]


def test_an_error_of_one_rank_is_one_on_every_rank(ranks):
    first, second = ranks(2, mistaken)
    assert first[:2] == second[:2]
    assert "no layer is called nope" in first[0] and "rank must be a positive integer, got 0" in first[1]
    assert all("merge_lora" in text for text in (first[2], second[2]))
