"""Generation on CPUs against transformers: decoding and prompts, batches, dtypes and families.

    python -m bench.models.generate                                  every case: a quarter of an hour on two cores
    python -m bench.models.generate --model llama --dtype fp32 --case decode --batch 1 --rounds 5
    python -m bench.models.generate --json bench/results/generate.json

Each family is a model of 8 layers of width 512 with random weights, written by transformers and read by tpfuse.  All
runs of a row follow each other, round by round, greedy, on one thread unless said, so that what slows the machine
down slows all of them.  A row gives the median of the ratios of neighbouring runs and their quartiles, of wall time
and of CPU time, of which other processes take nothing.  "decode" makes 64 tokens from a prompt of 16, "prefill" the
first token of a longer prompt.

"TP = 2" is one model over two processes of one thread each, against one process on one thread, and on two.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bench import machine
from bench._parser import check_rounds, parser_of
from bench.measured import generate
from tpfuse import TensorParallel
from tpfuse.models import GPT
from tpfuse.tools.ledger.processes import on_ranks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LLAMA = dict(
    vocab_size=32000,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=2176,
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", LLAMA | dict(head_dim=64)),
    "mixtral": ("MixtralForCausalLM", LLAMA | dict(intermediate_size=896, num_local_experts=8, num_experts_per_tok=2)),
    "gpt2": ("GPT2LMHeadModel", dict(vocab_size=32000, n_positions=2176, n_embd=512, n_layer=8, n_head=8)),
}


Run = Callable[[], Tensor]


class Case(NamedTuple):
    name: str
    prompt: int
    new: int


CASES = {"decode": [Case("decode", 16, 64)], "prefill": [Case("prefill", 256, 1), Case("prefill", 2048, 1)]}
LARGEST = 8 * 256  # rows of a prompt: more take minutes and say nothing else


def arguments() -> argparse.Namespace:
    parser = parser_of("bench.models.generate", __doc__)
    several = dict(action="append", metavar="NAME")
    parser.add_argument("--model", choices=MODELS, help="default: all", **several)
    parser.add_argument("--dtype", choices=DTYPES, help="default: both", **several)
    parser.add_argument("--case", choices=CASES, help="default: both", **several)
    parser.add_argument("--batch", type=int, action="append", help="prompts (default: 1 and 8)")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each (default 7)")
    parser.add_argument("--tp", type=int, default=2, help="processes of the tensor-parallel rows (default 2; 1: none)")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    args = parser.parse_args()
    check_rounds(parser, args.rounds)
    args.model, args.dtype, args.case = args.model or [*MODELS], args.dtype or [*DTYPES], args.case or [*CASES]
    args.batch = args.batch or [1, 8]
    return args


# ---- models ----


def written(name: str, dtype: torch.dtype, folder: str) -> Any:
    """Returns transformers' model, whose files are then in ``folder``."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    head, sizes = MODELS[name]
    model_class = getattr(transformers, head)
    model = model_class(model_class.config_class(**sizes)).to(dtype).eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


# ---- measurement ----


class Timed(NamedTuple):
    wall: float
    cpu: float
    tokens: Tensor | None


def timed(run: Run | None, threads: int) -> Timed:
    """Seconds from a common start until the slowest rank is done, and CPU seconds of all; None only waits."""
    dist.barrier()
    torch.set_num_threads(threads)
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = None if run is None else run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    torch.set_num_threads(1)
    slowest, spent = torch.tensor(wall if run is not None else 0.0), torch.tensor(cpu if run is not None else 0.0)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(spent)
    return Timed(float(slowest), float(spent), tokens)


def measure(rounds: int, runs: dict[str, tuple[Run | None, int]]) -> dict[str, list[Timed]]:
    times: dict[str, list[Timed]] = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name, (run, threads) in runs.items():
            one = timed(run, threads)
            if i:
                times[name].append(one)
    return times


def ratio(over: list[Timed], under: list[Timed], field: str) -> list[float]:
    values = [getattr(a, field) / getattr(b, field) for a, b in zip(over, under, strict=True)]
    return statistics.quantiles(values, n=4)


def rows_of(times: dict[str, list[Timed]], new: int, tp: int) -> list[dict[str, Any]]:
    reference, ours = times["transformers"], times["TP = 1"]
    pairs = {"TP = 1 over transformers": (reference, ours)}
    if "TP" in times:
        pairs |= {f"TP = {tp} over one thread": (ours, times["TP"])}
        pairs |= {f"TP = {tp} over {tp} threads": (times["threads"], times["TP"])}
    return [
        dict(
            row=name,
            wall=ratio(over, under, "wall"),
            cpu=ratio(over, under, "cpu"),
            milliseconds=1e3 * statistics.median(one.wall for one in under),
            same_tokens=float((over[0].tokens[:, -new:] == under[0].tokens[:, -new:]).float().mean()),
        )
        for name, (over, under) in pairs.items()
    ]


class Providers(NamedTuple):
    """One model three times; None on ranks that only wait."""

    reference: Any
    full: GPT | None
    split: GPT | None


def runs_of(models: Providers, case: Case, batch: int, tp: int) -> dict[str, tuple[Run | None, int]]:
    """The name of each run -> what it calls, and on how many threads."""
    ids = torch.randint(32000, (batch, case.prompt), generator=torch.Generator().manual_seed(1))

    def call(model: Any, **options: Any) -> Run | None:
        greedy = dict(max_new_tokens=case.new, do_sample=False, **options)
        return None if model is None else lambda: model.generate(ids, **greedy)

    runs = {"transformers": (call(models.reference, pad_token_id=0), 1), "TP = 1": (call(models.full), 1)}
    if models.split is not None and case.name == "decode":
        runs |= {"TP": (call(models.split), 1), "threads": (call(models.full), tp)}
    return runs


def providers(name: str, dtype: torch.dtype, folder: str) -> Providers:
    leader, group = dist.get_rank() == 0, dist.group.WORLD
    reference = written(name, dtype, folder) if leader else None
    dist.barrier()
    full = GPT.from_pretrained(folder, dtype=dtype) if leader else None
    alone = dist.get_world_size() == 1
    return Providers(
        reference, full, None if alone else GPT.from_pretrained(folder, dtype=dtype, tp=TensorParallel(group))
    )


def run(args: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """Returns the rows, on rank 0, which shows each as soon as it has it."""
    rows = []
    cases = [(case, n) for kind in args.case for case in CASES[kind] for n in args.batch if n * case.prompt <= LARGEST]
    for name in args.model:
        for dtype in args.dtype:
            models = providers(name, DTYPES[dtype], str(Path(folder, f"{name}-{dtype}")))
            for case, batch in cases:
                times = measure(args.rounds, runs_of(models, case, batch, args.tp))
                for row in rows_of(times, case.new, args.tp) if dist.get_rank() == 0 else []:
                    rows.append(dict(model=name, dtype=dtype, batch=batch, **case._asdict()) | row)
                    print(generate([dict(rows=rows[-1:])]).splitlines()[2], file=sys.stderr, flush=True)
    return rows


# ---- the command ----


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        rows = on_ranks(args.tp, run, args, folder)
    result = dict(machine=machine.this_machine(), rows=rows)
    print(generate([result]))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
