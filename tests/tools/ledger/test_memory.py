"""Closed forms of saved activations against what hooks measure: plain layers, tpfuse's blocks at several sizes; state
bytes."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.common import make_tp
from tests.models.common import STEP_CONFIG, batch, default_dtype
from tests.routing import routed, to_the_first
from tpfuse import KFAC, WholeMatrices, add_lora
from tpfuse.layers.block import SAVING
from tpfuse.models import GPT, BertConfig, GPTConfig
from tpfuse.parallel import TensorParallel
from tpfuse.tools.ledger import activation_bytes, dry_run, parameter_count, saved_bytes, state_bytes
from tpfuse.tools.ledger.dryrun import Plan, fake_world, layer_bytes, measured_layer, planned_model, report
from tpfuse.tools.ledger.layer import build, token_ids
from tpfuse.tools.ledger.memory import WHOLE
from tpfuse.tools.ledger.plain import PlainLayer
from tpfuse.tools.ledger.presets import load_config

WIDTH, HEADS, BATCH = 1024, 16, 4


def config(seq=512, layers=2, **options):
    return GPTConfig(
        vocab_size=512, max_positions=seq, hidden_size=WIDTH, num_layers=layers, num_heads=HEADS, **options
    )


def sbh(seq):
    return seq * BATCH * WIDTH


FORMS = {  # tp, sequence parallel, recompute -> of s, h, a, t
    (1, False, "none"): lambda s, h, a, t: 34 + 5 * a * s / h,
    (4, False, "none"): lambda s, h, a, t: 10 + 24 / t + 5 * a * s / (h * t),
    (4, True, "none"): lambda s, h, a, t: (34 + 5 * a * s / h) / t,
    (4, False, "selective"): lambda s, h, a, t: 10 + 24 / t,
    (4, True, "selective"): lambda s, h, a, t: 34 / t,
    (4, False, "full"): lambda s, h, a, t: 2,
}


@pytest.mark.parametrize("case", FORMS)
@pytest.mark.parametrize("seq", [128, 2048])
def test_korthikantis_six(case, seq):
    assert activation_bytes(config(seq), *case, seq=seq, batch=BATCH) / sbh(seq) == FORMS[case](
        seq, WIDTH, HEADS, case[0]
    )


@pytest.mark.parametrize("seq, expected", [(128, 44.0), (512, 74.0)])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_plain_layer(seq, expected, device):
    if device == "cpu" and seq > 128:
        pytest.skip("the same code")
    factory = dict(device=device, dtype=torch.bfloat16)
    layer = PlainLayer(WIDTH, HEADS, 4 * WIDTH, **factory)
    x = torch.zeros(BATCH, seq, WIDTH, **factory, requires_grad=True)
    with saved_bytes(layer) as saved:
        layer(x)
    assert saved() / sbh(seq) == pytest.approx(expected, rel=0.01)
    assert activation_bytes(config(seq), seq=seq, batch=BATCH) / sbh(seq) == expected


def compared(model, plan):
    """The closed form of a layer's saved bytes, and what hooks measure."""
    return layer_bytes(model, plan), measured_layer(model, plan)


def plans(*ranks):
    """Plans over ``ranks``, with sequence parallelism and without, by what is saved."""
    cases = itertools.product(ranks, (True, False), SAVING)
    return [pytest.param(Plan(n, 1, 512, BATCH, sp, saving), id=f"{n}-{sp}-{saving}") for n, sp, saving in cases]


OURS = {"fastest": 32, "smallest": 20}


@pytest.mark.parametrize("plan", plans(1, 2, 4))
def test_our_block(plan):
    """Dropout on; tpfuse's form counts 32 and 20 sbh/t and the statistics in fp32."""
    form, measured = compared(config(), plan)
    assert measured == pytest.approx(form, rel=0.01)
    if plan.sequence_parallel:
        assert measured / sbh(plan.seq) == pytest.approx(OURS[plan.saving] / plan.tp, rel=0.01)


@pytest.mark.parametrize("plan", plans(1, 2))
def test_a_block_with_its_mlp_beside_attention(plan):
    """One residual stream less: attention's result is added, and not kept."""
    form, measured = compared(config(parallel_residual=True), plan)
    assert measured == pytest.approx(form, rel=0.01)
    shards = plan.tp if plan.sequence_parallel else 1
    assert layer_bytes(config(), plan) - form == 2 * sbh(plan.seq) / shards


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("norm", ["layer", "rms", "post"])
def test_our_recomputed_block(ranks, sequence_parallel, norm):
    """2 sbh/t and the statistics of one norm, nothing in post-norm; the norm's own vectors apart."""
    sizes = dict(vocab_size=512, max_positions=512, hidden_size=WIDTH, num_layers=2, num_heads=HEADS)
    model = BertConfig(**sizes) if norm == "post" else config(norm=norm)
    form, measured = compared(model, Plan(ranks, 1, 512, BATCH, sequence_parallel, full=True))
    vectors = {"layer": 2, "rms": 1, "post": 0}[norm] * 4 * WIDTH  # in fp32
    assert measured == form + vectors
    assert form / sbh(512) == pytest.approx(2 / (ranks if sequence_parallel else 1), rel=0.01)


ROPE = dict(rope_type="default", rope_theta=1e4)
BRANCHES = {
    "heads": dict(qk_norm=True),
    "beside": dict(branch_norm=True),
    "in place": dict(branch_norm=True, pre_norm=False, qk_norm=True, qk_norm_all=True),
    "of copied heads": dict(qk_norm=True, num_kv_heads=1),
    "of all copied heads": dict(branch_norm=True, pre_norm=False, qk_norm=True, qk_norm_all=True, num_kv_heads=2),
}


@pytest.mark.parametrize("ranks, sequence_parallel", [(1, True), (4, True), (4, False)])
@pytest.mark.parametrize("form", BRANCHES)
def test_norms_of_branches_and_of_heads(form, ranks, sequence_parallel):
    """Their saved bytes in a block, and their parameters."""
    model = config(norm="rms", qkv_bias=False, out_bias=False, mlp_bias=False, rope=ROPE, **BRANCHES[form])
    plan = Plan(ranks, 1, 512, BATCH, sequence_parallel)
    for case in (plan, plan._replace(saving="smallest"), plan._replace(full=True)):
        expected, measured = compared(model, case)
        assert measured == pytest.approx(expected, rel=0.01), case
    with fake_world(ranks) as mesh:
        count = sum(p.numel() for p in planned_model(model, plan, mesh).parameters())
    assert count == parameter_count(model, ranks)


@pytest.mark.parametrize("saving", SAVING)
@pytest.mark.parametrize(
    "ranks, sequence_parallel, imbalance", [(1, True, 1), (4, True, 1), (4, True, 2.5), (4, False, 1)]
)
@pytest.mark.parametrize("form", ["alone", "beside", "in place", "shared"])
def test_experts(form, ranks, sequence_parallel, imbalance, saving):
    """Saved bytes in a block, and parameters."""
    shared = dict(shared_size=640, shared_gate=True)
    wired = {"beside": dict(parallel_residual=True), "in place": BRANCHES["in place"], "shared": shared}.get(form, {})
    plain = dict(qkv_bias=False, out_bias=False, mlp_bias=False, rope=ROPE, ffn_size=512)
    model = config(
        norm="rms",
        gated=True,
        activation="silu",
        num_experts=8,
        experts_per_token=2,
        router_bias=form == "beside",
        **plain,
        **wired,
    )
    plan = Plan(ranks, 1, 512, BATCH, sequence_parallel, saving, imbalance=imbalance)
    expected, measured = compared(model, plan)
    vectors = 6 * WIDTH * 4  # of norms, in fp32
    assert 0 <= measured - expected <= vectors
    expected, measured = compared(model, plan._replace(full=True))
    assert 0 <= measured - expected <= vectors
    with fake_world(ranks) as mesh:
        count = sum(p.numel() for p in planned_model(model, plan, mesh).parameters())
    assert count == parameter_count(model, ranks)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_no_plain_layer_has_experts(recompute):
    model = config(gated=True, activation="silu", mlp_bias=False, num_experts=8, experts_per_token=2)
    with pytest.raises(ValueError, match=f"recompute='{recompute}' is of a plain layer, which has one MLP"):
        activation_bytes(model, recompute=recompute, seq=8, batch=1)


def _measured(world, saving):
    model = GPT(
        GPTConfig(vocab_size=64, max_positions=256, hidden_size=256, num_layers=2, num_heads=4),
        tp=make_tp(world),
        saving=saving,
    )
    ids = torch.zeros(4, 256, dtype=torch.int64)
    with saved_bytes(model) as saved:
        model(ids, labels=ids, first_sample=0)
    return saved()


@pytest.mark.parametrize("saving", SAVING)
def test_real_ranks_save_what_meta_tensors_say(ranks, saving):
    every = ranks(2, _measured, saving)
    with fake_world(2) as mesh:
        on = GPTConfig(vocab_size=64, max_positions=256, hidden_size=256, num_layers=2, num_heads=4)
        model = build(on, tp=TensorParallel(mesh["tp"], sequence_parallel=True), saving=saving, dtype=torch.float32)
        ids = token_ids(4, 256)
        with saved_bytes(model) as saved:
            model(ids, labels=ids, first_sample=0)
    assert every == [saved()] * 2


FLOODED = GPTConfig(
    vocab_size=64, max_positions=24, hidden_size=32, num_layers=2, num_heads=4, ffn_size=48, gated=True,
    activation="silu", mlp_bias=False, num_experts=4, experts_per_token=2,
)  # fmt: skip


def _flooded(world, saving):
    """48 rows a rank, to whose multiple a CPU fills up the rows of a router's logits."""
    model, ids = GPT(FLOODED, tp=make_tp(world), saving=saving), torch.zeros(4, 24, dtype=torch.int64)
    with routed(to_the_first), saved_bytes(model) as saved:
        model(ids, labels=ids, first_sample=0)
    return saved()


@pytest.mark.parametrize("saving", SAVING)
def test_a_flooded_rank_saves_what_meta_tensors_say(ranks, saving):
    """It has all rows."""
    on = Plan(2, 1, 24, 4, True, saving, dtype=torch.float32)
    even, all_rows = (dry_run(FLOODED, on._replace(imbalance=x)).work.saved for x in (1, 2))
    busiest, idle = ranks(2, _flooded, saving)
    assert idle < even < busiest == all_rows
    layers = 2 * (layer_bytes(FLOODED, on._replace(imbalance=2)) - layer_bytes(FLOODED, on))
    assert all_rows - even == layers > 0


def test_recompute_has_a_name():
    with pytest.raises(
        ValueError, match="recompute must be one of none, selective, full, fastest, smallest, got 'most'"
    ):
        activation_bytes(config(), recompute="most", seq=8, batch=1)


@pytest.mark.parametrize("name", ["gpt2", "gpt3-175b", "bert-large"])
@pytest.mark.parametrize("tp", [1, 4])
def test_parameters_in_closed_form(name, tp):
    on = load_config(name)
    with fake_world(tp) as mesh:
        model = build(on, tp=TensorParallel(mesh["tp"]), saving="fastest", dtype=torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())
    assert count == pytest.approx(
        parameter_count(on, tp), rel=0 if tp == 1 else 1e-4
    )  # an odd vocabulary is split unevenly
    if name.startswith("gpt") and tp == 1:
        V, h, s, L = on.vocab_size, on.hidden_size, on.max_positions, on.num_layers
        assert count == V * h + s * h + L * (12 * h * h + 13 * h) + 2 * h


def test_state():
    model = build(config(), saving="fastest", dtype=torch.bfloat16)
    n = sum(p.numel() for p in model.parameters())
    assert state_bytes(model) == (2 * n, 2 * n, 4 * n, 0, 0)
    assert state_bytes(model, dp=2) == (2 * n, 2 * n, 4 * n, 2 * n, 0)
    assert state_bytes(model, dp=2, bucket_views=True) == (2 * n, 2 * n, 4 * n, 0, 0)
    assert state_bytes(model, optimizer="adamw-fp32").optimizer == 12 * n
    assert state_bytes(model, dp=2, main_grad=True) == (2 * n, 4 * n, 12 * n, 0, 0)
    assert state_bytes(model, optimizer="adamw-fp32", main_grad=True).optimizer == 12 * n
    with pytest.raises(ValueError, match="main_grad is of a replicated model"):
        state_bytes(model, sharded=True, main_grad=True)
    sharded = state_bytes(model, dp=4, sharded=True)
    assert sharded.parameters == pytest.approx(n / 2, rel=1e-3) and sharded.buckets == 0
    assert 0 < sharded.gathered < 2 * n
    with pytest.raises(ValueError, match="optimizer must be one of sgd, adamw, adamw-fp32, muon, kfac, got 'lion'"):
        state_bytes(model, optimizer="lion")
    for name in WHOLE:
        with pytest.raises(ValueError, match=f"{name} needs whole matrices, and sharded is set"):
            state_bytes(model, sharded=True, optimizer=name)
    model.blocks.requires_grad_(False)
    assert state_bytes(model, optimizer="muon") == state_bytes(model)


@pytest.mark.parametrize("R", [1, 2])
def test_state_of_an_adapter(ranks, R):
    """Frozen weights are held, and nothing else of them."""
    for found, counted in ranks(R, adapter_after_a_step):
        assert found == counted[:4]


def adapter_after_a_step(world):
    model = GPT(STEP_CONFIG, tp=make_tp(world))
    add_lora(model, rank=2, alpha=4)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(p for p in parameters if p.requires_grad)
    model(**batch(STEP_CONFIG)).loss.backward()
    optimizer.step()
    gradients = [p.grad for p in parameters if p.grad is not None]
    states = [x for state in optimizer.state.values() for x in state.values()]
    found = tuple(bytes_of(tensors) for tensors in (parameters, gradients, states, gradients))
    return found, state_bytes(model, dp=2)


def bytes_of(tensors):
    """Bytes of what this rank has of tensors, scalars apart."""
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return sum(x.nbytes for x in local if x.dim())


def after_a_step(world, kind, dtype):
    """-> the bytes of both optimizers' states, with gradients that were gathered, and those that are counted."""
    with default_dtype(dtype):
        model = GPT(replace(STEP_CONFIG, gated=True, num_kv_heads=4), tp=make_tp(world))
    if kind == "kfac":
        first = KFAC(model)
        others, matrices = first.remaining(model), first.matrices
    else:
        matrices = WholeMatrices(model.blocks)
        first, others = torch.optim.Muon(matrices.parameters()), matrices.others(model)
        first.register_step_pre_hook(matrices.gather_gradients)
    second = torch.optim.AdamW(others)
    model(**batch(STEP_CONFIG)).loss.backward()
    for optimizer in (first, second):
        optimizer.step()
    states = [x for optimizer in (first, second) for state in optimizer.state.values() for x in state.values()]
    gradients = [x.grad for x in matrices.parameters() if x.grad is not None and world.size > 1]
    return bytes_of(states + gradients), state_bytes(model, optimizer=kind).optimizer


@pytest.mark.parametrize("R", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", WHOLE)
def test_state_of_whole_matrices(ranks, R, kind, dtype):
    for found, counted in ranks(R, after_a_step, kind, dtype):
        assert found == counted


def test_whole_matrices_in_a_dry_run():
    """Their state is on every rank, and none of FSDP's columns is there."""
    runs = [dry_run(config(64), Plan(tp=tp, dp=2, seq=64, optimizer="kfac")) for tp in (1, 4)]
    one, four = (r.held.state for r in runs)
    assert four.parameters < one.parameters / 3 and four.optimizer > one.optimizer * 0.95
    assert set(runs[1].held.states) == {"DDP", "data_parallel"} and "or FSDP" not in report(runs[1])
