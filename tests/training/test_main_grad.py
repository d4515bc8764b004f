"""Gradients in fp32 over micro-batches: every path against plain accumulation, the order of calls, what is refused, the
sum over replicas, checkpoints, and the error that it is for."""

import copy
import functools
import gc
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.fsdp import fully_shard

from bench.main_grad import errors
from tests.common import TOLERANCE, error
from tests.models.common import BERT_CONFIG, GPT_CONFIG, STEP_CONFIG, batch, default_dtype, scramble
from tpfuse import (
    MainGrad,
    TensorParallel,
    WholeMatrices,
    add_lora,
    as_dtensor,
    clip_grad_norm_,
    load_checkpoint,
    param_groups,
    save_checkpoint,
)
from tpfuse.kernels.gemm.op import ROWS, linear, linear_wgrad_add
from tpfuse.kernels.runtime.main_grad import PLACES, derived
from tpfuse.layers.shards import wholes
from tpfuse.models import GPT, Bert
from tpfuse.sequence_parallel.records import WantedGrads, WeightGrad, adding
from tpfuse.training.main_grad import stepped

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
LLAMA = replace(GPT_CONFIG, norm="rms", activation="silu", gated=True, qk_norm=True, tie_embeddings=False)


def _gpt(config=GPT_CONFIG, **options):
    return lambda tp: GPT(config, tp=tp, **options)


def _lora(tp):
    model = add_lora(GPT(GPT_CONFIG, tp=tp), rank=2, alpha=4)
    for name, p in model.named_parameters():
        if ".B" in name:  # else A has no gradient
            nn.init.constant_(p, 0.05)
    return model


PATHS = {  # what makes the model, ranks, sequence parallelism, overlap
    "one node": (_gpt(), 1, False, "off"),
    "smallest": (_gpt(saving="smallest"), 1, False, "off"),
    "heads and gates": (_gpt(LLAMA), 1, False, "off"),
    "rows gathered": (_gpt(), 2, True, "off"),
    "rows gathered, smallest": (_gpt(saving="smallest"), 2, True, "off"),
    "overlapped": (_gpt(), 2, True, "pairwise"),
    "overlapped, gates": (_gpt(LLAMA), 2, True, "pairwise"),
    "rows replicated": (_gpt(), 2, False, "off"),
    "rows replicated, overlapped": (_gpt(), 2, False, "pairwise"),
    "copied heads": (_gpt(replace(GPT_CONFIG, num_kv_heads=1)), 2, True, "off"),
    "copied heads, overlapped": (_gpt(replace(GPT_CONFIG, num_kv_heads=1)), 2, True, "pairwise"),
    "bert": (lambda tp: Bert(BERT_CONFIG, tp=tp, masked_lm=True), 2, True, "off"),
    "pooler": (lambda tp: Bert(BERT_CONFIG, tp=tp), 1, False, "off"),
    "adapters": (_lora, 1, False, "off"),
    "adapters of shards": (_lora, 2, True, "off"),
}
# Added by autograd in the parameter's dtype, and only then in fp32: tables of few rows, norms, biases.
HOOKED = "positions", "types", "norm", "bias"


def made(path, world, dtype):
    make, _, sp, overlap = PATHS[path]
    tp = None
    if world.size > 1:
        tp = TensorParallel(world.group, sequence_parallel=sp, overlap=overlap)
    with default_dtype(dtype):
        model = make(tp)
    scramble(model)
    return model


def backward(model, micro=0, size=3):
    call = batch(model.config, size, seed=micro) | dict(step=0, first_sample=size * micro)
    if isinstance(model, Bert) and model.head is None:
        call.pop("labels")
        out = model(**call)
        (out.last_hidden_state.square().mean() + out.pooler_output.sum()).backward()
    else:
        model(**call).loss.backward()


class Messages:
    """Counts what this rank sends between a model's ranks."""

    def __enter__(self):
        import tpfuse.collectives
        import tpfuse.ranks.gloo

        self.count, self.kept = 0, []
        self.replace(tpfuse.ranks.gloo, "send")
        self.replace(dist, "all_to_all_single")
        return self

    def replace(self, module, name):
        function = getattr(module, name)

        @functools.wraps(function)
        def counted(*args, **kwargs):
            self.count += 1
            return function(*args, **kwargs)

        self.kept.append((module, name, function))
        setattr(module, name, counted)

    def __exit__(self, *_):
        for module, name, function in self.kept:
            setattr(module, name, function)


def both(world, path):
    """-> the largest error of a gradient of two micro-batches against autograd's, and the messages of a third."""
    plain, added = (made(path, world, F64) for _ in range(2))
    main = MainGrad(added)
    for model in (plain, added):
        backward(model, 0), backward(model, 1)
    main.reduce()
    errors = {}
    for (name, p), q in zip(plain.named_parameters(), added.parameters(), strict=True):
        assert q.grad is None
        if p.grad is not None:
            assert stepped(q).grad is q.main_grad
            errors[name] = error(q.main_grad, p.grad)
        elif p.requires_grad:
            assert stepped(q).grad is None
    main.zero()
    counts = []
    for model in (plain, added):
        with Messages() as sent:
            backward(model, 2)
        counts.append(sent.count)
    return max(errors.values()), counts


def everyday(*names):
    return [pytest.param(path, marks=[] if path in names else pytest.mark.slow) for path in PATHS]


@pytest.mark.parametrize("path", everyday("one node", "overlapped", "rows replicated, overlapped", "copied heads"))
def test_every_path_adds_what_autograd_adds(ranks, path):
    for worst, (plain, added) in ranks(PATHS[path][1], both, path):
        assert worst < TOLERANCE[F64]
        assert added <= plain


def rounded(world, path):
    """-> the matrices whose gradient of one micro-batch is a 16-bit one."""
    model = made(path, world, BF16)
    main = MainGrad(model)
    backward(model, size=12)  # a row of an embedding that one token has is a 16-bit one
    main.reduce()
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad and stepped(p).grad is not None]
    assert trained and all(p.main_grad.dtype == F32 for _, p in trained)
    return [n for n, p in trained if torch.equal(p.main_grad, p.main_grad.to(BF16).float())]


def test_a_weight_used_by_leaves_has_its_gradient():
    """That of the masked-LM head's linear layer."""
    plain, added = (Bert(BERT_CONFIG, tp=TensorParallel(bitwise=4), masked_lm=True, seed=1) for _ in range(2))
    main = MainGrad(added)
    backward(plain), backward(added)
    main.reduce()
    assert error(added.transform.weight.main_grad, plain.transform.weight.grad) < TOLERANCE[F32]


@pytest.mark.parametrize("path", everyday("smallest", "overlapped", "adapters of shards"))
def test_no_gradient_of_a_weight_is_rounded(ranks, path):
    for found in ranks(PATHS[path][1], rounded, path):
        assert [name for name in found if not any(part in name for part in HOOKED)] == []


def autocasted(world, sp):
    with default_dtype(F32):
        model = GPT(GPT_CONFIG, tp=TensorParallel(world.group, sequence_parallel=sp), saving="smallest")
    main = MainGrad(model)
    with torch.autocast("cpu", BF16):
        loss = model(**batch(GPT_CONFIG), step=0, first_sample=0).loss
    loss.backward()
    main.reduce()
    return [n for n, p in model.named_parameters() if torch.equal(p.main_grad, p.main_grad.to(BF16).float())]


@pytest.mark.parametrize("R", [1, 2])
def test_autocast_rounds_no_gradient_either(ranks, R):
    for found in ranks(R, autocasted, True):
        assert [name for name in found if not any(part in name for part in HOOKED)] == []


# ---- the error that it is for ----


@pytest.mark.slow
def test_64_micro_batches_in_bf16_lose_what_fp32_keeps():
    plain, added = errors(64)
    assert plain > 1e-3
    assert added < 1e-6


@pytest.mark.parametrize("dtype", [F64, F32])
def test_the_gemm_adds(dtype):
    for rows in (0, 1, ROWS, 2 * ROWS + 3):
        dy, x = torch.randn(rows, 5, dtype=dtype), torch.randn(rows, 7, dtype=dtype)
        out = torch.randn(5, 7, dtype=dtype)
        expected = out + dy.t() @ x
        assert linear_wgrad_add(dy, x, out, None).numel() == 0
        torch.testing.assert_close(out, expected, atol=1e-4 if dtype == F32 else 1e-11, rtol=0)


def test_the_gemm_adds_16_bits_exactly():
    dy, x, out = torch.randn(2 * ROWS + 3, 5).to(BF16), torch.randn(2 * ROWS + 3, 7).to(BF16), torch.randn(5, 7)
    expected = out.double() + dy.double().t() @ x.double()
    db = linear_wgrad_add(dy, x, out, F32)
    assert error(out, expected) < 1e-6
    assert error(db, dy.double().sum(0)) < 1e-6


# ---- a unit that is run later ----


def test_a_unit_adds_when_it_is_run():
    total, later = torch.zeros(3, 5), []
    unit = WeightGrad(torch.randn(4, 3), torch.randn(4, 5), F32, None)
    add = adding(lambda write: write(total), None)
    grads = WantedGrads(weight=True, run=lambda name, work: later.append(lambda: add(name, work)) or (None, None))
    assert grads.run("weight", unit) == (None, None)
    assert not total.any()
    later[0]()
    torch.testing.assert_close(total, unit.run()[0])


# ---- training ----


def trained(world, dp, micro, steps=3, dtype=F64, main_grad=True):
    """-> losses' gradients' norms and the parameters of this rank, after steps of a global batch."""
    mesh = world.mesh(dp, world.size // dp)
    with default_dtype(dtype):
        model = GPT(STEP_CONFIG, tp=TensorParallel(mesh["tp"], sequence_parallel=True), dp=mesh["dp"])
    main = MainGrad(model, mesh["dp"]) if main_grad else None
    optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=3e-3)
    norms = []
    for step in range(steps):
        ids = torch.randint(97, (4, 8), generator=torch.Generator().manual_seed(step))
        size = 4 // dp // micro
        for i in range(micro):
            first = (mesh["dp"].get_local_rank() * micro + i) * size
            mine = ids[first : first + size]
            model(mine, labels=mine, step=step, first_sample=first, loss_normalizer=4 * 7 / dp).loss.backward()
        if main is not None:
            main.reduce()
        norms.append(clip_grad_norm_(model, 0.5).item())
        optimizer.step()
        main.zero() if main is not None else optimizer.zero_grad()
    return norms, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("R, dp, micro", [(1, 1, 2), (2, 2, 1), pytest.param(4, 2, 2, marks=pytest.mark.slow)])
def test_training_is_that_of_one_process(ranks, R, dp, micro):
    expected, weights = ranks(1, trained, 1, 1, 3, F64, False)[0]
    every = ranks(R, trained, dp, micro)
    for norms, _ in every:
        assert norms == every[0][0]  # the same bits
        assert max(abs(a - b) for a, b in zip(norms, expected, strict=True)) < 1e-9
    if R // dp == 1:
        assert max(error(ours, theirs) for ours, theirs in zip(every[0][1], weights, strict=True)) < 1e-9
    for first, other in zip(every[: R // dp], every[R // dp :]):
        assert all(torch.equal(a, b) for a, b in zip(first[1], other[1], strict=True))  # of two replicas


def unused_on_one(world):
    """A parameter that one replica alone uses, and one that none does."""
    model = nn.Module()
    model.a, model.b, model.c = (nn.Linear(2, 2, bias=False) for _ in range(3))
    for layer in (model.a, model.b, model.c):
        nn.init.ones_(layer.weight)
    main = MainGrad(model, world.group)
    x = torch.ones(1, 2)
    (model.a(x) + (model.b(x) if world.rank == 0 else 0)).sum().backward()
    main.reduce()
    return [g if g is None else g.tolist() for g in (weight.grad for weight in main.parameters())]


def test_the_mean_is_over_all_replicas(ranks):
    for a, b, c in ranks(2, unused_on_one):
        assert a == [[1.0, 1.0], [1.0, 1.0]]
        assert b == [[0.5, 0.5], [0.5, 0.5]]
        assert c is None


def other_replicas(world):
    try:
        MainGrad(nn.Linear(2 + world.rank, 2), world.group)
    except ValueError as error:
        return str(error)


def test_replicas_of_other_shapes_are_refused(ranks):
    first, second = ranks(2, other_replicas)
    assert first == second and "MainGrad: trainable parameters must be the same" in first


def without_a_call(world):
    model = GPT(STEP_CONFIG, dp=world.mesh(2, 1)["dp"])
    main = MainGrad(model, world.group)
    if world.rank == 0:
        backward(model, 0)
    with pytest.raises(ValueError) as caught:
        main.reduce()
    return str(caught.value)


def test_a_replica_without_a_call_is_named(ranks):
    said = "calls of this step that add to a gradient must be the same on every data-parallel rank, got rank 0: some;"
    assert ranks(2, without_a_call) == [f"MainGrad: {said} rank 1: none"] * 2


# ---- weights in fp32 ----


def bf16_model(**options):
    with default_dtype(BF16):
        return GPT(STEP_CONFIG, **options)


def step(model, main, optimizer, i=0):
    backward(model, i)
    main.reduce()
    optimizer.step()
    main.zero()


def test_steps_that_bf16_would_lose_are_kept():
    model = bf16_model()
    main = MainGrad(model)
    optimizer = torch.optim.AdamW(main.parameters(), lr=1e-6)
    before = [w.detach().clone() for w in main.parameters()]
    for i in range(3):
        step(model, main, optimizer, i)
    for p, w, old in zip(model.parameters(), main.parameters(), before, strict=True):
        assert w.dtype == F32 and not torch.equal(w, old)
        assert torch.equal(p, w.to(BF16))


def test_weights_of_fp32_parameters_are_the_parameters_memory():
    model = GPT(STEP_CONFIG)
    main = MainGrad(model)
    assert [w.data_ptr() for w in main.parameters()] == [p.data_ptr() for p in model.parameters()]
    known = wholes()
    assert all(known[w].spec == known[p].spec for w, p in zip(main.parameters(), model.parameters(), strict=True))


def test_what_is_written_to_the_model_is_taken_over():
    model = bf16_model()
    main = MainGrad(model)
    optimizer = torch.optim.SGD(main.parameters(), lr=1e-4)
    step(model, main, optimizer)
    p, w = model.blocks[0].mlp.fc2.weight, stepped(model.blocks[0].mlp.fc2.weight)
    kept = w.detach().clone()
    with torch.no_grad():
        p[0] = 3.0
    assert torch.equal(stepped(p)[1:], kept[1:])  # not rounded
    assert (stepped(p)[0] == 3.0).all()


@pytest.mark.parametrize("made_by", ["zero", "zero_grad", "zero_grad in place"])
def test_a_step_begins_with_nothing(made_by):
    model = GPT(STEP_CONFIG).double()
    main = MainGrad(model)
    optimizer = torch.optim.SGD(main.parameters(), lr=0.0)
    backward(model, 0)
    expected = [p.main_grad.clone() for p in model.parameters()]
    main.reduce()
    optimizer.step()
    if made_by == "zero":
        main.zero()
        assert not any(p.main_grad.any() for p in model.parameters())
    elif made_by == "zero_grad":
        optimizer.zero_grad()
    else:
        optimizer.zero_grad(set_to_none=False)
        with pytest.raises(RuntimeError, match="call main.zero\\(\\) first"):
            backward(model, 0)
        return
    backward(model, 0)
    for p, before in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.main_grad, before)


# ---- the order of calls, and what is refused ----


def test_the_order_of_calls():
    model = GPT(STEP_CONFIG)
    main = MainGrad(model)
    optimizer = torch.optim.AdamW(main.parameters())
    backward(model)
    for call in (optimizer.step, lambda: clip_grad_norm_(model, 1.0)):
        with pytest.raises(RuntimeError, match="was not reduced; call main.reduce"):
            call()
    main.reduce()
    with pytest.raises(RuntimeError, match="was called already"):
        main.reduce()
    model.zero_grad()  # of no effect: p.grad is None
    with pytest.raises(RuntimeError, match="call main.zero"):
        backward(model)
    optimizer.step()
    main.zero()
    backward(model), backward(model)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_an_optimizer_of_the_models_own_parameters_is_refused(dtype):
    with default_dtype(dtype):
        model = GPT(STEP_CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    main = MainGrad(model)
    backward(model)
    main.reduce()
    with pytest.raises(ValueError, match="the optimizer holds embedding.weight of the model"):
        optimizer.step()


def ddp(world):
    """DDP first: refused where MainGrad is made of it, or at the first forward.  MainGrad first: where DDP is made."""
    wrap = nn.parallel.DistributedDataParallel
    with pytest.raises(ValueError, match="leave DistributedDataParallel off"):
        MainGrad(wrap(GPT(STEP_CONFIG)))
    model = GPT(STEP_CONFIG)
    replica, _ = wrap(model), MainGrad(model)
    with pytest.raises(ValueError, match="leave DistributedDataParallel off"):
        replica(**batch(STEP_CONFIG), step=0, first_sample=0)
    for tp in (None, TensorParallel(world.group)):
        for tool in (wrap, replicate):
            model = GPT(STEP_CONFIG, tp=tp)
            main = MainGrad(model)
            with pytest.raises(ValueError, match=r"leave DistributedDataParallel off .* MainGrad\(model, mesh"):
                tool(model)
            backward(model)
            main.reduce()


def test_ddp_is_refused_whoever_comes_first(ranks):
    ranks(2, ddp)


def sharded(world):
    mesh = world.mesh(1, 1)
    model = as_dtensor(GPT(STEP_CONFIG, tp=TensorParallel(mesh["tp"])), mesh["tp"])
    with pytest.raises(ValueError, match="MainGrad: embedding.weight is a DTensor"):
        MainGrad(model)
    model = GPT(STEP_CONFIG)
    main = MainGrad(model)
    with pytest.raises(ValueError, match="as_dtensor: .* main_grad"):
        as_dtensor(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(ValueError, match="were replaced since it was made"):
        main.reduce()


def test_dtensors_are_refused_whoever_comes_first(ranks):
    ranks(1, sharded)


def test_whole_matrices_of_the_models_own_weights_are_refused():
    model = bf16_model()
    muon = torch.optim.Muon(WholeMatrices(model.blocks).parameters())
    main = MainGrad(model)
    backward(model)
    main.reduce()
    with pytest.raises(ValueError, match="the optimizer holds blocks.0.* or tpfuse.WholeMatrices"):
        muon.step()


def test_what_cannot_have_one_is_refused():
    model = GPT(STEP_CONFIG)
    main = MainGrad(model)
    for build, message in (
        (lambda: MainGrad(model), "has a main_grad already"),
        (lambda: MainGrad(GPT(STEP_CONFIG).requires_grad_(False)), "no trainable parameter"),
        (lambda: MainGrad(nn.Linear(2, 2, device="meta")), "meta device"),
        (lambda: MainGrad(nn.Linear(2, 2, dtype=torch.complex64)), "torch.complex64"),
    ):
        with pytest.raises(ValueError, match=message):
            build()
    add_lora(model, rank=1, alpha=1)
    with pytest.raises(ValueError, match="are new or were made trainable"):
        main.reduce()
    model = GPT(STEP_CONFIG)
    main = MainGrad(model)
    model.double()
    with pytest.raises(ValueError, match="were moved"):
        main.reduce()


def test_gradients_for_others_leave_it_alone():
    model = GPT(STEP_CONFIG).double()
    MainGrad(model)
    h = torch.randn(8, 48, dtype=F64, requires_grad=True)
    normed = lambda: model.blocks[0].mlp_norm(h)
    y = linear(model.blocks[0].mlp.fc1.weight.new_ones(2, 48), model.blocks[0].mlp.fc1.weight)
    x = torch.randn(8, 48, dtype=F64, requires_grad=True)
    for weight in (model.blocks[0].mlp.fc1.weight, model.blocks[0].attention.qkv.weight):
        (dx,) = torch.autograd.grad(linear(x, weight.reshape(-1, 48)).sum(), x)
        assert dx.shape == x.shape and not weight.main_grad.any()
        with pytest.raises(RuntimeError, match="torch.autograd.grad has none to return"):
            torch.autograd.grad(linear(x, weight.reshape(-1, 48)).sum(), weight)
        linear(x, weight.reshape(-1, 48)).sum().backward(inputs=[x])
        assert not weight.main_grad.any()
    assert normed().shape == h.shape and y.shape[0] == 2


def test_frozen_shared_and_plain_parameters():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4, dtype=F64))
            self.plain, self.frozen = nn.Linear(4, 4, dtype=F64), nn.Linear(4, 4, dtype=F64).requires_grad_(False)

        def forward(self, x):
            part = linear(x[:, :2], self.w[:, :2])  # a part of a parameter: autograd adds it
            return self.frozen(self.plain(linear(linear(x, self.w), self.w))) + part + x @ self.w

    torch.manual_seed(0)
    plain = Net()
    added = copy.deepcopy(plain)
    main, x = MainGrad(added), torch.randn(3, 4, dtype=F64)
    for model in (plain, added):
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    main.reduce()
    for p, q in zip(plain.parameters(), added.parameters(), strict=True):
        if p.requires_grad:
            torch.testing.assert_close(q.main_grad, p.grad, atol=1e-11, rtol=1e-11)
        else:
            assert q not in PLACES and not hasattr(q, "main_grad")


def test_a_copy_has_none():
    model = bf16_model()
    MainGrad(model)
    twin = copy.deepcopy(model)
    backward(twin)
    assert all(p.grad is not None for p in twin.parameters())
    assert all(stepped(p) is p for p in twin.parameters())
    assert not any(p.main_grad.any() for p in model.parameters())


@pytest.mark.slow
def test_it_ends_with_the_model():
    gc.collect()  # what other tests have left
    model = bf16_model()
    main = MainGrad(model)
    weights, places = [weakref.ref(w) for w in main.parameters()], len(PLACES)
    count = len(list(model.parameters()))
    backward(model)
    del model, main
    gc.collect()
    assert len(PLACES) == places - count
    assert not any(weight() is not None for weight in weights)


@pytest.fixture
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("convert", ["to", "load_state_dict", "swap_tensors"])
def test_parameters_that_torch_swaps_are_named(swapping, convert):
    """The object stays and what it holds is another's: the next reduce() says so, and a new MainGrad works."""
    model = GPT(STEP_CONFIG)
    main = MainGrad(model)
    optimizer = torch.optim.AdamW(main.parameters(), lr=1e-3)
    step(model, main, optimizer)
    if convert == "to":
        model.double()
    elif convert == "load_state_dict":
        model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()})
    else:
        p = model.blocks[0].mlp.fc1.weight
        torch.utils.swap_tensors(p, nn.Parameter(p.detach().clone()))
    backward(model)
    with pytest.raises(ValueError, match="parameters of the model were replaced since it was made: .*[.]weight"):
        main.reduce()
    del main, optimizer
    if convert != "swap_tensors":
        again = MainGrad(model)
        step(model, again, torch.optim.AdamW(again.parameters(), lr=1e-3))


def test_a_parameter_in_a_file_has_no_place(tmp_path):
    layer = nn.Linear(2, 2)
    main = MainGrad(layer)
    torch.save(list(layer.parameters()), tmp_path / "file")
    for p in torch.load(tmp_path / "file", weights_only=True):
        assert p not in PLACES and stepped(p) is p
    assert all(p in PLACES for p in layer.parameters()) and main is not None


def test_recomputation_adds_once():
    plain, added = GPT(STEP_CONFIG).double(), GPT(STEP_CONFIG).double()
    MainGrad(added)
    for model in (plain, added):
        block, norm = model.blocks[0], model.input_norm
        h = torch.linspace(-1, 1, 8 * 48, dtype=F64).view(8, 48).requires_grad_()
        run = lambda h, block=block: block.mlp(h)
        torch.utils.checkpoint.checkpoint(run, norm(h), use_reentrant=False).square().sum().backward()
    for p, q in zip(plain.parameters(), added.parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(q.main_grad, p.grad, atol=1e-11, rtol=1e-11)


@pytest.mark.slow
def test_a_compiled_model_is_added_by_autograd():
    plain, added = GPT(STEP_CONFIG).double(), GPT(STEP_CONFIG).double()
    main = MainGrad(torch.compile(added, backend="aot_eager"))
    compiled = torch.compile(added, backend="aot_eager")
    call = batch(STEP_CONFIG) | dict(step=0, first_sample=0)
    plain(**call).loss.backward()
    compiled(**call).loss.backward()
    main.reduce()
    for p, q in zip(plain.parameters(), added.parameters(), strict=True):
        torch.testing.assert_close(q.main_grad, p.grad, atol=1e-11, rtol=1e-11)


def test_a_scaler_unscales_fp32_gradients():
    with default_dtype(torch.float16):
        model = nn.Linear(4, 4)
    main = MainGrad(model)
    optimizer, scaler = torch.optim.SGD(main.parameters(), lr=1.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(1, 4, dtype=torch.float16)).sum()).backward()
    main.reduce()
    scaler.unscale_(optimizer)
    assert (model.weight.main_grad == 1.0).all()
    before = model.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.weight, before)
    main.zero()


# ---- checkpoints ----


def resumed(directory, dtype, with_main=True):
    with default_dtype(dtype):
        model = GPT(STEP_CONFIG, seed=3)
    main = MainGrad(model) if with_main else None
    optimizer = torch.optim.AdamW(param_groups(model, 0.1), lr=1e-5)
    assert load_checkpoint(directory, model, optimizer) is not None
    return model, main, optimizer


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_resumed_run_is_the_same_bits(tmp_path, dtype):
    with default_dtype(dtype):
        model = GPT(STEP_CONFIG)
    main = MainGrad(model)
    optimizer = torch.optim.AdamW(param_groups(model, 0.1), lr=1e-5)
    step(model, main, optimizer, 0)
    save_checkpoint(tmp_path, model, optimizer, step=1)
    again, other, second = resumed(tmp_path, dtype)
    for run in ((model, main, optimizer), (again, other, second)):
        for i in range(1, 4):
            step(*run, i)
    for a, b in zip(main.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    plain, _, _ = resumed(tmp_path, dtype, with_main=False)  # weights in fp32 are left behind
    backward(plain)


# ---- torch's names ----


def test_torch_has_the_names_that_are_not_public():
    assert hasattr(torch._C, "_will_engine_execute_node")
    assert hasattr(nn.parallel.DistributedDataParallel, "_active_ddp_module")
    assert hasattr(nn.Parameter(torch.ones(2)), "_base") and hasattr(torch.ones(2), "_version")


def test_torchs_clipping_of_parameters_without_a_gradient_is_refused():
    model = GPT(GPT_CONFIG)
    main = MainGrad(model)
    with pytest.raises(ValueError, match=r"in their main_grad; clip main.parameters\(\), or call tpfuse"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.nn.utils.clip_grad_norm_(main.parameters(), 1.0)


@pytest.mark.parametrize("use", [lambda w, x: (w * x).sum(), lambda w, x: linear(x[:1], w.view(3, 4)).sum()])
def test_a_weight_made_of_parameters(use):
    """Its gradient reaches main_grad through a view that an op looks up, and where it comes autograd's way."""
    layer, x = nn.Linear(4, 3, bias=False), torch.arange(12.0).view(3, 4)
    exact = torch.autograd.grad(use(2 * layer.weight, x), layer.weight)[0]
    MainGrad(layer)
    use(derived(lambda p: 2 * p, layer.weight), x).backward()
    assert torch.equal(layer.weight.main_grad, exact) and layer.weight.grad is None
