"""A report of this GPU in nine minutes, or as many as --seconds gives: the gpu tests, every op, two transformer layers,
the host's time.

python -m bench.gpu_report --out FOLDER          FOLDER/<gpu>.json and plots; the JSON is kept in bench/results/ too, of
                                                 which python -m bench.measured makes the tables of docs/measured.md
python -m bench.gpu_report --device cpu --out F  a rehearsal on tiny shapes, marked as one and kept nowhere else

Each part has its share of the time, and what an earlier one leaves goes to the next; what did not fit is listed.  Most
of a test's time is its compilation, so the tests run in as many processes as there are cores, kernels first.
"""

import argparse
import collections
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

os.environ.setdefault("KINETO_LOG_LEVEL", "99")
import torch
from torch import Tensor, nn

from bench import measured
from bench.__main__ import progress
from bench.harness import output
from bench.harness.bench import DTYPES, Bench, Random, Shape, discover, load
from bench.harness.measure import interleaved, side_stream
from bench.harness.roofline import Card, measure_card
from bench.harness.run import attempt, available, measure
from bench.models.peers import Block
from tpfuse.kernels.runtime.philox import make_rng
from tpfuse.layers import TransformerBlock

ROOT = pathlib.Path(__file__).parents[1]
LOSSES = (
    "cross_entropy",
    "linear_cross_entropy",
)  # whose forward may do the work of the backward: whole steps are compared too


@dataclass(frozen=True)
class Layer:
    """A block to train: B samples of S positions."""

    name: str
    width: int
    heads: int
    B: int
    S: int
    dropout: float
    bert: bool  # post-norm, not causal, gelu by erf; otherwise pre-norm, causal, gelu by tanh

    @property
    def flops(self) -> float:
        """Model FLOPs of a forward and backward, as is usual: attention counted in full, causal or not."""
        return 72 * self.B * self.S * self.width**2 * (1 + self.S / (6 * self.width))


@dataclass(frozen=True)
class Plan:
    """What is run.  Seconds are the whole budget; a part's share counts from the start."""

    tests: tuple[str, ...]  # pytest's arguments
    processes: int  # that run them
    cases: list[tuple[Bench, Shape]]
    layers: tuple[Layer, ...]
    dtype: str
    compiled: bool
    host_rows: int
    host_width: int
    bench_seconds: float = 0.3
    seconds: float = 540.0
    shares: dict[str, float] = field(default_factory=lambda: dict(tests=0.3, layers=0.5, benches=0.92))


def full() -> Plan:
    layers = (
        Layer("BERT-large layer", 1024, 16, 8, 512, 0.1, True),
        Layer("GPT 2.7B block", 2560, 32, 4, 2048, 0.0, False),
    )
    tests = ("-m", "gpu", "tests/kernels", "tests/layers", "tests")
    processes = min(os.cpu_count() or 1, 16)  # each holds a context of the GPU, half a GiB
    return Plan(tests, processes, in_turn([load(name) for name in discover()]), layers, "bf16", True, 64, 1024)


def tiny() -> Plan:
    """The rehearsal: everything once, on shapes that a CPU does in seconds."""
    cases = [(load("layer_norm"), (16, 32)), (load("reduce_bias_dropout_add_norm"), (2, 8, 32))]
    layers = Layer("BERT-large layer", 32, 2, 2, 8, 0.1, True), Layer("GPT 2.7B block", 32, 2, 2, 8, 0.0, False)
    return Plan(
        ("tests/kernels/runtime/test_tuning.py", "-k", "bucket"),
        2,
        cases,
        layers,
        "fp32",
        False,
        8,
        32,
        bench_seconds=0.01,
    )


def in_turn(benches: list[Bench]) -> list[tuple[Bench, Shape]]:
    """The first shape of every op, then the second: whatever is left out, every op has been seen."""
    longest = max(len(bench.shapes) for bench in benches)
    return [(bench, bench.shapes[i]) for i in range(longest) for bench in benches if i < len(bench.shapes)]


ENDED = re.compile(r"\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED) (\S+::.*\S)")  # a line of pytest-xdist


# ---- parts: each takes the time by which it is to end, and returns what it found and what did not fit ----


def run_tests(plan: Plan, until: float) -> tuple[dict, list[str]]:
    """How many tests ended how, and the names of those that failed; what had ended when the time was over counts."""
    parallel = "-n", str(plan.processes), "--dist", "worksteal"
    command = [sys.executable, "-u", "-m", "pytest", "-vv", "--color=no", *parallel, *plan.tests]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        killer = threading.Timer(max(until - time.monotonic(), 0.1), lambda: os.killpg(process.pid, signal.SIGKILL))
        killer.start()
        ended = [found.groups() for found in map(ENDED.match, process.stdout) if found]
        killer.cancel()
    notes = ["tests: not all of them ended in time"] if process.returncode == -signal.SIGKILL else []
    outcomes = collections.Counter(outcome for outcome, _ in ended)
    failed = [name for outcome, name in ended if outcome in ("FAILED", "ERROR")]
    return dict(passed=outcomes["PASSED"], failed=len(failed), skipped=outcomes["SKIPPED"], failures=failed), notes


def run_benches(plan: Plan, until: float, card: Card, device: torch.device) -> tuple[list[dict], list[str]]:
    rows, notes = [], []
    for i, (bench, shape) in enumerate(plan.cases, 1):
        if time.monotonic() > until:
            return rows, notes + [
                f"{bench.name} {'x'.join(map(str, shape))}: no time left" for bench, shape in plan.cases[i - 1 :]
            ]
        providers, missing = available(bench, None if plan.compiled else ["tpfuse", "torch"])
        modes = ["fwd", "bwd", "step"] if bench.name in LOSSES else ["fwd", "bwd"]
        say = lambda line, i=i: progress(f"[{i}/{len(plan.cases)}] {line}")
        with attempt(f"{bench.name} {shape}", notes):
            made, lines = measure(bench, shape, plan.dtype, modes, providers, card, device, plan.bench_seconds, say)
            rows, notes = rows + made, notes + missing + lines
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows, list(dict.fromkeys(notes))


def run_layers(plan: Plan, until: float, card: Card, device: torch.device) -> tuple[list[dict], list[str]]:
    """Forward and backward of each layer: launched from Python, and (on a GPU) replayed from a CUDA graph."""
    rows, notes = [], []
    for layer in plan.layers:
        if time.monotonic() > until:
            notes.append(f"{layer.name}: no time left")
            continue
        with side_stream(device):
            steps = {}
            for name, build in layer_providers(plan).items():
                progress(f"{layer.name}: {name}")
                with attempt(f"{layer.name}: {name}", notes):
                    step = training_step(*build(layer, device, DTYPES[plan.dtype]))
                    step(0)
                    steps[name] = step
            for below in (0.0, float("inf")) if device.type == "cuda" else (0.0,):
                with attempt(f"{layer.name}", notes):
                    for name, timing in interleaved(
                        steps, 1, device, 8 * plan.bench_seconds, graph_below=below
                    ).items():
                        times = {f"p{q}_ms": getattr(timing, f"p{q}") * 1e3 for q in (20, 50, 80)}
                        tflops = layer.flops / timing.p50 / 1e12
                        share = tflops / card.matrix_tflops[plan.dtype]
                        rows.append(
                            dict(
                                layer=layer.name,
                                provider=name,
                                timed=timing.how,
                                **times,
                                tflops=tflops,
                                matrix_share=share,
                            )
                        )
    return rows, notes


def run_host(plan: Plan, device: torch.device) -> dict:
    """Microseconds of the host for one forward, launches included, the device not waited for."""
    bench = load("reduce_bias_dropout_add_norm")
    inputs = bench.inputs(Random(DTYPES[plan.dtype], device, 0), 1, plan.host_rows, plan.host_width)
    found = {}
    for name in ("tpfuse", "torch"):
        best, fn = float("inf"), bench.providers[name]
        for _ in range(10):
            start = time.perf_counter()
            for _ in range(100):
                fn(*inputs, p=0.1)
            best = min(best, (time.perf_counter() - start) / 100)
            if device.type == "cuda":
                torch.cuda.synchronize()
        found[name] = best * 1e6
    return found


# ---- layers: build(layer, device, dtype) -> module(x), x, the gradient of what it returns ----


def layer_providers(plan: Plan) -> dict[str, Callable]:
    made = dict(tpfuse=_tpfuse, torch=_torch)
    if plan.compiled:
        made |= dict(compile=_compiled, liger=_liger)
    return made


def training_step(
    module: nn.Module | Callable, parameters: list[Tensor], x: Tensor, dy: Tensor
) -> Callable[[int], object]:
    return lambda _: torch.autograd.grad(module(x), [x, *parameters], dy)


def _data(layer: Layer, device: torch.device, dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    random = Random(dtype, device, 0)
    return random(*shape), random.constant(*shape)


def _tpfuse(layer: Layer, device: torch.device, dtype: torch.dtype) -> tuple:
    torch.manual_seed(0)
    form = dict(causal=False, activation="gelu", post_norm=True) if layer.bert else dict(causal=True)
    drop = dict(dropout=layer.dropout, attention_dropout=layer.dropout)
    block = TransformerBlock(layer.width, layer.heads, **form, **drop, device=device, dtype=dtype)
    rng = make_rng(0, 1).to(device)
    forward = lambda x: block(x, batch=layer.B, rng=rng)
    return forward, list(block.parameters()), *_data(layer, device, dtype, layer.S * layer.B, layer.width)


def _plain(layer: Layer, device: torch.device, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    D, p = layer.width, layer.dropout
    if layer.bert:
        return nn.TransformerEncoderLayer(
            D, layer.heads, 4 * D, p, "gelu", batch_first=True, device=device, dtype=dtype
        )
    return Block(D, layer.heads, p, p).to(device, dtype)


def _torch(layer, device, dtype, wrap: Callable = lambda module: module) -> tuple:
    module = _plain(layer, device, dtype)
    return wrap(module), list(module.parameters()), *_data(layer, device, dtype, layer.B, layer.S, layer.width)


def _compiled(layer, device, dtype) -> tuple:
    torch._dynamo.reset()
    return _torch(layer, device, dtype, lambda module: torch.compile(module, dynamic=False))


def _liger(layer, device, dtype) -> tuple:
    """Liger Kernel's norms in the plain layer: what it has for this kind of block."""
    from liger_kernel.transformers import LigerLayerNorm

    module = _plain(layer, device, dtype)
    for name, child in list(module.named_children()):
        if isinstance(child, nn.LayerNorm):
            setattr(module, name, LigerLayerNorm(layer.width, child.eps).to(device, dtype))
    return module, list(module.parameters()), *_data(layer, device, dtype, layer.B, layer.S, layer.width)


# ---- the report ----


def report(plan: Plan, device: torch.device, start: float) -> dict:
    until = lambda part: start + plan.seconds * plan.shares[part]
    progress("measuring the card")
    card = measure_card(
        device, {plan.dtype: DTYPES[plan.dtype]}, **({} if plan.compiled else dict(copy_mib=4, side=64))
    )
    progress("the gpu tests")
    tests, left = run_tests(plan, until("tests"))
    layers, layer_notes = run_layers(plan, until("layers"), card, device)
    host = {}
    with attempt("host time", left):
        host = run_host(plan, device)
    rows, notes = run_benches(plan, until("benches"), card, device)
    found = output.result(rows, [*left, *layer_notes, *notes], card)
    return found | dict(
        dry_run=device.type != "cuda", seconds=time.monotonic() - start, tests=tests, layers=layers, host_us=host
    )


def main(argv: list[str] | None = None) -> int:
    start = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all of it (default 540)")
    args = parser.parse_args(argv)
    if args.out is None:
        parser.error("--out FOLDER says where the report goes")
    if args.device == "cuda" and not torch.cuda.is_available():
        print("bench.gpu_report: torch sees no GPU here; --device cpu rehearses it on tiny shapes", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)
    plan = dataclasses.replace(full() if args.device == "cuda" else tiny(), seconds=args.seconds)
    found = report(plan, device, start)
    name = "rehearsal" if found["dry_run"] else re.sub(r"\W+", "_", found["card"]["name"].lower())
    output.write_json(found, args.out / f"{name}.json")
    card = Card(**found["card"])
    output.plot(found["rows"], card, args.out)
    if not found["dry_run"]:
        measured.RESULTS.mkdir(exist_ok=True)
        output.write_json(found, measured.RESULTS / f"{name}.json")
    print(output.ceilings(card))
    print(output.table(found["rows"]))
    print(measured.summary([found]))
    print(*found["notes"], sep="\n", file=sys.stderr)
    return 1 if found["tests"].get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
