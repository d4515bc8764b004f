"""Is my shape fast on my card?  Every op against plain torch, torch.compile and, where installed, Liger Kernel.

python -m bench                                  the ops, their axes, standard shapes and providers
python -m bench layer_norm --dtype bf16 --shape 8192x4096 --mode fwd,bwd --providers tpfuse,torch,compile
python -m bench all --plot out/plots             everything at its standard shapes

The card's copy bandwidth and matrix rate are measured first; a row's roofline is the time that they leave for the least
bytes (the inputs and outputs of tpfuse's ops, once each) and the flops that these ops declare, so GB/s and TFLOP/s
count the same work for every provider.  fwd is a training
forward: what backward needs is saved.  bwd is autograd.grad on a graph that is kept.  step is a forward and its
backward.  An error is ||result - truth|| / ||truth||, the truth being torch in fp64, with dropout off; beside it its
ratio to torch's error in the same dtype.  The path names the kernels that were launched, and the ops that ran as
torch code ("by torch": GEMMs in cuBLAS, say).  Peak memory is what a call adds to its inputs (bwd: and saved
tensors).
"""

import argparse
import dataclasses
import os
import pathlib
import sys

os.environ.setdefault(
    "KINETO_LOG_LEVEL", "99"
)  # the profiler counts memory on a CPU and would announce itself every time
import torch

from bench.harness import output
from bench.harness.bench import DTYPES, Bench, Shape, discover, load
from bench.harness.roofline import measure_card
from bench.harness.run import MODES, PEERS, available, measure


def listing() -> str:
    lines = []
    for name in discover():
        bench = load(name)
        shapes = lambda some: " ".join("x".join(map(str, shape)) for shape in some)
        lines += [
            f"{name}  {'x'.join(bench.axes)}",
            f"    GPU {shapes(bench.shapes)}",
            f"    CPU {shapes(bench.cpu_shapes)}",
        ]
        lines += [f"    {', '.join(bench.names)}"]
    return "\n".join([*lines, "", "python -m bench OP [OP ...], or all; --help says what else"])


def chosen(text: str, known, what: str) -> list[str]:
    """ "fwd,bwd" -> ["fwd", "bwd"]"""
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no {what} {unknown[0]!r}; there are {', '.join(sorted(known))}")
    return names


def shapes_of(bench: Bench, texts: list[str], device: torch.device) -> list[Shape]:
    if texts:
        return [bench.parse(text) for text in texts]
    return list(bench.shapes if device.type == "cuda" else bench.cpu_shapes)


def progress(line: str) -> None:
    end = "" if sys.stderr.isatty() else "\n"
    print(f"\r\033[K{line:.120}" if not end else line, end=end, file=sys.stderr, flush=True)


def arguments(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help="any that the list shows, or all; none: the list")
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        help="such as 8192x4096, comma-separated or given again (default: the standard)",
    )
    parser.add_argument("--dtype", default="bf16", help="bf16, fp16, fp32, comma-separated (default bf16)")
    parser.add_argument("--mode", default="fwd,bwd", help="fwd, bwd, step, comma-separated (default fwd,bwd)")
    parser.add_argument(
        "--providers", help="comma-separated, such as tpfuse,torch,compile,liger (default: all that are installed)"
    )
    parser.add_argument("--dropout", type=float, metavar="P", help="for the ops that drop (default 0.1)")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: a GPU where there is one"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each shape and mode (default 1)")
    parser.add_argument("--csv", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FOLDER", help="roofline.png and speed.png there")
    return parser, parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    parser, args = arguments(argv)
    if not args.ops:
        print(listing())
        return 0
    rows, notes = [], []
    try:
        device = torch.device(args.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch sees no GPU here; --device cpu times the CPU path")
        dtypes, modes = chosen(args.dtype, DTYPES, "dtype"), chosen(args.mode, MODES, "mode")
        benches = [load(name) for name in (discover() if args.ops == ["all"] else args.ops)]
        if args.dropout is not None:
            benches = [bench if bench.p is None else dataclasses.replace(bench, p=args.dropout) for bench in benches]
        texts = [text for given in args.shape for text in given.split(",")]
        shapes = {bench.name: shapes_of(bench, texts, device) for bench in benches}
        wanted = args.providers and chosen(
            args.providers, {name for bench in benches for name in bench.names} | set(PEERS), "provider"
        )
        providers = {}
        for bench in benches:
            providers[bench.name], lines = available(bench, wanted)
            notes += lines
        progress("measuring the card")
        card = measure_card(device, {dtype: DTYPES[dtype] for dtype in dtypes})
        cases = [(bench, shape, dtype) for bench in benches for shape in shapes[bench.name] for dtype in dtypes]
        for i, (bench, shape, dtype) in enumerate(cases, 1):
            say = lambda line, i=i: progress(f"[{i}/{len(cases)}] {line}")
            made, lines = measure(bench, shape, dtype, modes, providers[bench.name], card, device, args.seconds, say)
            rows, notes = rows + made, notes + lines
    except ValueError as error:
        parser.error(str(error))
    if sys.stderr.isatty():
        progress("")
    print(output.ceilings(card))
    print(output.table(rows))
    for line in dict.fromkeys(notes):
        print(line, file=sys.stderr)
    if args.csv:
        output.write_csv(rows, args.csv)
    if args.json:
        output.write_json(output.result(rows, notes, card), args.json)
    if args.plot:
        output.plot(rows, card, args.plot)
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
