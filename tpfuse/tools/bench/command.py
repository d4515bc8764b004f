"""``python -m tpfuse bench``: any op at any shape, against plain torch, torch.compile and Liger Kernel.

The card's copy bandwidth and matrix rate are measured first; a row's roofline is the time that they leave for the least
bytes (the inputs and outputs of tpfuse's ops, once each) and the flops that these ops declare, so GB/s and TFLOP/s
count the same work for every provider.  Everything that can be refused is refused before anything is timed; what is
measured is printed and written whatever comes after it.
"""

import dataclasses
import functools
import json
import shutil
import sys
import textwrap
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...kernels.runtime.errors import check
from ...kernels.runtime.rules import NOT_NEGATIVE, check_number
from ..command import CLEAR, INTERRUPTED, CommandParser, add_number, on_terminal, unknown
from . import output, plots
from .definition import DTYPES, MODES, Bench, Shape, discover, load, load_all, written
from .measure import cache_bytes
from .roofline import Card, card_name, measure_card
from .run import PEERS, BenchCase, Results, Setting, available, measure

STANDARD = {"GPU": "shapes", "CPU": "cpu_shapes"}


DETAILS = """Times kernels alone, at any shape: every op, or one of a file of your own, against plain torch,
torch.compile and, where it is installed, Liger Kernel. Without OP: the ops, their axes, standard shapes and providers.
A row gives the time (median, 20 % and 80 % quantiles), the speed-up over the baseline, measured turn by turn, the error
against fp64 and its limit, beyond which the row says WRONG and the exit code is 1 (as it is where tpfuse raises an
error; others are then left out), TFLOP/s and GB/s of the same counted
work for every provider, the share of this device's measured roofline and what that is of (memory, matrix products;
cache: the inputs may have come from there, and the share is left out), what a call adds to memory, registers, spills,
and the path: the kernels, or "by torch". Such as: bench layer_norm --dtype bf16 --shape 8192x4096 --providers
tpfuse,torch,compile"""


def register(p: CommandParser) -> None:
    p.runs(run, DETAILS)
    p.add_argument("ops", nargs="*", metavar="OP", help="ops of the list, all, or a file of your own, path/to/my_op.py")
    p.add_argument("--shape", action="append", metavar="MxN,..", help="shapes; may be repeated (default: the op's own)")
    for option, metavar, text in (
        (
            "--sweep",
            "AXIS=FROM..TO",
            "sizes of one axis, doubling, such as M=256..8192, at each --shape (default: the first)",
        ),
        ("--providers", "NAME,..", "implementations such as tpfuse,torch,compile (default: all installed)"),
        ("--baseline", "NAME", "provider that speed-ups are over (default: the op's own, torch)"),
        ("--device", "DEVICE", "cpu, cuda or cuda:N (default: a GPU where there is one)"),
    ):
        p.add_argument(option, metavar=metavar, help=text)
    modes = "passes: fwd (saving for backward), bwd (on a kept graph), step (both)"
    p.add_argument("--dtype", default="bf16", metavar="DTYPE,..", help="dtypes: bf16, fp16, fp32")
    p.add_argument("--mode", default="fwd,bwd", metavar="MODE,..", help=modes)
    p.add_argument("--dropout", type=float, metavar="P", help="dropout rate of the ops that have one (default: 0.1)")
    add_number(p, "--seconds", float, "time spent on a shape and mode, in seconds", default=1.0)
    files = p.add_argument_group("output")
    files.add_argument("--csv", type=Path, metavar="FILE", help="write rows for a spreadsheet to this file")
    printed = "print JSON in place of tables; with FILE.json, print tables and write JSON there"
    files.add_argument("--json", type=json_file, nargs="?", const=True, metavar="FILE", help=printed)
    drawn = "draw one picture, or in a folder roofline.png and speed.png, with --sweep its curves (needs matplotlib)"
    files.add_argument("--plot", dest="pictures", type=Path, metavar="PNG|DIR", help=drawn)


def json_file(text: str) -> Path:
    """Returns the file of --json, whose suffix tells it from an op that follows --json."""
    if not text.endswith(".json"):
        raise ArgumentTypeError(f"FILE ends in .json, got {text!r}; without FILE, --json comes last")
    return Path(text)


def listed() -> list[dict[str, Any]]:
    fields = "name", "axes", "shapes", "cpu_shapes"
    benches = map(load, discover())
    return [{key: getattr(bench, key) for key in fields} | dict(providers=bench.names) for bench in benches]


def listing() -> str:
    """Returns the same as text."""
    lines = []
    for op in listed():
        lines += [f"{op['name']}  {'x'.join(op['axes'])}"]
        texts = [f"{device} {' '.join(map(written, op[key]))}" for device, key in STANDARD.items()]
        lines += [f"    {line}" for text in [*texts, ", ".join(op["providers"])] for line in folded(text, 4)]
    usage = "python -m tpfuse bench OP [OP ...], all, or a file of your own, NAME.py; --help says what else"
    return "\n".join([*lines, "", *folded(usage)])


def folded(text: str, margin: int = 0) -> list[str]:
    """Returns the lines of a text that fit the terminal beside a margin."""
    return textwrap.wrap(text, columns() - margin, break_long_words=False, break_on_hyphens=False)


def columns() -> int:
    """Returns the width of the terminal; 120 where there is none, and COLUMNS does not say otherwise."""
    return max(shutil.get_terminal_size((120, 24)).columns, 40)


def chosen(text: str, names: Collection[str], kind: str) -> list[str]:
    """Returns ["fwd", "bwd"] of "fwd,bwd"; ValueError for a name that is not one of ``names``."""
    parts = list(dict.fromkeys(text.split(",")))
    if wrong := [part for part in parts if part not in names]:
        raise unknown(kind, wrong[0], names)
    return parts


def shapes_of(bench: Bench, texts: Sequence[str], device: torch.device, sweep: str | None = None) -> list[Shape]:
    """Returns the shapes that are asked for, or the standard ones, of which a sweep takes the first; ValueError where
    there are none."""
    shapes = [bench.parse(text) for text in texts] or list(bench.shapes if device.type == "cuda" else bench.cpu_shapes)
    if not shapes:
        raise ValueError(f"{bench.name} has no standard shapes for a GPU: --shape {bench.form}")
    return shapes if sweep is None else bench.swept(sweep, shapes if texts else shapes[:1])


def device_of(name: str) -> torch.device:
    """Returns a device that is there; ValueError for any other."""
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ValueError(f"--device is cpu, cuda or cuda:N, got {name!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch sees no GPU here; --device cpu times the CPU path")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: torch sees {torch.cuda.device_count()} GPUs here, the first of which is 0")
    return torch.device(name)


def progress(*parts: str) -> None:
    """Prints a line to stderr, over the one before it on a terminal."""
    line = " ".join(parts)
    if on_terminal():
        print(f"{CLEAR}{line:.120}", end="", file=sys.stderr, flush=True)
    elif sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)


# ---- what is to be measured ----


class BenchRequest(NamedTuple):
    """A command line, every name and every path checked."""

    cases: list[BenchCase]
    dtypes: list[str]
    device: torch.device
    notes: list[str]


def requested(args: Namespace) -> BenchRequest:
    """Returns the measurements to make; ValueError or OSError for what cannot be had."""
    device = device_of(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    check_number("--seconds", args.seconds, NOT_NEGATIVE)
    dtypes, modes = chosen(args.dtype, DTYPES, "dtype"), chosen(args.mode, MODES, "mode")
    benches = load_all(args.ops)
    if args.dropout is not None:
        benches = [bench if bench.p is None else dataclasses.replace(bench, p=args.dropout) for bench in benches]
    if args.baseline is not None:
        benches = [dataclasses.replace(bench, baseline=args.baseline) for bench in benches]
    texts = [text for option in args.shape or () for text in option.split(",")]
    names = {name for bench in benches for name in bench.names} | set(PEERS)
    wanted = args.providers and chosen(",".join(filter(None, (args.providers, args.baseline))), names, "provider")
    cases, notes = [], []
    for bench in benches:
        providers, lines = available(bench, wanted)
        notes += lines
        for shape in shapes_of(bench, texts, device, args.sweep):
            cases += [BenchCase(bench, shape, dtype, modes, providers=providers) for dtype in dtypes]
    if args.pictures:
        plots.check(args.pictures)
    return BenchRequest(cases, dtypes, device, notes)


def _json_file(args: Namespace) -> Path | None:
    return args.json if isinstance(args.json, Path) else None


# ---- measuring it ----


def run(args: Namespace) -> int:
    """Runs the command; returns 0, 1 where a row is wrong, tpfuse fails or there is no row, and 130 after Ctrl-C, which
    prints and writes the rows so far."""
    if not args.ops:
        files = {"--csv": args.csv, "--json FILE": _json_file(args), "--plot": args.pictures}
        written_to = [option for option, path in files.items() if path]
        check(not written_to, f"bench: {', '.join(written_to)} without OP: there is nothing to write")
        print(json.dumps(listed(), indent=1) if args.json else listing())
        return 0
    request = requested(args)
    results, card, code = Results([], request.notes, []), None, None
    try:
        progress(f"measuring {card_name(request.device)}")
        card = measure_card(request.device, {dtype: DTYPES[dtype] for dtype in request.dtypes})
        for i, case in enumerate(request.cases, 1):
            say = functools.partial(progress, f"[{i}/{len(request.cases)}]")
            measure(case, Setting(card, request.device, args.seconds, say), results)
    except KeyboardInterrupt:
        results.notes.append("interrupted: these are the rows so far")
        code = INTERRUPTED
    finally:  # an error's rows too
        if card and (results.rows or sys.exc_info()[0] is None):
            report(args, results, card, cache=cache_bytes(request.device))
    wrong = sum(row["wrong"] is True for row in results.rows)
    if wrong:
        print(f"WRONG: {wrong} of {len(results.rows)} rows are beyond the limit of their errors", file=sys.stderr)
    if results.failed:
        print(f"FAILED: errors of tpfuse itself: {len(results.failed)}", file=sys.stderr)
    return code or int(wrong > 0 or bool(results.failed) or not results.rows)


def report(args: Namespace, results: Results, card: Card, *, cache: int) -> None:
    """Prints the rows and writes each file that is asked for, whatever becomes of the others.

    Raises the first error at the end.
    """
    if on_terminal():
        progress("")
    results.notes.extend(output.cached(results.rows, cache))
    everything = output.result(results, card)
    if args.json and not _json_file(args):
        print(json.dumps(everything, indent=1))
    else:
        print(*folded(output.ceilings(card)), "", output.table(results.rows, columns()), sep="\n")
    for note in dict.fromkeys(results.notes):
        print(*folded(note), sep="\n", file=sys.stderr)
    errors: list[OSError] = []
    writers: list[tuple[Path | None, Callable[[Path], object]]] = [
        (args.csv, lambda path: output.write_csv(results.rows, path)),
        (_json_file(args), lambda path: output.write_json(everything, path)),
        (args.pictures, lambda path: plots.draw(results.rows, card, path, args.sweep and args.sweep.partition("=")[0])),
    ]
    for path, write in writers:
        try:
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                write(path)
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]
