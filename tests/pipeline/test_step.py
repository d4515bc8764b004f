"""A step over pipeline stages against one process: loss, gradients, curves, in fp64 with dropout on; what is counted of
it; what is refused."""

import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.models.common import default_dtype
from tests.pipeline.common import (
    DROP,
    GPT2,
    MODELS,
    ROWS,
    SEQ,
    adapted,
    batches,
    check_curve,
    check_said,
    errors,
    made,
    mine,
    one_process,
    over_stages,
    place,
    said,
)
from tests.planted import Mistaken
from tpfuse import TensorParallel, clip_grad_norm_, save_adapter
from tpfuse.kernels.experts import low_rank
from tpfuse.layers import ExpertBalance
from tpfuse.models import GPT
from tpfuse.pipeline import SCHEDULES, schedule
from tpfuse.sequence_parallel import records
from tpfuse.sequence_parallel.forms import plain


def staged(mesh, name, config, lora=False, overlap="off", sequence_parallel=False, over_replicas=False, **options):
    cp = mesh["cp"] if "cp" in mesh.mesh_dim_names else None
    tp = TensorParallel(mesh["tp"], sequence_parallel=sequence_parallel, overlap=overlap, cp=cp)
    return adapted(made(config, tp=tp, **place(mesh, name, over_replicas), **options), lora), None


LAYOUTS = [(2, 1, 2), (4, 1, 1), (2, 2, 1), (2, 2, 2)]
EVERY = [
    (layout, name)
    for layout in LAYOUTS
    for name in SCHEDULES
    if not (name == "dualpipev" and ROWS // layout[1] < 2 * layout[0])  # needs a micro-batch a stage
    and (layout != (2, 2, 2) or name in ("1f1b", "zbv", "chimera"))
]
DAILY = [((2, 1, 1), name) for name in SCHEDULES] + [((2, 1, 2), "zbv"), ((4, 1, 1), "chimera"), ((2, 2, 1), "1f1b")]


@pytest.mark.parametrize("layout, name", DAILY)
def test_every_schedule_gives_one_processs_curve(ranks, layout, name):
    check_curve(ranks, staged, layout, name, GPT2, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("layout, name", EVERY)
def test_every_layout(ranks, layout, name):
    check_curve(ranks, staged, layout, name, GPT2)


@pytest.mark.slow
def test_eight_steps(ranks):
    check_curve(ranks, staged, (2, 1, 2), "zbv", GPT2, steps=8)


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "gpt2"])
@pytest.mark.parametrize("name", [pytest.param("1f1b", marks=pytest.mark.slow), "zbv"])
def test_every_kind_of_model(ranks, kind, name):
    check_curve(ranks, staged, (2, 1, 1), name, MODELS[kind], steps=1)


@pytest.mark.parametrize(
    "name, sp", [("1f1b", True), ("zero-bubble", True), ("zero-bubble", False), ("interleaved", True)]
)
def test_experts_over_ranks_of_a_stage(ranks, name, sp):
    """Rows go to the experts of both tensor-parallel ranks of a stage; under zero-bubble gradients of weights wait."""
    check_curve(ranks, staged, (2, 1, 2), name, MODELS["mixtral"], steps=1, sequence_parallel=sp)


@pytest.mark.parametrize(
    "layout, name, options",
    [
        ((2, 2, 1), "1f1b", {}),
        ((2, 2, 2), "zbv", dict(sequence_parallel=True)),
        ((2, 2, 1), "chimera", {}),
        ((2, 2, 1), "interleaved", dict(saving="smallest", balance=ExpertBalance("sequence", 0.5, 0.1))),
        ((2, 2, 1), "zero-bubble", dict(lora=True)),
        pytest.param((2, 2, 1), "gpipe", {}, marks=pytest.mark.slow),
        pytest.param((2, 2, 1), "dualpipev", {}, marks=pytest.mark.slow),
    ],
)
def test_experts_over_replicas(ranks, layout, name, options):
    """A replica's rows go to experts of both, stage by stage; nothing is summed again."""
    check_curve(ranks, staged, layout, name, MODELS["mixtral"], over_replicas=True, **options)


def as_a_mean(right, ranks, divisor):
    return ranks


def everything(right, model):
    """They are then summed over the replicas once more."""
    return list(model.parameters())


MISTAKES = {
    "tpfuse.parallel.TensorParallel.with_divisor": as_a_mean,
    "tpfuse.pipeline.step.same_on_replicas": everything,
}


@pytest.mark.slow
@pytest.mark.parametrize("spoilt", MISTAKES)
def test_other_sums_of_experts_over_replicas_would_show(ranks, spoilt):
    exact = ranks(1, one_process, MODELS["mixtral"], False, 1, 1)[0]
    build, layout = functools.partial(staged, over_replicas=True), (2, 2, 1)
    spoilt = Mistaken(over_stages, spoilt, MISTAKES[spoilt])
    for curve in ranks(4, spoilt, build, layout, "1f1b", MODELS["mixtral"], {}, 1, 1, exact.first):
        assert curve.losses == pytest.approx(exact.losses, rel=1e-9) and curve.first > 1e-2


@pytest.mark.parametrize(
    "kind, layout, name",
    [
        ("gpt2", (2, 1, 2, 1), "zbv"),  # gradients of weights wait, and are summed over pieces when they are made
        ("mixtral", (2, 1, 2, 1), "1f1b"),
        pytest.param("llama", (2, 1, 2, 2), "zero-bubble", marks=pytest.mark.slow),
        pytest.param("gpt2", (2, 2, 2, 1), "chimera", marks=pytest.mark.slow),
    ],
)
def test_pieces_of_sequences(ranks, kind, layout, name):
    check_curve(ranks, staged, layout, name, MODELS[kind], steps=2, sequence_parallel=True)


@pytest.mark.parametrize("layout, name", [((2, 1, 1), "zbv"), ((2, 1, 2), "1f1b"), ((2, 2, 1), "zero-bubble")])
def test_losses_of_balance_are_added_stage_by_stage(ranks, layout, name):
    """Of all stages' layers; their gradients join that of what a stage is sent back."""
    check_curve(ranks, staged, layout, name, MODELS["mixtral"], steps=2, balance=ExpertBalance("sequence", 0.5, 0.1))


def forgetful(right, h, loss):
    return h


def test_a_balance_without_gradient_is_seen(ranks):
    balance, spoilt = ExpertBalance("sequence", 0.5, 0.1), "tpfuse.models.stages._WithLoss.apply"
    build = functools.partial(staged, balance=balance)
    exact = ranks(1, functools.partial(one_process, balance=balance), MODELS["mixtral"], False, 1, 1)[0]
    arguments = build, (2, 1, 1), "1f1b", MODELS["mixtral"], {}, 1, 1, exact.first
    first, last = ranks(2, Mistaken(over_stages, spoilt, forgetful), *arguments)
    assert first.losses == pytest.approx(exact.losses, rel=1e-9) and first.first > 1e-3 > last.first


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(saving="smallest"), id="smallest", marks=pytest.mark.slow),
        pytest.param(dict(recompute="full"), id="full", marks=pytest.mark.slow),
        pytest.param(dict(lora=True), id="lora"),
        pytest.param(dict(overlap="pairwise"), id="overlap"),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.slow
def test_beside_other_features(ranks, kind, options):
    check_curve(ranks, staged, (2, 1, 2), "zbv", MODELS[kind], steps=1, **options)


# ---- what is counted ----

GEMMS = {
    "linear_fwd": "fwd", "linear_dgrad": "dgrad", "linear_dgrad_act": "dgrad", "linear_wgrad": "wgrad",
    "experts_up": "fwd", "experts_down": "fwd", "experts_dact": "dgrad", "experts_dx": "dgrad",
    "experts_wgrad": "wgrad",
}  # fmt: skip


class Counted:
    """GEMMs by kind, and the pass of a pipeline in which they run."""

    def __init__(self, patch, runtime):
        self.seen, self.phase = Counter(), "F"
        for module in (plain, records, low_rank):
            for name, kind in GEMMS.items():
                if hasattr(module, name):
                    patch.setattr(module, name, self._counting(kind, getattr(module, name)))
        for stage in runtime._stages:
            for method, phase in (("forward", "F"), ("backward", "B"), ("backward_weight", "W")):
                method = f"{method}_one_chunk"
                patch.setattr(stage, method, self._within(phase, getattr(stage, method)))

    def _counting(self, kind, gemm):
        def run(*args, **kwargs):
            self.seen[kind, self.phase] += 1
            return gemm(*args, **kwargs)

        return run

    def _within(self, phase, method):
        def run(*args, **kwargs):
            self.phase = "I" if phase == "B" and not kwargs["full_backward"] else phase
            return method(*args, **kwargs)

        return run


def counts(world, name, kind):
    with pytest.MonkeyPatch.context() as patch, default_dtype(torch.float64):
        mesh = world.stages(2, 1, 1)
        config = replace(MODELS[kind], tie_embeddings=False)
        # one node a block has GEMMs of its own: parts are run
        model = made(config, stage=(mesh["pp"].get_local_rank(), 2, name), saving="smallest")
        pipeline = schedule(model, mesh["pp"], name, micro_batches=4)
        for ids, labels in batches(1):
            pipeline.step(ids, labels=labels)
        (runtime,) = pipeline._runtimes.values()
        counted = Counted(patch, runtime)
        for ids, labels in batches(1):
            pipeline.step(ids, labels=labels)
        kinds = {a.kind for a in pipeline.order.actions[world.rank]}
        return dict(counted.seen), kinds, sum(len(chunk.layers) for chunk in model.stages.chunks)


@pytest.mark.parametrize("name, kind", [
    *(pytest.param(name, "gpt2", marks=[pytest.mark.slow] * (name == "zero-bubble"))
      for name in ("1f1b", "zero-bubble", "zbv", "chimera")),
    ("zero-bubble", "mixtral"),
])  # fmt: skip
def test_no_gemm_runs_twice_and_weights_wait_for_w(ranks, name, kind):
    for seen, kinds, layers in ranks(2, counts, name, kind):
        passes = {kind: {phase: n for (k, phase), n in seen.items() if k == kind} for kind in set(GEMMS.values())}
        micro_batches = 4 if name != "chimera" else 2  # of each stage
        for kind, by_phase in passes.items():  # q, k and v; out; the MLP's two.  The head's loss is in chunks
            assert sum(by_phase.values()) == micro_batches * 4 * layers, kind
        assert set(passes["fwd"]) == {"F"}
        assert set(passes["wgrad"]) == kinds & {"B", "W"}
        assert set(passes["dgrad"]) == kinds & {"B", "I"}


# ---- what is refused ----


def refusals(world):
    mesh = world.stages(2, 1, 1)["pp"]
    rank = mesh.get_local_rank()
    staged = lambda name="1f1b", config=GPT2, *beside: GPT(config, stage=(rank, 2, name, *beside)).train()
    model = staged()
    step = schedule(model, mesh, "1f1b", 4).step
    (ids, labels), *_ = batches(1)
    tries = {
        "no stages": lambda: schedule(GPT(GPT2), mesh, "1f1b", 4),
        "no group": lambda: schedule(model, "pp", "1f1b", 4),
        "other stages": lambda: schedule(staged(), mesh, "zbv", 4),
        "unknown": lambda: schedule(staged(), mesh, "2f2b", 4),
        "stage unknown": lambda: staged("2f2b"),
        "few layers": lambda: staged("zbv", replace(GPT2, num_layers=3)),
        "layers": lambda: staged("1f1b", GPT2, None, [1, 2]),
        "rank": lambda: GPT(GPT2, stage=(2, 2)),
        "uneven": lambda: step(ids[:7], labels=labels[:7]),
        "no labels": lambda: step(ids),
        "labels": lambda: step(ids, labels=labels[:4]),
        "argument": lambda: step(ids, labels=labels, typo=1),
        "logits": lambda: step(ids, labels=labels, return_logits=True),
        "one place": lambda: schedule(GPT(GPT2, stage=(0, 2)), mesh, "1f1b", 4),
        "a token": lambda: step(ids + GPT2.vocab_size, labels=labels),
        "a label": lambda: step(ids, labels=labels + GPT2.vocab_size),
        "a call": lambda: model(ids, labels=labels),
        "generate": lambda: model.generate(ids, max_new_tokens=1),
        "save": lambda: staged().save_pretrained("nowhere"),
        "no head": lambda: GPT(GPT2, lm_head=False, stage=(rank, 2)),
        "balance": lambda: GPT(MODELS["mixtral"], balance=ExpertBalance("batch"), stage=(rank, 2)),
        "balance as a tree": lambda: schedule(
            GPT(MODELS["mixtral"], balance=ExpertBalance(), stage=(rank, 2)), mesh, "1f1b", 4, bitwise=True
        ),
        "layers of no kind": lambda: staged("1f1b", GPT2, None, 8),
        "clip": lambda: clip_grad_norm_(staged(), 1.0),
        "adapter": lambda: save_adapter(adapted(staged(), True), "nowhere"),
        "disabled": lambda: torch.no_grad()(step)(ids, labels=labels),
        "ddp": lambda: schedule(torch.nn.parallel.DistributedDataParallel(GPT(GPT2)), mesh, "1f1b", 4),
    }
    found = {key: said(attempt) for key, attempt in tries.items()}
    assert torch.isfinite(step(ids, labels=labels, step=0))  # and nothing has been changed by any of them
    dist.barrier()
    return found


WORDS = {
    "no stages": "has no stages; make it with stage=",
    "no group": "pipeline: mesh must be a DeviceMesh of one dimension or a ProcessGroup",
    "other stages": "make the model with stage=(",
    "unknown": "schedule must be one of gpipe",
    "stage unknown": "stage's schedule must be one of gpipe",
    "few layers": "cuts the model into 4 stages, and it has 3 layers",
    "layers": "must be 2 positive integers whose sum is 4",
    "rank": "stage's rank must be below its ranks=2, got 2",
    "uneven": "a batch of 7 cannot be cut into 4",
    "no labels": "needs labels, on every rank",
    "one place": "the model was made for rank 0 of 2, and this is rank 1 of 2",
    "a token": "input_ids must lie in 0 to",
    "a label": "GPT: labels must lie in 0 to",
    "labels": "labels must have 8 rows",
    "argument": "takes no typo",
    "logits": "return_logits is not built",
    "a call": "a call needs the whole model",
    "generate": "generate needs the whole model",
    "save": "save_pretrained: the model is one rank's stages, and the others are not known before",
    "no head": "pipeline stages need a language-model head",
    "balance": "over pipeline stages balance must be of kind 'sequence', a sum over layers, got 'batch'",
    "balance as a tree": "is not built beside balance=ExpertBalance",
    "layers of no kind": "must be 2 positive integers whose sum is 4, got 8",
    "clip": "the others are not known before tpfuse.pipeline.schedule",
    "adapter": "save_adapter: the model is one rank's stages, and the others are not known before",
    "disabled": "step makes gradients, and they are disabled; call evaluate",
    "ddp": "DistributedDataParallel does not see gradients",
}


def test_what_is_refused_says_why_on_every_rank(ranks):
    check_said(ranks(2, refusals), WORDS)


# ---- the rest ----


def packed_and_evaluated(world):
    mesh = world.stages(2, 1, 1)["pp"]
    with default_dtype(torch.float64):
        bounds = [torch.tensor([0, 5, 12], dtype=torch.int32), torch.tensor([0, 7, 9, 12], dtype=torch.int32)]
        ((ids, _),) = batches(1, rows=2)
        count = sum(SEQ - (len(b) - 1) for b in bounds)
        whole, exact = made(GPT2), 0.0
        for m, b in enumerate(bounds):
            given = dict(labels=ids[m : m + 1], cu_seqlens=b, loss_normalizer=float(count))
            loss = whole(ids[m : m + 1], **given, step=0, first_sample=m).loss
            loss.backward()
            exact += loss.item()
        model = made(GPT2, stage=(mesh.get_local_rank(), 2))
        pipeline = schedule(model, mesh, "1f1b", 2)
        loss = pipeline.step(ids, labels=ids, cu_seqlens=bounds, step=0)
        first = {name: p.grad for name, p in whole.named_parameters()}
        worst = errors(model, first)
        grads = [p.grad.clone() for p in model.parameters()]
        evaluated = pipeline.evaluate(ids, labels=ids, cu_seqlens=bounds, step=0)
        same = all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
        return loss.item() - exact, worst, evaluated.item() - exact, same


def test_packed_documents_and_evaluate(ranks):
    for loss, worst, evaluated, same in ranks(2, packed_and_evaluated):
        assert abs(loss) < 1e-12 and abs(evaluated) < 1e-12 and worst < 1e-9 and same


def accumulated(world, layout, name):
    """Two steps without zeroing between, against one process's."""
    mesh = world.stages(*layout)
    with default_dtype(torch.float64):
        whole, model, rows = made(GPT2), made(GPT2, **place(mesh, name)), mine(mesh)
        pipeline = schedule(model, mesh["pp"], name, 4)
        for step, (ids, labels) in enumerate(batches(2)):
            whole(ids, labels=labels, step=step, first_sample=0).loss.backward()
            pipeline.step(ids[rows], labels=labels[rows], step=step)
        return errors(model, {key: p.grad for key, p in whole.named_parameters()})


@pytest.mark.parametrize(
    "layout, name",
    [pytest.param((2, 1, 1), "1f1b", marks=pytest.mark.slow), ((2, 1, 1), "chimera"), ((2, 2, 1), "zbv")],
)
def test_gradients_of_two_steps_add_up(ranks, layout, name):
    assert max(ranks(layout[0] * layout[1], accumulated, layout, name)) < 1e-9


def failed(world):
    """Whether the gradients after a step that fails in its third micro-batch are those before: none, then some."""
    mesh, unchanged = world.stages(1, world.size, 1), []
    model = made(GPT2, **place(mesh, "1f1b"))
    pipeline = schedule(model, mesh["pp"], "1f1b", 4)
    ((ids, labels),), rows = batches(1), mine(mesh)
    for _ in range(2):
        before, passes = [None if p.grad is None else p.grad.clone() for p in model.parameters()], iter((1, 1, 0))
        hook = model.input_norm.register_forward_hook(lambda *_, passes=passes: 1 // next(passes) and None)
        with pytest.raises(RuntimeError, match="failed to run forward"):
            pipeline.step(ids[rows], labels=labels[rows])
        pairs = [(p.grad, g) for p, g in zip(model.parameters(), before, strict=True)]
        unchanged.append(all(p is g if g is None else torch.equal(p, g) for p, g in pairs))
        hook.remove()
        pipeline.step(ids[rows], labels=labels[rows])
    return unchanged


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_that_fails_leaves_the_gradients_of_those_before(ranks, replicas):
    assert ranks(replicas, failed) == [[True, True]] * replicas


def evaluated_between_steps(world, name):
    mesh = world.stages(2, 1, 1)["pp"]
    with default_dtype(torch.float64):
        whole, model = made(GPT2).eval(), made(GPT2, stage=(mesh.get_local_rank(), 2, name)).eval()
        pipeline, found = schedule(model, mesh, name, 4), []
        for ids, labels in batches(2):
            found.append(pipeline.evaluate(ids, labels=labels).item() - whole(ids, labels=labels).loss.item())
            found.append(pipeline.step(ids, labels=labels).item() - whole(ids, labels=labels).loss.item())
        return max(map(abs, found))


@pytest.mark.parametrize("name", ["1f1b", "zbv", "chimera"])
def test_evaluate_between_steps(ranks, name):
    assert max(ranks(2, evaluated_between_steps, name)) < 1e-12


def in_low_precision(world, name, autocast):
    """The largest error of a gradient against fp64, over that of one process."""
    mesh = world.stages(2, 1, 1)["pp"]
    dtype = torch.float32 if autocast else torch.bfloat16
    ((ids, labels),) = batches(1)
    with default_dtype(torch.float64):
        exact = made(GPT2)
        exact(ids, labels=labels, step=0, first_sample=0).loss.backward()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        whole, model = made(GPT2).to(dtype), made(GPT2, stage=(mesh.get_local_rank(), 2, name)).to(dtype)
        whole(ids, labels=labels, step=0, first_sample=0).loss.backward()
        loss = schedule(model, mesh, name, 2).step(ids, labels=labels, step=0)
    gradients = {key: p.grad for key, p in exact.named_parameters()}
    own = max(
        float((p.grad - gradients[k]).abs().max() / gradients[k].abs().max()) for k, p in whole.named_parameters()
    )
    return errors(model, gradients) / own, loss.dtype


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_in_low_precision(ranks, autocast):
    for error, dtype in ranks(2, in_low_precision, "zbv", autocast):
        assert error < 4 and dtype == torch.float32


def different_batches(world):
    mesh = world.stages(2, 1, 2)
    model = made(GPT2, tp=TensorParallel(mesh["tp"]), stage=(mesh["pp"].get_local_rank(), 2))
    pipeline = schedule(model, mesh["pp"], "1f1b", 4)
    (ids, labels), (other, _) = batches(2)
    pipeline.step(ids, labels=labels)
    return said(lambda: pipeline.step(other if mesh["tp"].get_local_rank() else ids, labels=labels))


def test_tensor_parallel_ranks_compare_every_step(ranks):
    for words in ranks(4, different_batches):
        assert "input_ids must be the same on every tensor-parallel rank" in words


def head_alone(world):
    mesh = world.stages(2, 1, 1)["pp"]
    with default_dtype(torch.float64):
        config = replace(GPT2, tie_embeddings=False)
        whole, model = made(config), made(config, stage=(mesh.get_local_rank(), 2))
        for m in (whole, model):
            m.requires_grad_(False)
            if m.head is not None:
                m.head.requires_grad_(True)
        ((ids, labels),) = batches(1)
        whole(ids, labels=labels, step=0, first_sample=0).loss.backward()
        schedule(model, mesh, "1f1b", 4).step(ids, labels=labels, step=0)
        worst = errors(model, {key: p.grad for key, p in whole.named_parameters()})
        return worst, clip_grad_norm_(model, 1.0).item() - clip_grad_norm_(whole, 1.0).item()


def test_a_stage_may_be_frozen(ranks):
    for worst, norm in ranks(2, head_alone):
        assert worst < 1e-9 and abs(norm) < 1e-9


def reads(world, folder):
    mesh = world.stages(2, 1, 1)["pp"]
    whole = GPT.from_pretrained(folder, dtype=torch.float64)
    found = {}
    for name in ("1f1b", "zbv", "chimera"):
        model = GPT.from_pretrained(folder, dtype=torch.float64, stage=(mesh.get_local_rank(), 2, name))
        parameters = dict(whole.named_parameters())
        found[name] = all(torch.equal(p, parameters[key]) for key, p in model.named_parameters())
        found[name] &= name == "chimera" or len(list(model.parameters())) < len(parameters)  # two ranks have it all
    return found


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_rank_reads_its_own_stages(ranks, tmp_path, kind):
    none = dict.fromkeys(DROP, 0.0) if kind == "llama" else {}  # whose files know no dropout
    GPT(replace(MODELS[kind], **none), seed=3).save_pretrained(tmp_path)
    assert ranks(2, reads, tmp_path) == [dict.fromkeys(("1f1b", "zbv", "chimera"), True)] * 2


AXES = {  # what rank 1, the second stage, does otherwise: (of its model, of its schedule, between, what is named)
    "eps": (dict(eps=1e-2), {}, None, "config must be the same on every pipeline rank"),
    "dropout": (dict(dropout=0.4), {}, None, "config must"),
    "width": (dict(hidden_size=48), {}, None, "config must"),
    "micro-batches": ({}, dict(micro_batches=2), None, "micro_batches must"),
    "schedule": ({}, dict(name="gpipe"), None, "name must"),
    "seed": ({}, {}, lambda model: setattr(model, "seed", 1), "model.seed must"),
    "step": ({}, {}, lambda model: model.step.add_(1), "model.step must"),
    "dtype": ({}, {}, lambda model: model.to(torch.bfloat16), "dtype must"),
}


REPLICAS = {  # what the second stage's second replica does otherwise, and no other rank
    "dropout of a part": ({}, {}, lambda model: setattr(model.blocks[-1], "dropout", 0.75), "parts with dropout=0.75"),
    "a part in eval": (
        {},
        {},
        lambda model: model.blocks[-1].eval(),
        "parts in another mode must be the same on every",
    ),
}


def disagreeing(world, name, replicas):
    mesh, (config, plan, between, _) = world.stages(2, replicas, 1), (AXES | REPLICAS)[name]
    differs = world.rank == world.size - 1
    with pytest.raises(ValueError) as caught:
        model = made(replace(GPT2, **(config if differs else {})), **place(mesh, "1f1b"))
        pipeline = schedule(model, mesh["pp"], **(dict(name="1f1b", micro_batches=4) | (plan if differs else {})))
        if differs and between is not None:
            between(model)
        ids, labels = next(batches(1))
        pipeline.step(ids, labels=labels)
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("name", AXES)
def test_stages_that_disagree(ranks, name):
    texts = ranks(2, disagreeing, name, 1)
    assert len(set(texts)) == 1 and AXES[name][3] in texts[0], texts


@pytest.mark.parametrize("name", REPLICAS)
def test_replicas_of_a_stage_that_disagree(ranks, name):
    texts = ranks(4, disagreeing, name, 2)
    assert len(set(texts)) == 1 and REPLICAS[name][3] in texts[0], texts
