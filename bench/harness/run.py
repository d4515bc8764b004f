"""One op at one shape and dtype, in every mode and by every provider: a row of figures for each."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch._functorch import config as functorch

from bench.harness.bench import DTYPES, Bench, Random, Shape
from bench.harness.count import Counted, count
from bench.harness.measure import interleaved, peak_bytes, sets_needed, side_stream
from bench.harness.roofline import Card

MODES = "fwd", "bwd", "step"  # bwd: autograd.grad on a graph that is kept; step: forward and backward, nothing kept
PEERS = {"liger": "liger_kernel"}  # provider -> the package it needs
COLUMNS = (
    "op shape dtype mode provider p20_us p50_us p80_us tflops gbs roofline error error_ratio registers spills"
    " peak_mib timed path"
).split()
Progress = Callable[[str], None]


def available(bench: Bench, wanted: list[str] | None) -> tuple[list[str], list[str]]:
    """Those of the providers (default: all of the op) that can run, and a line for each that cannot."""
    has = [name for name in wanted or bench.names if name in bench.names]
    notes = [
        f"{bench.name} has no provider {name}; it has {', '.join(bench.names)}"
        for name in wanted or ()
        if name not in has
    ]
    missing = [name for name in has if name in PEERS and importlib.util.find_spec(PEERS[name]) is None]
    notes += [f"{name} is left out: pip install {PEERS[name].replace('_', '-')}" for name in missing]
    return [name for name in has if name not in missing], notes


def provider(bench: Bench, name: str) -> Callable:
    if name != "compile":
        return bench.providers[name]
    torch._dynamo.reset()  # a shape seen before would make the next one dynamic
    return torch.compile(bench.providers["torch"], dynamic=False)


# ---- the calls ----


def outputs_of(fn: Callable, inputs: tuple, p: float | None) -> tuple[Tensor, ...]:
    made = fn(*inputs) if p is None else fn(*inputs, p=p)
    return tuple(y for y in (made if isinstance(made, tuple) else (made,)) if y.requires_grad)


def output_gradients(outputs: tuple[Tensor, ...], random: Random) -> list[Tensor]:
    """Random; 1 for a loss, as ``loss.backward()`` has it."""
    return [random.constant(*y.shape).to(y.dtype) if y.dim() else torch.ones_like(y) for y in outputs]


def calls(fn: Callable, sets: list[tuple], p: float | None, mode: str, random: Random) -> Callable[[int], object]:
    """Returns the call of one mode, by the number of the set of inputs."""
    leaves = [[t for t in inputs if t.requires_grad] for inputs in sets]
    if mode == "fwd":
        return lambda i: outputs_of(fn, sets[i], p)
    if mode == "bwd":
        forwards = [outputs_of(fn, inputs, p) for inputs in sets]
        dys = [output_gradients(outputs, random) for outputs in forwards]
        return lambda i: torch.autograd.grad(forwards[i], leaves[i], dys[i], retain_graph=True, allow_unused=True)
    dys = output_gradients(outputs_of(fn, sets[0], p), random)

    def step(i: int) -> tuple:
        outputs = outputs_of(fn, sets[i], p)
        return outputs, torch.autograd.grad(outputs, leaves[i], dys, allow_unused=True)

    return step


# ---- errors ----


def results(fn: Callable, inputs: tuple, p: float | None, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    """Returns the results of each mode, for output gradients that are random numbers of ``dtype``."""
    outputs = outputs_of(fn, inputs, p)
    dys = output_gradients(outputs, Random(dtype, inputs[0].device, 1))
    grads = torch.autograd.grad(outputs, [t for t in inputs if t.requires_grad], dys)
    outputs = [y.detach() for y in outputs]
    return {"fwd": outputs, "bwd": list(grads), "step": [*outputs, *grads]}


def double(inputs: tuple) -> tuple:
    return tuple(t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in inputs)


def distances(values: list[Tensor], truth: list[Tensor]) -> list[float]:
    """||v - t|| / ||t|| of each tensor, in fp64."""
    return [float((v.double() - t).norm() / t.norm().clamp(min=1e-300)) for v, t in zip(values, truth, strict=True)]


class Errors:
    """The errors of every provider against torch in fp64, on one set of inputs; the worst tensor counts.

    The ratio is to torch in the run's own dtype, tensor by tensor.  Where fp64 does not fit into memory there are none.
    """

    def __init__(self, bench: Bench, make: Callable[[], tuple]):
        self.bench, self.make = bench, make
        self.p = bench.p if bench.exact or bench.p is None else 0.0
        exact, inputs = bench.exact or bench.providers["torch"], make()
        self.dtype = inputs[0].dtype
        self.truth = results(exact, double(inputs), self.p, self.dtype)
        self.torch = self.against_truth(exact)

    @property
    def allowed(self) -> list[float]:
        """What counts as right of each value and gradient: twice torch's error, and a tenth of a rounding."""
        return [2 * error + torch.finfo(self.dtype).eps / 10 for error in self.torch["step"]]

    def against_truth(self, fn: Callable) -> dict[str, list[float]]:
        values = results(fn, self.make(), self.p, self.dtype)
        return {mode: distances(values[mode], self.truth[mode]) for mode in MODES}

    def of(self, name: str, fn: Callable) -> dict[str, tuple[float, float]]:
        """{mode: (error, ratio)}; empty where there is nothing to compare."""
        if name in self.bench.yardsticks or self.bench.exact and name != "tpfuse":
            return {}
        found = self.against_truth(fn)
        ratio = lambda ours, theirs: 0.0 if ours == 0 else ours / max(theirs, 1e-300)
        return {mode: (max(found[mode]), max(map(ratio, found[mode], self.torch[mode]))) for mode in MODES}


# ---- rows ----


def measure(
    bench: Bench,
    shape: Shape,
    dtype: str,
    modes: list[str],
    providers: list[str],
    card: Card,
    device: torch.device,
    seconds: float,
    say: Progress = lambda line: None,
    *,
    keep: Callable[[dict], None] = lambda row: None,
) -> tuple[list[dict], list[str]]:
    """-> rows with the keys COLUMNS, and a line for everything that could not be had.  ``keep`` is given every row as
    it comes."""
    with side_stream(device), functorch.patch(donated_buffer=False):  # so that a compiled graph can be kept
        return _measure(bench, shape, dtype, modes, providers, card, device, seconds, say, keep)


def _measure(bench, shape, dtype, modes, providers, card, device, seconds, say, keep) -> tuple[list[dict], list[str]]:
    what = f"{bench.name} {'x'.join(map(str, shape))} {dtype}"
    make = lambda seed: bench.inputs(Random(DTYPES[dtype], device, seed), *shape)
    notes: list[str] = []
    fns = {name: provider(bench, name) for name in providers}
    sets = [make(0)]
    sets += [make(i) for i in range(1, sets_needed(sum(t.nbytes for t in sets[0]), device))]
    errors = {}
    say(f"{what}: errors")
    with attempt(f"{what}: no errors", notes):
        truth = Errors(bench, lambda: make(0))
        for name, fn in fns.items():
            with attempt(f"{what}: no error of {name}", notes):
                errors[name] = truth.of(name, fn)
        del truth
    rows = []
    for mode in modes:
        ready, peaks, counted = {}, {}, None
        for name, fn in {
            "tpfuse": bench.providers["tpfuse"],
            **fns,
        }.items():  # tpfuse is counted even where it is not timed
            say(f"{what} {mode}: {name} {'warms up' if name in fns else 'is counted'}")
            with attempt(f"{what} {mode}: {name} is left out", notes):
                call = calls(fn, sets, bench.p, mode, Random(DTYPES[dtype], device, 1))
                if name == "tpfuse":
                    with count() as counted:
                        call(0)
                if name in fns:
                    call(0)
                    peaks[name] = peak_bytes(lambda call=call: call(0), device)
                    ready[name] = call
        if not ready:
            continue
        say(f"{what} {mode}: {' '.join(ready)}")
        with attempt(f"{what} {mode}: not timed", notes):
            timings = interleaved(ready, len(sets), device, seconds)
            for name, timing in timings.items():
                error, ratio = errors.get(name, {}).get(mode, (None, None))
                times = dict(
                    p20_us=timing.p20 * 1e6, p50_us=timing.p50 * 1e6, p80_us=timing.p80 * 1e6, timed=timing.how
                )
                case = dict(op=bench.name, shape="x".join(map(str, shape)), dtype=dtype, mode=mode, provider=name)
                rates = speed(counted, dtype, timing.p50, card)
                own = details(counted if name == "tpfuse" else None, name)
                row = case | times | rates | own | dict(error=error, error_ratio=ratio, peak_mib=peaks[name] / 2**20)
                rows.append({key: row[key] for key in (*COLUMNS, "bytes", "flops")})
                keep(rows[-1])
    return rows, notes


@contextlib.contextmanager
def attempt(what: str, notes: list[str]) -> Iterator[None]:
    """A failure becomes a line: one provider that does not run must not cost the others."""
    try:
        yield
    except Exception as error:
        notes.append(f"{what}: {next(iter(str(error).splitlines()), type(error).__name__)}")


def speed(counted: Counted | None, dtype: str, seconds: float, card: Card) -> dict:
    """Every provider's rates count the useful work: the least bytes, and the flops that tpfuse declares."""
    if counted is None:
        return dict(tflops=None, gbs=None, roofline=None, bytes=None, flops=None)
    moved, flops = counted.least, counted.flops
    share = card.floor(dtype, moved, flops) / seconds
    return dict(
        tflops=flops / seconds / 1e12 if flops else None,
        gbs=moved / seconds / 1e9,
        roofline=share,
        bytes=moved,
        flops=flops,
    )


def details(counted: Counted | None, name: str) -> dict:
    if counted is None:
        return dict(registers=None, spills=None, path={"torch": "eager", "compile": "inductor"}.get(name, name))
    return dict(registers=counted.largest("registers"), spills=counted.largest("spills"), path=counted.path)
