"""A GPU's time turned into evidence: one command, a few calls of some minutes each, a rehearsal without a GPU.

    python -m bench.gpu_day --out DIR                    nine minutes on the GPU at hand, on a bare machine
    python -m bench.gpu_day --out DIR --resume EARLIER   goes on with what EARLIER left missing, timed out or failed
    python -m bench.gpu_day --out DIR --rehearse         every line of it on a CPU: tiny shapes, Triton's interpreter
    python -m bench.gpu_day --fill DIR                   afterwards: bench/results/, tuned.json, docs/measured.md

Parts run in order of worth, each in processes of its own and within its own time: correctness, compute-sanitizer,
kernels compiled side by side, the rows of the report, the gpu tests, ncu's counters, tuning, CUDA graphs, a training
curve, generation.  What fails or hangs is said and does not stop what follows.

DIR holds at most eight files of at most 16 MB: results.json, written after every row; log.txt, the ends of what the
processes printed; cache-N.tar.gz, the compiled kernels.  A status is one of done, failed, timed out, partial, not
reached.  The exit status is 0 where every part that was reached is done, 1 where one is not, 2 for wrong arguments.
"""

import argparse
import pathlib

from bench._parser import parser_of


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("bench.gpu_day", __doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=9.0, help="for all of it, by the clock on the wall (default 9)")
    add("--out", type=pathlib.Path, metavar="DIR", help="where the results and the compiled kernels go")
    add("--resume", type=pathlib.Path, metavar="DIR", help="what an earlier call left (may be --out, may be read-only)")
    add("--rehearse", action="store_true", help="on a CPU; the results are marked as rehearsed and never filled in")
    add("--fill", type=pathlib.Path, metavar="DIR", help="run nothing: fill DIR's results into the tables")
    args = parser.parse_args(argv)
    if (args.out is None) == (args.fill is None):
        parser.error("either --out DIR runs, or --fill DIR fills in what a run left there")
    if args.fill is not None and (args.resume or args.rehearse):
        parser.error("--fill takes neither --resume nor --rehearse: it runs nothing")
    if not args.minutes > 0:
        parser.error(f"--minutes must be positive, got {args.minutes:g}")
    return args
