"""Recompute of blocks: the same gradients to the bit, however the model runs; options that contradict each other."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.common import assert_close, assert_equal, error, make_tp
from tests.models.common import BERT_CONFIG, GPT_CONFIG, batch, default_dtype, results
from tpfuse import TensorParallel
from tpfuse.models import GPT, Bert
from tpfuse.tools.ledger import saved_bytes

LLAMA = dict(norm="rms", gated=True, activation="silu", qkv_bias=False, out_bias=False, mlp_bias=False)
LLAMA |= dict(rope=dict(rope_theta=1e4), num_kv_heads=6, family="llama", embedding_dropout=0.0)
MIXTRAL = dict(family="mixtral", num_experts=4, experts_per_token=2)
NEOX = dict(family="gpt_neox", rope=dict(rope_theta=1e4, partial_rotary_factor=0.5), parallel_residual=True)
MODELS = {
    "gpt2": (GPT, GPT_CONFIG, {}),
    "llama": (GPT, replace(GPT_CONFIG, **LLAMA), {}),
    "mixtral": (GPT, replace(GPT_CONFIG, **LLAMA | MIXTRAL), {}),
    "neox": (GPT, replace(GPT_CONFIG, **NEOX), {}),
    "bert": (Bert, BERT_CONFIG, dict(masked_lm=True)),
    "bert body": (Bert, BERT_CONFIG, {}),
}
PACKED = dict(cu_seqlens=torch.tensor([0, 5, 12, 20], dtype=torch.int32), max_seqlen=8)


def make(name, tp=None, dtype=torch.float32, **more):
    cls, config, options = MODELS[name]
    with default_dtype(dtype):
        return cls(config, tp=tp, **options, **more)


def call_of(name, packed):
    call = batch(MODELS[name][1], *((1, 20) if packed else (3, 7)))
    return call | (PACKED if packed else {}) | dict(step=3)


def _step(world, name, sp, overlap, packed, recompute):
    tp = None if world is None else TensorParallel(world.group, sequence_parallel=sp, overlap=overlap)
    return results(make(name, tp, recompute=recompute), call_of(name, packed))


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize(
    "name, packed", [*((name, False) for name in MODELS), ("gpt2", True), ("llama", True), ("mixtral", True)]
)
def test_gradients_are_bitwise_the_same(name, packed, recompute):
    assert_equal(*(_step(None, name, True, "auto", packed, how) for how in (recompute, None)))


SPLITS = [
    ("gpt2", True, "off"),
    ("gpt2", False, "off"),
    ("gpt2", True, "pairwise"),
    ("bert", True, "off"),
    ("mixtral", True, "off"),
    ("mixtral", False, "off"),
    ("llama", True, "pairwise"),
    pytest.param("neox", True, "pairwise", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name, sp, overlap", SPLITS)
def test_gradients_of_a_split_model_are_bitwise_the_same(ranks, name, sp, overlap):
    packed = name == "llama"
    both = [ranks(2, _step, name, sp, overlap, packed, recompute) for recompute in ("full", None)]
    for full, plain in zip(*both, strict=True):
        assert_equal(full, plain)


def _replicated(world, recompute):
    mesh = world.mesh(2, 1)
    model = make("gpt2", dp=mesh["dp"], recompute=recompute)
    replica = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    call = batch(GPT_CONFIG, seed=world.rank)
    for _ in range(2):
        replica(**call).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_under_ddp(ranks):
    for full, plain in zip(*(ranks(2, _replicated, recompute) for recompute in ("full", None)), strict=True):
        assert_equal(full, plain)


def _sharded(world, name, recompute):
    mesh = world.mesh(2, 1)
    model = make(name, dp=mesh["dp"], recompute=recompute)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["dp"])
    call = batch(GPT_CONFIG, seed=world.rank)
    for _ in range(2):
        model(**call).loss.backward()
    return {name: p.grad.to_local() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("neox", "mixtral"))]
)
def test_under_fsdp(ranks, name):
    for full, plain in zip(*(ranks(2, _sharded, name, recompute) for recompute in ("full", None)), strict=True):
        assert_equal(full, plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert", "neox", "mixtral"])
def test_under_torch_compile(name):
    def compiled(recompute):
        torch._dynamo.reset()
        model = make(name, recompute=recompute)
        torch.compile(model, fullgraph=True, backend="aot_eager")(**call_of(name, False)).loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    assert_equal(compiled("full"), compiled(None))


def without_detach(graph, _inputs):
    """As inductor has it: a detached tensor is the tensor itself, and so are two outputs of a graph that alias."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0])
    graph.recompile()
    return make_boxed_func(graph.forward)


BACKENDS = {"without detach": aot_autograd(fw_compiler=without_detach), "inductor": "inductor"}
COMPILED = [(x, "without detach", how) for x in MODELS if x != "bert body" for how in ("full", "selective")]
COMPILED += [("gpt2", "inductor", "selective"), ("llama", "inductor", "full")]


@pytest.mark.parametrize(
    "name, backend, recompute",
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[:2] != ("gpt2", "without detach"))) for case in COMPILED],
)
def test_of_blocks_compiled_one_by_one(name, backend, recompute):
    grads = []
    for compiled in False, True:
        torch._dynamo.reset()
        model = make(name, recompute=recompute if compiled else None)
        for block in model.blocks if compiled else ():
            block.compile(backend=BACKENDS[backend])
        for _ in range(2):  # a graph that serves several layers is made at the second
            model(**call_of(name, False)).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert len(grads[0]) > 4
    assert_close(grads[1], grads[0], torch.float32)


def test_under_autocast_and_where_a_hook_waits():
    for context in (torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False)):
        made = []
        for recompute in ("full", None):
            model, seen = make("gpt2", recompute=recompute), []
            model.blocks[0].mlp.register_forward_hook(lambda *_, seen=seen: seen.append(1))
            with context:
                loss = model(**call_of("gpt2", False)).loss
            loss.backward()
            assert len(seen) == (2 if recompute else 1)
            made.append({name: p.grad for name, p in model.named_parameters()})
        assert_equal(*made)


CHANGES = {
    "eval": lambda model: model.eval(),
    "train": lambda model: model.train(),
    "one part": lambda model: model.blocks[1].attention.eval(),
    "saving": lambda model: model.gradient_checkpointing_disable(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["gpt2", "bert", "mixtral"])
def test_blocks_run_again_as_they_ran(name, change):
    """Dropout is as in forward, whatever the model is switched to before backward."""
    grads = []
    for switched in (True, False):
        model = make(name, recompute="full").train(change != "train")
        loss = model(**call_of(name, False)).loss
        if switched:
            CHANGES[change](model)
        modes = [part.training for part in model.modules()]
        loss.backward(retain_graph=True)
        loss.backward()
        assert modes == [part.training for part in model.modules()]
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert_equal(*grads)


def test_frozen_blocks_and_no_gradient_at_all():
    grads = []
    for recompute in ("full", None):
        model = make("gpt2", recompute=recompute)
        model.embedding.requires_grad_(False)
        model.positions.requires_grad_(False)
        model.input_norm.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        model(**call_of("gpt2", False)).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert_equal(*grads)
    with torch.no_grad():
        assert not model(**call_of("gpt2", False)).loss.requires_grad


def test_it_is_switched_on_and_off():
    model = make("gpt2")
    call = call_of("gpt2", False)

    def saved():
        with saved_bytes(model) as kept:
            model(**call)
        return kept()

    plain = saved()
    assert model.recompute is None
    model.gradient_checkpointing_enable()
    assert model.recompute == "full" and saved() < plain / 2
    model.gradient_checkpointing_disable()
    assert model.recompute is None and saved() == plain
    small = make("gpt2", recompute="selective")
    small.gradient_checkpointing_enable()
    small.gradient_checkpointing_disable()
    assert small.recompute == "selective" and small.saving == "smallest" == small.blocks[0].saving


def test_from_pretrained(tmp_path):
    make("gpt2").save_pretrained(tmp_path)
    assert GPT.from_pretrained(tmp_path, recompute="full").recompute == "full"
    assert GPT.from_pretrained(tmp_path, saving="smallest").recompute == "selective"


WRONG = {
    "recompute must be one of selective, full or None, got 'all'": dict(recompute="all"),
    "recompute='selective' is saving='smallest', got saving='fastest'": dict(recompute="selective", saving="fastest"),
    "saving must be one of fastest, smallest, got 'none'": dict(saving="none"),
}


@pytest.mark.parametrize("message", WRONG)
def test_options_that_are_none(message):
    with pytest.raises(ValueError, match=f"GPT: {message}"):
        make("gpt2", **WRONG[message])


def _differs(world):
    make("gpt2", make_tp(world), recompute=("full", None)[world.rank])


def test_ranks_recompute_alike(ranks):
    with pytest.raises(ValueError, match="recompute must be the same on every tensor-parallel rank"):
        ranks(2, _differs)


@pytest.mark.slow
@pytest.mark.parametrize("name, p", [("gpt2", 0.1), ("llama", 0.0), ("bert", 0.1)])
def test_blocks_compiled_one_by_one_share_graphs(name, p):
    """More blocks than torch compiles a function anew for: the second number of a layer makes it any number."""
    cls, config, options = MODELS[name]
    drops = dict(dropout=p, attention_dropout=p, embedding_dropout=p)
    with default_dtype(torch.float64):
        deep = cls(replace(config, num_layers=10, **drops), **options).train()
    exact = results(copy.deepcopy(deep), call_of(name, False))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for block in deep.blocks:
        block.compile(backend=counter)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        compiled = results(deep, call_of(name, False))
    assert max(error(compiled[key], exact[key]) for key in exact) <= 1e-10
    assert counter.frame_count <= 2 + (p > 0)  # of the last block, of the others, and of their first


SIZES = (2, 8), (3, 10), (2, 12), (5, 16), (4, 31)  # samples and positions of a call


def of_any_size(world, name, dynamic=None, **split):
    """-> how many graphs calls of SIZES are; their losses and gradients are those of the calls without graphs"""
    torch._dynamo.reset()
    tp = None if world is None else TensorParallel(world.group, sequence_parallel=True, **split)
    (compiled, eager), counter = (make(name, tp) for _ in range(2)), CompileCounterWithBackend("aot_eager")
    compiled.compile(fullgraph=True, backend=counter, dynamic=dynamic)
    eager.load_state_dict(compiled.state_dict())
    for i, size in enumerate(SIZES):
        call = batch(MODELS[name][1], *size) | dict(step=3 + i, loss_normalizer=9.5 + i)
        graph, plain = (results(model, call) for model in (compiled, eager))
        assert_equal(graph, plain)
        for model in (compiled, eager):
            model.zero_grad()
    return counter.frame_count


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "neox", "bert"])
def test_one_graph_serves_calls_of_any_size(name):
    """The first call has a graph of its own sizes and numbers, by torch's default, and the second one of any."""
    assert of_any_size(None, name) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name, split", [("gpt2", {}), ("bert", dict(overlap="pairwise")), ("llama", dict(bitwise=2))])
def test_one_graph_serves_calls_of_any_size_on_two_ranks(ranks, name, split):
    assert ranks(2, functools.partial(of_any_size, **split), name) == [2, 2]


def of_pieces(world):
    """-> how many graphs calls of a model over context-parallel ranks are, with the losses and gradients of none"""
    torch._dynamo.reset()
    mesh = world.pieces(1, 2, 1)
    tp = TensorParallel(mesh["tp"], sequence_parallel=True, cp=mesh["cp"])
    (compiled, eager), counter = (make("llama", tp) for _ in range(2)), CompileCounterWithBackend("aot_eager")
    compiled.compile(fullgraph=True, backend=counter)
    for i, size in enumerate([(2, 8), (3, 12), (2, 16), (4, 20)]):
        losses = []
        for model in (compiled, eager):
            loss = model(**batch(GPT_CONFIG, *size), step=3 + i).loss
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(compiled.parameters(), eager.parameters(), strict=True))
    return counter.frame_count


@pytest.mark.slow
def test_one_graph_serves_pieces_of_any_length(ranks):
    assert ranks(2, of_pieces) == [2, 2]


@pytest.mark.slow
def test_with_dynamic_shapes_from_the_start():
    """The second call finds that the step was counted on."""
    assert of_any_size(None, "gpt2", True) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "bert"])
def test_one_exported_program_serves_calls_of_any_size(name):
    model, (samples, positions) = make(name).eval(), (torch.export.Dim(axis, min=2, max=32) for axis in ("B", "S"))
    ids = lambda *size: batch(MODELS[name][1], *size)["input_ids"]
    program = torch.export.export(model, (ids(2, 5),), dynamic_shapes={"input_ids": {0: samples, 1: positions}})
    for size in SIZES:
        x = ids(*size)
        assert torch.equal(program.module()(x).logits, model(x).logits)
