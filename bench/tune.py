"""Sweeps launch parameters on the GPU at hand and keeps the winners in tpfuse/kernels/tuned.json, under its arch.

python -m bench.tune                             every op with tuned parameters, at its standard shapes, in bf16
python -m bench.tune linear --shape 8192x4096x4096 --dtype bf16,fp16

What is tuned is what the launchers ask for (tpfuse/kernels/runtime/tuning.py) while an op runs, the choice between a
fused GEMM and torch's included.  A sweep starts at the kernel's default and changes one parameter at a time, from the
best so far, until nothing wins.  A candidate must give the right answer first: errors at most twice torch's, and with
dropout, whose masks are tpfuse's own, as near to what was given before it was tried.  It wins only if it is faster than
the best so far by more than the spread of both, all of them taking turns.  What did not compile or fit is passed over.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch

from bench._parser import parser_of
from tpfuse.kernels import replay
from tpfuse.kernels.runtime import tuning as _tuning
from tpfuse.kernels.runtime.launch import target
from tpfuse.tools.accuracy import rms_errors
from tpfuse.tools.bench.command import chosen, progress, shapes_of
from tpfuse.tools.bench.definition import DTYPES, Bench, Random, Shape, discover, load
from tpfuse.tools.bench.measure import Timing, interleaved, sets_needed, side_stream
from tpfuse.tools.bench.run import Errors, calls, results

ROUNDS = 3  # of a sweep: how many parameters may differ from the default
OTHER_PATH = {"torch": "fused", "tpfuse": "sdpa", "sdpa": "tpfuse"}  # where a launcher may take one of two
FORMS = "TRANSPOSED", "AHEAD"  # other forms of a kernel, made for other tiles and stages
RANGES = dict(
    BM=(32, 256),
    BN=(32, 256),
    BK=(16, 128),
    BLOCK_M=(32, 256),
    BLOCK_N=(32, 256),
    GROUP_M=(1, 16),
    FLATTEN=(False, True),
    EARLY=(False, True),
    LAST=(False, True),
    ONCE=(False, True),
    STAGES=(1, 2),
)
RANGES |= dict(ROWS=(1, 64), A=(64, 8192), HEADS=(1, 64), LANES=(32, 1024), num_warps=(1, 16), num_stages=(1, 5))


@dataclass(frozen=True)
class Ask:
    """One question of a launcher: the parameters of this kernel for this bucket."""

    kernel: str
    arch: str
    bucket: str
    default: tuple[tuple[str, object], ...]


def neighbours(parameters: dict) -> list[dict]:
    """One parameter changed; beyond the other path, and the other form, their own neighbours."""
    if parameters.get("path") in OTHER_PATH:
        path, default = dict(path=OTHER_PATH[parameters["path"]]), {k: v for k, v in parameters.items() if k != "path"}
        return [path | tiles for tiles in (default, *neighbours(default))]
    changed = []
    for form in FORMS:
        if parameters.get(form) is False:
            variant = parameters | {form: True}
            changed += [variant, *neighbours(variant)]
    for name in filter(RANGES.__contains__, parameters):
        value, (low, high) = parameters[name], RANGES[name]
        if isinstance(value, bool):
            steps = [not value]
        else:
            steps = [value - 1, value + 1] if name == "num_stages" else [value // 2, value * 2]
        changed += [parameters | {name: n} for n in steps if low <= n <= high]
    return changed


def winner(timings: dict[int, Timing], best: int) -> int:
    """The fastest, if it beats ``best`` by more than either's spread; otherwise ``best``."""
    fastest = min(timings, key=lambda i: timings[i].p50)
    gain = timings[best].p50 - timings[fastest].p50
    return fastest if gain > max(timings[best].spread, timings[fastest].spread) else best


def sweep(default: dict, right: Callable[[dict], bool], time: Callable[[list[dict]], dict[int, Timing]]) -> dict:
    """Returns the best parameters.

    ``right(parameters)`` checks a candidate, ``time([...])`` times several, by their index in the list.
    """
    best, tried = default, [default]
    for _ in range(ROUNDS):
        fresh = [candidate for candidate in neighbours(best) if candidate not in tried]
        tried += fresh
        field = [best, *filter(right, fresh)]
        if len(field) == 1:
            break
        won = winner(time(field), 0)
        if won == 0:
            break
        best = field[won]
    return best


# ---- between a launcher and the table ----


@contextlib.contextmanager
def questions() -> Iterator[list[Ask]]:
    """Yields the list of questions that launchers ask meanwhile, each once."""
    asks, answer = [], _tuning.tuned

    def listen(kernel, arch, dtype, shape, default):
        ask = Ask(kernel, arch, _tuning.bucket(dtype, shape), tuple(default.items()))
        if ask not in asks:
            asks.append(ask)
        return answer(kernel, arch, dtype, shape, default)

    users = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("tpfuse.") and getattr(module, "tuned", None) is answer
    ]
    with contextlib.ExitStack() as stack:
        for module in users:
            stack.enter_context(mock.patch.object(module, "tuned", listen))
        yield asks


def put(table: dict, ask: Ask, parameters: dict) -> dict:
    """A copy of the table in which the answer is ``parameters``; only what differs from the default is kept."""
    table = json.loads(json.dumps(table))
    kernels = table.setdefault(ask.arch, {})
    entry = {name: value for name, value in parameters.items() if (name, value) not in ask.default}
    kernels.setdefault(ask.kernel, {}).pop(ask.bucket, None)
    if entry:
        kernels[ask.kernel][ask.bucket] = entry
    kernels = {kernel: dict(sorted(buckets.items())) for kernel, buckets in sorted(kernels.items()) if buckets}
    return {
        arch: kernels if arch == ask.arch else old for arch, old in sorted(table.items()) if arch != ask.arch or kernels
    }


# ---- one op ----


@dataclass(frozen=True)
class Trial:
    """One question, and the call during which a launcher asks it."""

    ask: Ask
    call: Callable[[int], object]
    results: Callable[[], list[float]]  # errors of all that the op gives
    allowed: list[float]
    table: dict
    sets: int
    device: torch.device
    seconds: float  # for each candidate
    say: Callable[[str], None]

    def under(self, parameters: dict) -> contextlib.AbstractContextManager:
        table = put(self.table, self.ask, parameters)
        return mock.patch.object(_tuning, "_table", lambda: table)

    def right(self, parameters: dict) -> bool:
        try:
            with self.under(parameters):
                errors = self.results()
        except Exception as error:  # whatever the compiler or the driver makes of it
            self.say(f"{self.ask.kernel} {parameters}: {next(iter(str(error).splitlines()), type(error).__name__)}")
            return False
        return all(math.isfinite(error) and error <= most for error, most in zip(errors, self.allowed, strict=True))

    def time(self, field: list[dict]) -> dict[int, Timing]:
        def run(parameters: dict) -> Callable[[int], object]:
            patch = self.under(parameters)

            def one(i: int) -> object:
                with patch:
                    return self.call(i)

            return one

        return interleaved({i: run(p) for i, p in enumerate(field)}, self.sets, self.device, self.seconds * len(field))


def judged(bench: Bench, make: Callable[[], tuple]) -> tuple[Callable[[], list[float]], list[float]]:
    """Returns what gives the errors of all that the op gives, and how much of each is allowed.

    Errors against torch may have to be taken without dropout, and so without the kernels that drop: what those give is
    compared with what they gave before a candidate was tried.
    """
    errors, fn = Errors(bench, make), bench.providers["tpfuse"]
    plain = lambda: errors.against_truth(fn)["step"]
    if errors.p == bench.p:
        return plain, errors.limits["step"]
    dropped = lambda: results(fn, make(), bench.p, errors.dtype)["step"]
    baseline = [t.double() for t in dropped()]
    return lambda: [*plain(), *rms_errors(dropped(), baseline)], 2 * errors.limits["step"]


def tune(
    bench: Bench,
    shape: Shape,
    dtype: str,
    table: dict,
    device: torch.device,
    seconds: float,
    say: Callable[[str], None] = lambda line: None,
    *,
    keep: Callable[[Ask, dict], None] = lambda ask, table: None,
    skip: Callable[[Ask], bool] = lambda ask: False,
) -> dict:
    """The table, with the winners of one op at one shape in it; ``keep`` is given it after every question, of which
    those that ``skip`` names are left as they are."""
    make = lambda seed: bench.inputs(Random(DTYPES[dtype], device, seed), *shape)
    fn = bench.providers["tpfuse"]
    every_time = mock.patch.object(replay, "REPLAY", False)  # a launcher that is replayed would not ask the table again
    with side_stream(device), every_time:
        errors, allowed = judged(bench, lambda: make(0))
        sets = [make(0)]
        sets += [make(i) for i in range(1, sets_needed(sum(t.nbytes for t in sets[0]), device))]
        for mode in ("fwd", "bwd"):
            call = calls(fn, sets, bench.p, mode, Random(DTYPES[dtype], device, 1))
            with questions() as asks:
                call(0)
            for ask in itertools.filterfalse(skip, asks):
                say(f"{bench.name} {'x'.join(map(str, shape))} {dtype} {mode}: {ask.kernel} {ask.bucket}")
                trial = Trial(ask, call, errors, allowed, table, len(sets), device, seconds, say)
                table = put(table, ask, sweep(dict(ask.default), trial.right, trial.time))
                keep(ask, table)
    return table


def with_and_without_dropout(bench: Bench) -> list[Bench]:
    """Some paths are asked for only without, and attention's kernels go by another name with it; where both ask the
    same, what dropout finds stays, being the heavier."""
    return [bench] if not bench.p or bench.exact else [dataclasses.replace(bench, p=0.0), bench]


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("bench.tune", __doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help="default: all")
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        help="such as 8192x4096, comma-separated or repeated (default: the standard)",
    )
    parser.add_argument("--dtype", default="bf16", help="bf16, fp16, fp32, comma-separated (default bf16)")
    parser.add_argument("--seconds", type=float, default=0.1, help="for each candidate (default 0.1)")
    parser.add_argument(
        "--table", type=pathlib.Path, default=_tuning.TABLE, help="the file to merge into (default: the library's own)"
    )
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.tune: torch sees no GPU here, and launch parameters are tuned on one", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    try:
        dtypes, benches = chosen(args.dtype, DTYPES, "dtype"), [load(name) for name in args.ops or discover()]
        texts = [text for shapes in args.shape for text in shapes.split(",")]
        cases = [
            (bench, shape, dtype) for bench in benches for shape in shapes_of(bench, texts, device) for dtype in dtypes
        ]
        cases = [(form, *case) for bench, *case in cases for form in with_and_without_dropout(bench)]
    except ValueError as error:
        parser.error(str(error))
    table = json.loads(args.table.read_text()) if args.table.exists() else {}
    for bench, shape, dtype in cases:
        table = tune(bench, shape, dtype, table, device, args.seconds, progress)
        args.table.write_text(json.dumps(table, indent=1) + "\n")  # what is found is kept, whatever comes next
    entries = sum(len(buckets) for buckets in table.get(target(device).arch, {}).values())
    print(f"{args.table}: {entries} entries for {target(device).arch}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
