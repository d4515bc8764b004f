"""A step over pipeline stages against one process: loss, gradients, curves, in fp64 with dropout on; what is counted of
it; what is refused."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.models.common import default_dtype
from tpfuse import TensorParallel, add_lora, clip_grad_norm_, param_groups
from tpfuse.kernels.linear import op as linear_op
from tpfuse.layers.module import named_specs
from tpfuse.models import GPT, Bert, BertConfig, GPTConfig
from tpfuse.pipeline import SCHEDULES, schedule
from tpfuse.sequence_parallel import records

ROWS, SEQ, VOCAB = 8, 12, 97
SHAPE = dict(vocab_size=VOCAB, max_positions=16, hidden_size=24, num_layers=8, num_heads=4)
DROP = dict(dropout=0.1, attention_dropout=0.1, embedding_dropout=0.1)
GPT2 = GPTConfig(**SHAPE, **DROP)
LLAMA = dict(family="llama", norm="rms", gated=True, activation="silu", rope=dict(rope_theta=1e4), num_kv_heads=2)
PLAIN = dict(qkv_bias=False, out_bias=False, mlp_bias=False)
MODELS = {
    "gpt2": GPT2,
    "untied": replace(GPT2, tie_embeddings=False),
    "llama": GPTConfig(**SHAPE, **DROP, **LLAMA, **PLAIN, tie_embeddings=False),
    "parallel": replace(GPT2, parallel_residual=True),
    "branches": replace(GPT2, pre_norm=False, branch_norm=True),
    "bert": BertConfig(**SHAPE, **DROP),
}


def made(config, **options):
    if isinstance(config, BertConfig):
        return Bert(config, masked_lm=True, seed=3, **options).train()
    return GPT(config, seed=3, **options).train()


def batches(steps, rows=ROWS):
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(VOCAB, (rows, SEQ), generator=g)
        yield ids, ids.masked_fill(torch.rand(rows, SEQ, generator=g) < 0.2, -100)


def adapted(model, lora):
    if lora:
        add_lora(model, rank=2, alpha=4)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith(".B"):
                    p.add_(0.01)
    return model


def curve(world, config, steps, options):
    """One process: the losses, the norms, and the first step's gradients by name."""
    lora, options = options.get("lora", False), {k: v for k, v in options.items() if k not in ("lora", "overlap")}
    with default_dtype(torch.float64):
        model = adapted(made(config, **options), lora)
        optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=1e-3)
        losses, norms, first = [], [], {}
        for ids, labels in batches(steps):
            loss = model(ids, labels=labels).loss
            loss.backward()
            first = first or {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
            norms.append(clip_grad_norm_(model, 0.5).item())
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, norms, first


def staged_curve(world, layout, name, config, steps, first, options):
    """Pipeline stages: the losses, the norms, and the largest relative error of this rank's first gradients."""
    options = dict(options)
    lora, overlap = options.pop("lora", False), options.pop("overlap", "off")
    mesh = world.stages(*layout)
    with default_dtype(torch.float64):
        pp, dp = mesh["pp"], mesh["dp"]
        tp = TensorParallel(mesh["tp"], overlap=overlap)
        options |= dict(stage=(pp.get_local_rank(), pp.size(), name))
        model = adapted(made(config, tp=tp, dp=dp if dp.size() > 1 else None, **options), lora)
        pipeline = schedule(model, pp, name, micro_batches=ROWS // dp.size())
        optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=1e-3)
        losses, norms, worst, rows = [], [], None, ROWS // dp.size()
        for ids, labels in batches(steps):
            mine = slice(dp.get_local_rank() * rows, (dp.get_local_rank() + 1) * rows)
            losses.append(pipeline.step(ids[mine], labels=labels[mine]).item())
            if worst is None:
                worst = errors(model, first)
            norms.append(clip_grad_norm_(model, 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        assert len(pipeline.store) == 0
        return losses, norms, worst, [name for name, _ in model.named_parameters()]


def errors(model, first):
    worst = 0.0
    for (name, spec, tp), p in zip(named_specs(model), model.parameters(), strict=True):
        if p.requires_grad:
            exact = first[name][spec.local(tp)]
            worst = max(worst, float((p.grad - exact).abs().max() / first[name].abs().max()))
    return worst


def check_curve(ranks, layout, name, config, steps=3, **options):
    losses, norms, first = ranks(1, curve, config, steps, options)[0]
    size = layout[0] * layout[1] * layout[2]
    every = ranks(size, staged_curve, layout, name, config, steps, first, options)
    for theirs, their_norms, worst, _ in every:
        assert theirs == pytest.approx(losses, rel=1e-9)
        assert their_norms == pytest.approx(norms, rel=1e-9)
        assert worst < 1e-9
    held = {parameter for *_, names in every for parameter in names}
    assert set(first) <= held


LAYOUTS = [(2, 1, 1), (2, 1, 2), (4, 1, 1), (2, 2, 1), (2, 2, 2)]
DAILY = {((2, 1, 1), name) for name in SCHEDULES} | {((2, 1, 2), "zbv"), ((4, 1, 1), "chimera"), ((2, 2, 1), "1f1b")}


@pytest.mark.parametrize(
    "layout, name",
    [
        pytest.param(layout, name, marks=[] if (layout, name) in DAILY else pytest.mark.slow, id=f"{layout}-{name}")
        for layout in LAYOUTS
        for name in SCHEDULES
        if not (name == "dualpipev" and ROWS // layout[1] < 2 * layout[0])  # needs a micro-batch a stage
    ],
)
def test_every_schedule_gives_one_processs_curve(ranks, layout, name):
    check_curve(ranks, layout, name, GPT2, steps=3 if layout == (2, 1, 1) else 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zbv", "chimera"])
def test_twenty_steps(ranks, name):
    check_curve(ranks, (2, 1, 2), name, GPT2, steps=20)


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "gpt2"])
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_every_kind_of_model(ranks, kind, name):
    check_curve(ranks, (2, 1, 1), name, MODELS[kind], steps=1)


@pytest.mark.parametrize(
    "options",
    [dict(saving="smallest"), dict(recompute="full"), dict(lora=True), dict(overlap="pairwise")],
    ids=["smallest", "full", "lora", "overlap"],
)
def test_beside_other_features(ranks, options):
    check_curve(ranks, (2, 1, 2), "zbv", MODELS["llama"], steps=1, **options)


# ---- what is counted ----


class Counted:
    """GEMMs by kind, in the passes of a pipeline in which they run."""

    def __init__(self, monkeypatch, runtime):
        self.seen, self.phase = Counter(), "F"
        for kind in ("dgrad", "wgrad"):
            self._wrap(monkeypatch, kind)
        for stage in runtime._stages:
            for method, phase in (("backward_one_chunk", "I"), ("backward_weight_one_chunk", "W")):
                self._within(monkeypatch, stage, method, phase)

    def _wrap(self, monkeypatch, kind):
        name = f"linear_{kind}"
        for module in (records, linear_op, __import__("tpfuse.sequence_parallel.forms.plain", fromlist=["_"])):
            if hasattr(module, name):
                original = getattr(module, name)

                def run(*args, _original=original, **kwargs):
                    self.seen[kind, self.phase] += 1
                    return _original(*args, **kwargs)

                monkeypatch.setattr(module, name, run)

    def _within(self, monkeypatch, stage, method, phase):
        original = getattr(stage, method)

        def run(*args, **kwargs):
            self.phase = "B" if phase == "I" and kwargs.get("full_backward", True) else phase
            return original(*args, **kwargs)

        monkeypatch.setattr(stage, method, run)


def counts(world, name):
    with pytest.MonkeyPatch.context() as patch, default_dtype(torch.float64):
        mesh = world.stages(2, 1, 1)
        model = made(replace(GPT2, tie_embeddings=False), stage=(mesh["pp"].get_local_rank(), 2, name))
        pipeline = schedule(model, mesh["pp"], name, micro_batches=4)
        for ids, labels in batches(1):
            pipeline.step(ids, labels=labels)
        counted = Counted(patch, next(iter(pipeline._runtimes.values())))
        for ids, labels in batches(1):
            pipeline.step(ids, labels=labels)
        split = {a.kind for a in pipeline.order.actions[world.rank]}
        return dict(counted.seen), split, [len(c.layers) for c in model.chunks], model.holds_last


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble", "zbv"])
def test_no_gemm_runs_twice_and_weights_wait_for_w(ranks, name):
    for seen, kinds, layers, last in ranks(2, counts, name):
        linears = 4 * sum(layers) + last  # q, k and v, out, the MLP's two; the head
        wgrads = {phase: n for (kind, phase), n in seen.items() if kind == "wgrad"}
        assert sum(wgrads.values()) == 4 * linears  # once a micro-batch
        assert ("I" in wgrads) is False  # what is split off leaves no weight's GEMM to the input's pass
        assert ("W" in wgrads) == ("W" in kinds)


# ---- what is refused ----


def said(attempt):
    with pytest.raises(ValueError) as caught:
        attempt()
    return str(caught.value)


def refusals(world):
    mesh = world.stages(2, 1, 1)["pp"]
    rank = mesh.get_local_rank()
    staged = lambda name="1f1b", config=GPT2, *beside: GPT(config, stage=(rank, 2, name, *beside)).train()
    model = staged()
    step = schedule(model, mesh, "1f1b", 4).step
    (ids, labels), *_ = batches(1)
    tries = {
        "no stages": lambda: schedule(GPT(GPT2), mesh, "1f1b", 4),
        "other stages": lambda: schedule(staged(), mesh, "zbv", 4),
        "unknown": lambda: schedule(staged(), mesh, "2f2b", 4),
        "stage unknown": lambda: staged("2f2b"),
        "few layers": lambda: staged("zbv", replace(GPT2, num_layers=3)),
        "layers": lambda: staged("1f1b", GPT2, None, [3, 4]),
        "rank": lambda: GPT(GPT2, stage=(2, 2)),
        "uneven": lambda: step(ids[:7], labels=labels[:7]),
        "no labels": lambda: step(ids),
        "labels": lambda: step(ids, labels=labels[:4]),
        "argument": lambda: step(ids, labels=labels, typo=1),
        "logits": lambda: step(ids, labels=labels, return_logits=True),
        "a call": lambda: model(ids, labels=labels),
        "generate": lambda: model.generate(ids, max_new_tokens=1),
        "save": lambda: model.save_pretrained("nowhere"),
        "disabled": lambda: torch.no_grad()(step)(ids, labels=labels),
        "ddp": lambda: schedule(torch.nn.parallel.DistributedDataParallel(GPT(GPT2)), mesh, "1f1b", 4),
    }
    found = {key: said(attempt) for key, attempt in tries.items()}
    assert torch.isfinite(step(ids, labels=labels, step=0))  # and nothing has been changed by any of them
    dist.barrier()
    return found


WORDS = {
    "no stages": "has no stages; make it with stage=",
    "other stages": "make the model with stage=(",
    "unknown": "schedule must be one of gpipe",
    "stage unknown": "stage's schedule must be one of gpipe",
    "few layers": "cuts the model into 4 stages, and it has 3 layers",
    "layers": "must be 2 positive numbers whose sum is 8",
    "rank": "stage's rank must be below its ranks=2, got 2",
    "uneven": "a batch of 7 cannot be cut into 4",
    "no labels": "needs labels, on every rank",
    "labels": "labels must have 8 rows",
    "argument": "takes no typo",
    "logits": "return_logits is not built",
    "a call": "a call needs the whole model",
    "generate": "generate needs the whole model",
    "save": "save_pretrained needs the whole model",
    "disabled": "step makes gradients, and they are disabled; call evaluate",
    "ddp": "DistributedDataParallel does not see gradients",
}


def test_what_is_refused_says_why_on_every_rank(ranks):
    for found in ranks(2, refusals):
        assert {key for key, words in WORDS.items() if words not in found[key]} == set()


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
