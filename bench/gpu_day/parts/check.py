"""One small case of every op, forward and backward in bf16, against torch in fp64.

python -m bench.gpu_day.parts.check OP [OP ...] [--rehearse]     prints "case OP" before each: what a sanitizer watches
"""

import re
import sys

import torch

from bench.gpu_day import cases
from bench.gpu_day.part import Context
from bench.gpu_day.rehearsal import rehearses
from tpfuse.kernels.runtime import op as _op
from tpfuse.tools.bench.count import count
from tpfuse.tools.bench.definition import DTYPES, Random, discover, load
from tpfuse.tools.bench.run import Errors, results

KERNELS = re.compile(r"^def (_\w+_kernel)\(", re.M)


def every_kernel() -> list[str]:
    """The names of the library's kernels, as its sources have them."""
    from bench.gpu_day.parts.setup import PACKAGE

    return sorted({name for path in (PACKAGE / "kernels").rglob("*.py") for name in KERNELS.findall(path.read_text())})


def jobs(context: Context) -> list[str]:
    return list(discover())


def run(job: str, context: Context) -> None:
    row = check(job, context.tiny, context.device)
    context.emit(row)
    if not row["right"]:
        raise AssertionError(f"errors {row['errors']} where {row['allowed']} are allowed; finite: {row['finite']}")


def check(name: str, tiny: bool, device: torch.device) -> dict:
    """Errors of values and gradients, at most twice torch's in bf16; and with dropout on, whether all is finite."""
    bench = load(name)
    shape, fn = cases.small(bench, tiny), bench.providers["tpfuse"]
    make = lambda: bench.inputs(Random(DTYPES["bf16"], device, 0), *shape)
    errors = Errors(bench, make)
    deviations, allowed = errors.against_truth(fn)["step"], errors.limits["step"]
    dropped = results(fn, make(), bench.p, torch.bfloat16)["step"]
    finite = all(bool(t.isfinite().all()) for t in dropped)
    right = finite and all(error <= most for error, most in zip(deviations, allowed, strict=True))
    with count() as counted:
        results(fn, make(), bench.p, torch.bfloat16)
    kernels = sorted({kernel.name for call in counted.calls for kernel in call.kernels})
    ops = [call.op for call in counted.calls]
    record = dict(errors=deviations, allowed=allowed, finite=finite, kernels=kernels, ops=ops)
    return dict(op=name, shape="x".join(map(str, shape)), right=right, **record)


def headline(rows: list[dict]) -> str:
    right = [row for row in rows if row["right"]]
    names = {name for row in rows for name in row["ops"]}
    never = sorted(name for name, op in _op.OPS.items() if op.launch is not None and name not in names)
    return f"{len(right)} of {len(rows)} ops right; left to the gpu tests: {', '.join(never)}"


def main(argv: list[str]) -> int:
    tiny = rehearses(argv, __name__)
    for name in (word for word in argv if not word.startswith("--")):
        print(f"case {name}", flush=True)
        right = check(name, tiny, torch.device("cpu" if tiny else "cuda"))["right"]
        print(f"right: {right}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
