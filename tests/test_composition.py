"""Two features at once, or a feature and a tool of torch: two training steps on gloo processes against one process.

Each pair is a cell of docs/composition.md (`make composition` writes it): it works, or an error refuses it.  The runs
of a column share their processes.  One that fails is named with its rows, and the others of the column are still run.

Spans: the features of every folder of tpfuse/, which bench/composition.py lists; the suite reads its record.
"""

import contextlib
import copy
import functools
import itertools
import json
import re
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tpfuse
from bench.composition import AT_ONCE, AT_ONCE_OF, COLUMNS, MODELS, NOT_APPLICABLE, REFUSED, ROWS
from tests.common import error
from tests.models.common import default_dtype, whole
from tpfuse import TensorParallel, as_dtensor, make_rng
from tpfuse.layers import LayerNorm, TransformerBlock, VocabParallelEmbedding, VocabParallelHead, cross_entropy
from tpfuse.models import GPT, Bert, BertConfig, GPTConfig

SIZES: dict[str, Any] = dict(vocab_size=61, max_positions=32, hidden_size=32, num_layers=2, num_heads=4, ffn_size=48)
NO_DROPOUT: dict[str, Any] = dict(dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0)
GPT2 = GPTConfig(**SIZES, **NO_DROPOUT)
LLAMA = GPTConfig(
    **SIZES, **NO_DROPOUT, family="llama", norm="rms", gated=True, activation="silu", num_kv_heads=2,
    qkv_bias=False, out_bias=False, mlp_bias=False, tie_embeddings=False,
    rope={"rope_type": "default", "rope_theta": 10000.0},
)  # fmt: skip
MIXTRAL = replace(LLAMA, family="mixtral", num_experts=4, experts_per_token=2)
OTHERS = {
    "Gemma 2 and 3": replace(
        LLAMA,
        norm="gemma_rms",
        activation="gelu_tanh",
        branch_norm=True,
        scaled_embedding=True,
        tie_embeddings=True,
        window=3,
        layer_types=("sliding_attention", "full_attention"),
        local_rope={"rope_theta": 100.0},
        attention_scalar=5,
        attention_softcap=2.0,
        logit_softcap=3.0,
        qk_norm=True,
        qk_norm_kind="gemma_rms",
    ),  # fmt: skip
    "OLMo 2": replace(LLAMA, pre_norm=False, branch_norm=True, qk_norm=True, qk_norm_all=True),
    "Qwen2-MoE": replace(MIXTRAL, family="qwen2_moe", qkv_bias=True, shared_size=24, shared_gate=True),
}
BERT = BertConfig(**SIZES, **NO_DROPOUT)
EVERYDAY = {"packed documents"}
CONTEXT = "context parallelism"
BITWISE = "bitwise"  # whose sums are those of one process, to the bit
ONE_BLOCK = "one block"  # of compiled models: most of their time goes into tracing blocks
TREES = "trees"  # of micro-batches' gradients, which make shards bitwise; with a vocabulary whose slices are DTensors'
SHARES, PER_SHARE, SEQ, STEPS = 2, 2, 12, 2  # a step's samples are in two shares: of two replicas, or one after another
CHANGES = {
    "dropout",
    "LoRA",
    "packed documents",
    "autocast",
    "label smoothing and z-loss",
    "clipping by torch",
    BITWISE,
    ONE_BLOCK,
    TREES,
}
FP32, ROUNDINGS = 2e-6, 2.0  # under autocast: so many times what bf16 makes of one process's fp32


AUTOCAST = frozenset({"autocast"})
WRONG = "wrong"  # a learning rate of several ranks that is not that of one


class Job(NamedTuple):
    """A run, and the rows of the table that it is of; the words of the error, where it is refused."""

    rows: tuple[str, ...]
    name: str
    on: frozenset[str]
    refused: str = ""

    @property
    def ranks(self) -> int:
        return 4 if self.on & {"DDP", "FSDP2", CONTEXT} else 2


def jobs_of(column: str) -> list[Job]:
    """A row that is a column too is in the first of the two."""
    rows = [row for row in ROWS if row not in COLUMNS or COLUMNS.index(column) < COLUMNS.index(row)]
    at_once = AT_ONCE_OF.get(column, AT_ONCE)
    apart = [(row,) for row in rows if row not in itertools.chain(*at_once)]
    jobs = [_job(shared, column) for shared in (*apart, *at_once)]
    return [job for job in jobs if (job.rows[0], column) not in NOT_APPLICABLE]


def _job(rows: tuple[str, ...], column: str) -> Job:
    refused, names = REFUSED.get((rows[0], column), ""), {*rows, column}
    name = rows[0] if rows[0] in MODELS else "GPT-2"
    on = names - {name} | ({ONE_BLOCK} if "torch.compile" in names else set())
    on |= {TREES} if {"FSDP2", BITWISE} <= names else set()
    return Job(rows, name, frozenset(on), refused)


JOBS = {column: jobs_of(column) for column in COLUMNS}


class Own(nn.Module):
    """A model of one's own, of tpfuse's layers and a plain module between row shards."""

    def __init__(self, tp: TensorParallel, p: float, recompute: bool, layers: int):
        super().__init__()
        self.tp, self.recompute = tp, recompute
        torch.manual_seed(1)
        self.embedding = VocabParallelEmbedding(61, 32, tp=tp)
        self.plain = tpfuse.replicated(nn.Linear(32, 32), tp)
        self.blocks = nn.ModuleList(
            TransformerBlock(32, 4, 48, tp=tp, causal=True, layer=i, dropout=p, attention_dropout=p)
            for i in range(layers)
        )
        self.norm = LayerNorm(32, tp=tp)
        self.head = VocabParallelHead(32, 61, tp=tp)

    def forward(self, input_ids: Tensor, labels: Tensor, step: int, first_sample: int, **loss: Any) -> Any:
        batch = len(input_ids)
        piece = self.tp.positions(input_ids.shape[1])
        h = self.plain(self.embedding(input_ids.t()[piece]))
        rng = make_rng(0, step, first_sample)
        for block in self.blocks:
            if self.recompute:
                h = torch.utils.checkpoint.checkpoint(block, h, batch=batch, rng=rng, use_reentrant=False)
            else:
                h = block(h, batch=batch, rng=rng)
        shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100).t()[piece].flatten()
        made = cross_entropy(self.head(self.norm(h)), shifted, tp=self.tp, vocab_size=61, **loss)
        return Loss(made)


class Loss(NamedTuple):
    loss: Tensor


def parallelized(tp: TensorParallel, dp: Any, layers: int, options: dict[str, Any]) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(2)
    p = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    theirs = GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_positions=32, n_embd=32, n_layer=layers, n_head=4, n_inner=48, **p)
    )
    return tpfuse.parallelize(theirs, tp, dp=dp, **options).train()


def make(name: str, on: frozenset[str], tp: TensorParallel, dp: Any) -> nn.Module:
    options: dict[str, Any] = dict(saving="smallest") if "saving smallest" in on else {}
    options |= dict(recompute="full") if "recompute" in on else {}
    layers = 1 if ONE_BLOCK in on else 2
    drops = dict(dropout=0.1, attention_dropout=0.1, embedding_dropout=0.1) if "dropout" in on else {}
    if name == "own model of layers":
        return Own(tp, 0.1 if drops else 0.0, "recompute" in on, layers)
    if name == "parallelize":
        return parallelized(tp, dp, layers, options)
    if name == "BERT":
        return Bert(replace(BERT, num_layers=layers, **drops), tp=tp, dp=dp, masked_lm=True, **options)
    config = {"Llama": LLAMA, "Mixtral": MIXTRAL, **OTHERS}.get(name, GPT2)
    if TREES in on:
        config = replace(config, vocab_size=64)
    types = {} if config.layer_types is None else dict(layer_types=config.layer_types[-layers:])
    exact = name in OTHERS and "autocast" not in on  # roundings of fp32 grow with the root of the width
    with default_dtype(torch.float64 if exact else torch.float32):
        return GPT(replace(config, num_layers=layers, **types, **drops), tp=tp, dp=dp, **options)


def call_of(name: str, on: frozenset[str], step: int, share: int) -> dict[str, Any]:
    """The arguments of one share of a step."""
    g = torch.Generator().manual_seed(100 * step + share)
    ids = torch.randint(61, (PER_SHARE, SEQ), generator=g)
    call: dict[str, Any] = dict(input_ids=ids, labels=ids, step=step, first_sample=share * PER_SHARE)
    if "torch.compile" in on:  # numbers would be constants of the graph
        call |= {name: torch.tensor(call[name]) for name in ("step", "first_sample")}
    if "packed documents" in on:
        bounds = torch.tensor([0, 5, SEQ, 2 * SEQ], dtype=torch.int32)
        packed = dict(input_ids=ids.view(1, -1), labels=ids.view(1, -1), cu_seqlens=bounds)
        call |= packed | dict(first_sample=call["first_sample"] // PER_SHARE)
    if "label smoothing and z-loss" in on:
        call |= dict(label_smoothing=0.1, z_loss=1e-3)
    return call


def counter(seen: Tensor) -> Callable[..., None]:
    """-> a hook that counts its calls."""

    def hook(*_: Any) -> None:
        seen.add_(1)

    return hook


class Run:
    """Two steps of training with what is ``on``, on a (dp, cp, tp) mesh."""

    def __init__(self, world, name: str, on: frozenset[str]):
        self.name, self.on = name, on
        dp = 2 if on & {"DDP", "FSDP2"} else 1
        cp = 2 if CONTEXT in on and world.size > 1 else 1
        self.mesh = world.pieces(dp, cp, world.size // dp // cp)
        self.dp, self.replica = dp, self.mesh["dp"].get_local_rank()
        overlap = "pairwise" if "overlap" in on else "off"
        pieces = self.mesh["cp"] if cp > 1 else None
        tp = TensorParallel(
            self.mesh["tp"],
            sequence_parallel="sequence parallelism" in on,
            overlap=overlap,
            cp=pieces,
            bitwise=4 if BITWISE in on else None,
        )
        self.model = make(name, on, tp, self.mesh["dp"])
        if "LoRA" in on:
            tpfuse.add_lora(self.model, rank=2, alpha=4.0, seed=3)
        if "deepcopy" in on:
            self.model = copy.deepcopy(self.model)
        self.seen: dict[str, Tensor] = {}  # calls of a hook; numbers of Python would be constants of a graph
        if "hooks on submodules" in on:
            block = next(m for m in self.model.modules() if isinstance(m, TransformerBlock))
            norm = block.attention_norm or block.attention_branch_norm
            inside = [part for part in block.mlp.children()][:1]  # experts are parameters of one module
            for part in block.attention, block.mlp, *inside, norm:
                seen = self.seen[type(part).__name__] = torch.zeros((), dtype=torch.int64)
                part.register_forward_hook(counter(seen))
        self.main = tpfuse.MainGrad(self.model, self.mesh["dp"]) if "MainGrad" in on else None
        self.trained = self._wrapped()
        weights = (
            [p for p in self.model.parameters() if p.requires_grad] if self.main is None else self.main.parameters()
        )
        self.optimizer = torch.optim.SGD(weights, lr=0.21 if WRONG in on else 0.2, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled="GradScaler" in on)

    def _wrapped(self) -> nn.Module:
        trained = self.model
        if "FSDP2" in self.on:
            as_dtensor(self.model, self.mesh["tp"])
            blocks = [m for m in self.model.modules() if isinstance(m, TransformerBlock)]
            mesh = self.mesh["dp", "cp"]._flatten() if CONTEXT in self.on else self.mesh["dp"]
            for module in (*blocks, self.model):
                fully_shard(module, mesh=mesh)
        if TREES in self.on:
            trained = tpfuse.data_parallel(self.model, self.mesh["dp"], bitwise_micro_batches=SHARES)
        if "DDP" in self.on:
            trained = DistributedDataParallel(self.model, process_group=self.mesh["dp"].get_group())
        if "torch.compile" in self.on:
            torch._dynamo.reset()
            trained = torch.compile(trained, backend="aot_eager")
        return trained

    def step(self, number: int) -> float:
        shares = [self.replica] if self.dp > 1 else range(SHARES)
        total = torch.zeros(())
        for share in shares:
            with torch.autocast("cpu", torch.bfloat16) if "autocast" in self.on else contextlib.nullcontext():
                loss = self.trained(**call_of(self.name, self.on, number, share)).loss
            self.scaler.scale(loss if TREES in self.on else loss / len(shares)).backward()
            total = total + loss.detach().float() / len(shares)
        if self.main is not None:
            self.main.reduce()
        self.scaler.unscale_(self.optimizer)
        if "clipping by torch" in self.on:
            torch.nn.utils.clip_grad_norm_((self.main or self.model).parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.main is not None:
            self.main.zero()
        dist.all_reduce(total, group=self.mesh["dp"].get_group())
        return float(total) / self.dp


def trained(world, name: str, on: frozenset[str], folder: str | None = None) -> dict[str, Any]:
    run = Run(world, name, on)
    losses = [run.step(number) for number in range(STEPS)]
    if "hooks on submodules" in on:
        assert all(run.seen.values()), run.seen
    if "save_checkpoint" in on:
        tpfuse.save_checkpoint(folder, run.model, run.optimizer, step=STEPS)
        spoil(run.model)
        tpfuse.load_checkpoint(folder, run.model, run.optimizer)
    if "state_dict in torch's checkpoints" in on:
        dcp.save({"model": run.model.state_dict()}, checkpoint_id=folder)
        spoil(run.model)
        state = run.model.state_dict()
        dcp.load({"model": state}, checkpoint_id=folder)
        run.model.load_state_dict(state)
    return {"losses": losses, "weights": whole(run.model)}


@torch.no_grad()
def spoil(model: nn.Module) -> None:
    for p in model.parameters():
        p.zero_()


def errors(found: dict[str, Any], exact: dict[str, Any]) -> dict[str, float]:
    made = {key: error(found["weights"][key], w) for key, w in exact["weights"].items()}
    return made | {"loss": max(abs(a - b) / abs(b) for a, b in zip(found["losses"], exact["losses"], strict=True))}


# ---- many runs in one call of the pool ----


class Broken(RuntimeError):
    """The run that raised: its number, the outcomes of those before it, and the error's text."""


def alone(world, jobs: list[Job], folder: str) -> list[dict[str, Any]]:
    """-> what one process gives for each job."""
    run = functools.cache(functools.partial(trained, world))
    limit = functools.cache(lambda name, on: ROUNDINGS * max(errors(run(name, on), run(name, on - AUTOCAST)).values()))
    changes = lambda job: CHANGES | {"MainGrad"} if BITWISE in job.on else CHANGES  # whose sums have other bits
    keys = [(job.name, job.on & changes(job)) for job in jobs]
    limit_of = lambda key: 0.0 if BITWISE in key[1] else limit(*key) if key[1] & AUTOCAST else FP32
    return [run(*key) | {"limit": limit_of(key)} for key in keys]


def outcome(world, job: Job, exact: dict[str, Any], folder: str) -> str:
    """-> the largest error, or the error that refuses; "failed: " and why where the numbers are not those."""
    if job.refused:
        with pytest.raises(ValueError, match=re.escape(job.refused)) as caught:
            trained(world, job.name, job.on, folder)
        return f"refused: {caught.value}"
    found = errors(trained(world, job.name, job.on, folder), exact)
    wrong = {key: e for key, e in found.items() if not e <= exact["limit"]}
    return f"failed: errors above {exact['limit']:.0e}: {wrong}" if wrong else f"{max(found.values()):.0e}"


def together(world, jobs: list[Job], exact: list[dict[str, Any]], folder: str) -> list[str]:
    """-> the outcomes.  Broken at the first job that raises: the ranks are apart then."""
    found: list[str] = []
    for i, (job, expected) in enumerate(zip(jobs, exact, strict=True)):
        try:
            found.append(outcome(world, job, expected, f"{folder}/{i}"))
        except BaseException as raised:
            raise Broken(found, "".join(traceback.format_exception(raised))) from None
    return found


def outcomes(ranks, jobs: list[Job], folder: Path) -> dict[Job, str]:
    """-> of each job its outcome, or "failed: " and why.  What follows a failed one is run in a world of its own."""
    (exact,), found = ranks(1, alone, jobs, str(folder)), {}
    left = list(zip(jobs, exact, strict=True))
    while left:
        part = folder / str(len(left))
        part.mkdir()
        now = [job for job, _ in left]
        try:
            made = ranks(now[0].ranks, together, now, [e for _, e in left], str(part), timeout=180.0 + 60.0 * len(now))
            every = [max(each, key=_order) for each in zip(*made, strict=True)]
        except Broken as broken:
            every = [*broken.args[0], f"failed: {broken.args[1]}"]
        found |= dict(zip(now, every, strict=False))
        left = left[len(every) :]
    return found


def _order(found: str) -> tuple[bool, float]:
    """A failure above any number."""
    number = found[:1].isdigit()
    return not number, float(found) if number else 0.0


@pytest.mark.parametrize("column", [c if c in EVERYDAY else pytest.param(c, marks=pytest.mark.slow) for c in COLUMNS])
def test_everything_with(ranks, column, tmp_path, record_property):
    wrong = []
    for size in {job.ranks for job in JOBS[column]}:
        jobs = [job for job in JOBS[column] if job.ranks == size]
        for job, found in outcomes(ranks, jobs, tmp_path).items():
            for row in job.rows:
                record_property("composition", json.dumps([row, column, found]))
            wrong += [f"{column} with {', '.join(job.rows)}: {found}"] * found.startswith("failed")
    assert not wrong, "\n".join(wrong)


TOGETHER = [
    {"FSDP2", "recompute"},
    {"DDP", "saving smallest", "sequence parallelism", "dropout"},
    {"LoRA", "packed documents", "sequence parallelism"},
    {"MainGrad", "recompute"},
    {"autocast"},
    {"overlap", "GradScaler", "clipping by torch", "label smoothing and z-loss"},
    {"sequence parallelism", "hooks on submodules", "deepcopy", "save_checkpoint", "state_dict in torch's checkpoints"},
]


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_families_with_much(ranks, name, tmp_path):
    """Norms of branches, soft caps, norms over all heads, two rotations; experts and a shared one."""
    compiled = frozenset({"torch.compile", "sequence parallelism", ONE_BLOCK})
    jobs = [Job((name,), name, on) for on in (*map(frozenset, TOGETHER), compiled)]
    wrong, limit = [], 1e-10
    for size in {job.ranks for job in jobs}:
        (tmp_path / str(size)).mkdir()
        found = outcomes(ranks, [job for job in jobs if job.ranks == size], tmp_path / str(size))
        good = lambda job, why: _order(why) <= (False, limit if "autocast" not in job.on else 1.0)
        wrong += [f"{sorted(job.on)}: {why}" for job, why in found.items() if not good(job, why)]
    assert not wrong, "\n".join(wrong)


def test_a_broken_cell_is_named_and_the_rest_is_run(ranks, tmp_path):
    """One that raises on every rank, though it should not, and one whose numbers are others."""
    good = Job(("good",), "GPT-2", frozenset({"MainGrad"}))
    wrong = Job(("wrong",), "GPT-2", frozenset({WRONG}))
    raises = Job(("raises",), "GPT-2", frozenset({"MainGrad"}), refused="what nobody says")
    found = outcomes(ranks, [good, raises, wrong, good._replace(rows=("after",))], tmp_path)
    by_row = {job.rows[0]: outcome for job, outcome in found.items()}
    assert by_row["raises"].startswith("failed: Traceback") and "DID NOT RAISE" in by_row["raises"]
    assert by_row["wrong"].startswith("failed: errors above 2e-06: ")
    assert float(by_row["good"]) < FP32 and float(by_row["after"]) < FP32
