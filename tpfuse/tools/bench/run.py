"""One op at one shape and dtype, in every mode and by every provider: a row of figures for each."""

import contextlib
import functools
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch import config as functorch

from ...kernels.runtime.rules import quoted
from ..accuracy import kernel_limit, rms_errors
from .count import CallCount, count
from .definition import DTYPES, MODES, Bench, Random, Shape, written
from .measure import Timing, fills_cache, interleaved, peak_bytes, sets_needed, side_stream, speedup
from .roofline import Card

COLUMNS = (
    "op axes shape dtype mode provider wrong error limit p20_us p50_us p80_us baseline speedup speedup_p20 speedup_p80"
    " tflops gbs roofline bound bytes flops peak_mib registers spills timed path"
).split()
OURS = "tpfuse"  # the provider that must run
PEERS = {"liger": "liger_kernel"}  # provider -> the package it needs
Row = dict[str, Any]
Inputs = tuple[Any, ...]
Provider = Callable[..., Any]


@dataclass(frozen=True)
class BenchCase:
    """A measurement to make: an op at one shape and dtype, in some modes, by some providers."""

    bench: Bench
    shape: Shape
    dtype: str
    modes: Sequence[str]
    providers: Sequence[str]

    def __str__(self) -> str:
        return f"{self.bench.name} {written(self.shape)} {self.dtype}"

    def inputs(self, seed: int, device: torch.device) -> Inputs:
        """Returns one set of inputs, as ``seed`` has it."""
        inputs = self.bench.inputs(Random(DTYPES[self.dtype], device, seed), *self.shape)
        if not isinstance(inputs, tuple) or not all(isinstance(t, Tensor) for t in inputs):
            raise ValueError(f"{self.bench.name}: inputs must return a tuple of tensors, got {quoted(inputs)}")
        return inputs


def _nothing(_: Any) -> None: ...


@dataclass(frozen=True)
class Setting:
    """The device, and seconds for a mode; ``say`` gets lines of progress, ``keep`` every row as it comes."""

    card: Card
    device: torch.device
    seconds: float
    say: Callable[[str], None] = _nothing
    keep: Callable[[Row], None] = _nothing


class Results(NamedTuple):
    """Rows with the keys COLUMNS, and a line for everything that could not be had; ``failed``: those of tpfuse."""

    rows: list[Row]
    notes: list[str]
    failed: list[str]


def available(bench: Bench, wanted: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Returns those of the providers (default: all of the op) that can run, and a line for each that cannot."""
    has = [name for name in wanted or bench.names if name in bench.names]
    notes = [
        f"{bench.name} has no provider {name}; it has {', '.join(bench.names)}"
        for name in wanted or ()
        if name not in has
    ]
    missing = [name for name in has if name in PEERS and importlib.util.find_spec(PEERS[name]) is None]
    notes += [f"{name} is left out: pip install {PEERS[name].replace('_', '-')}" for name in missing]
    return [name for name in has if name not in missing], notes


def provider(bench: Bench, name: str) -> Provider:
    """Returns a provider's function; "compile" is made of torch's."""
    if name != "compile":
        return bench.providers[name]
    torch._dynamo.reset()  # a shape seen before would make the next one dynamic
    return torch.compile(bench.providers["torch"], dynamic=False)


# ---- the calls ----


class NoBackward(ValueError): ...


def outputs_of(fn: Provider, inputs: Inputs, p: float | None) -> tuple[Tensor, ...]:
    result = fn(*inputs) if p is None else fn(*inputs, p=p)
    return tuple(y for y in (result if isinstance(result, tuple) else (result,)) if isinstance(y, Tensor))


def differentiable(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(y for y in outputs if y.requires_grad)


def output_gradients(outputs: tuple[Tensor, ...], random: Random) -> list[Tensor]:
    """Returns random numbers; 1 for a loss, as ``loss.backward()`` has it."""
    return [random.constant(*y.shape).to(y.dtype) if y.dim() else torch.ones_like(y) for y in outputs]


def calls(fn: Provider, sets: list[Inputs], p: float | None, mode: str, random: Random) -> Callable[[int], object]:
    """Returns the call of one mode, by the number of the set of inputs; NoBackward for a backward that there is none
    of."""
    if mode == "fwd":
        return lambda i: outputs_of(fn, sets[i], p)
    leaves = [[t for t in inputs if t.requires_grad] for inputs in sets]
    forward = lambda i: differentiable(outputs_of(fn, sets[i], p))
    if not (first := forward(0)):
        raise NoBackward("no output of it has a gradient")
    if mode == "bwd":
        forwards = [first, *map(forward, range(1, len(sets)))]
        dys = [output_gradients(outputs, random) for outputs in forwards]
        return lambda i: torch.autograd.grad(forwards[i], leaves[i], dys[i], retain_graph=True, allow_unused=True)
    dy = output_gradients(first, random)

    def step(i: int) -> Inputs:
        outputs = forward(i)
        return outputs, torch.autograd.grad(outputs, leaves[i], dy, allow_unused=True)

    return step


# ---- errors ----


def results(fn: Provider, inputs: Inputs, p: float | None, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    """Returns the results of each mode, for output gradients that are random numbers of ``dtype``; zeros for a gradient
    that there is none of."""
    outputs, leaves = outputs_of(fn, inputs, p), [t for t in inputs if t.requires_grad]
    ys = differentiable(outputs)
    dys = output_gradients(ys, Random(dtype, inputs[0].device, 1))
    grads = torch.autograd.grad(ys, leaves, dys, materialize_grads=True) if ys else map(torch.zeros_like, leaves)
    values, gradients = [y.detach() for y in outputs], list(grads)
    return {"fwd": values, "bwd": gradients, "step": [*values, *gradients]}


def double(inputs: Inputs) -> Inputs:
    return tuple(t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in inputs)


class Errors:
    """The errors of every provider against the truth in fp64, on one set of inputs, with the limits of a right kernel.

    A limit follows from the truth's own error in the run's dtype (:func:`tpfuse.tools.accuracy.kernel_limit`), tensor
    by tensor.  Where fp64 does not fit into memory there are none.
    """

    def __init__(self, bench: Bench, make: Callable[[], Inputs]):
        self.bench, self.make = bench, make
        self.p = bench.p if bench.exact or bench.p is None else 0.0
        inputs = make()
        self.dtype = inputs[0].dtype
        self.exact = results(bench.truth, double(inputs), self.p, self.dtype)
        rounded = self.against_truth(bench.truth)
        limit = lambda error, exact: kernel_limit(error, self.dtype, exact.numel())
        self.limits = {mode: list(map(limit, rounded[mode], self.exact[mode])) for mode in MODES}

    def against_truth(self, fn: Provider) -> dict[str, list[float]]:
        """Returns the error of each tensor, by mode; inf of another number of tensors."""
        values = results(fn, self.make(), self.p, self.dtype)
        return {
            mode: rms_errors(values[mode], exact) if len(values[mode]) == len(exact) else [float("inf")] * len(exact)
            for mode, exact in self.exact.items()
        }

    def of(self, name: str, fn: Provider) -> dict[str, tuple[float, float]]:
        """Returns {mode: (error, limit)} of the tensor that is nearest to its limit, or farthest beyond; empty of a
        provider that is not judged, and of a mode that computes nothing."""
        if not self.bench.judged(name):
            return {}
        errors = self.against_truth(fn)
        pairs = {mode: list(zip(errors[mode], self.limits[mode], strict=True)) for mode in MODES}
        share = lambda pair: float("inf") if math.isnan(pair[0]) else pair[0] / pair[1]
        return {mode: max(pairs[mode], key=share) for mode in MODES if pairs[mode]}


# ---- rows ----


def measure(case: BenchCase, setting: Setting, results: Results | None = None) -> Results:
    """Measures a case.  Rows are added to ``results`` as they come, so that an interrupt leaves them there."""
    results = Results([], [], []) if results is None else results
    with side_stream(setting.device), functorch.patch(donated_buffer=False):  # so that a compiled graph can be kept
        _Measurement(case, setting, results).run()
    return results


class _Measurement:
    """A case while it is being measured."""

    def __init__(self, case: BenchCase, setting: Setting, results: Results):
        self.case, self.setting, self.results = case, setting, results
        self.device, self.notes = setting.device, results.notes
        self.fns = {name: provider(case.bench, name) for name in case.providers}
        self.sets: list[Inputs] = []

    def run(self) -> None:
        """Makes the inputs, the errors, and the rows of each mode."""
        with attempt(f"{self.case}: no more inputs", self.notes, but=ValueError):
            self.sets.append(self.case.inputs(0, self.device))
            needed = sets_needed(self.one_set, self.device)
            self.sets += [self.case.inputs(i, self.device) for i in range(1, needed)]
        if not self.sets:
            return
        bench = self.case.bench
        self.setting.say(f"{self.case}: errors")
        errors = self.errors()
        for mode in self.case.modes:
            self.time(mode, errors)
        if bench.remark is not None:
            gpu = self.setting.device.type != "cpu"
            self.notes.append(bench.remark(self.setting.card if gpu else None, self.case.dtype, self.case.shape))

    @property
    def one_set(self) -> int:
        return sum(t.nbytes for t in self.sets[0])

    def errors(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Returns {provider: {mode: (error, limit)}} of those that have them."""
        errors = {}
        with attempt(f"{self.case}: no errors", self.notes):
            truth = Errors(self.case.bench, lambda: self.case.inputs(0, self.device))
            for name, fn in self.fns.items():
                with attempt(f"{self.case}: no error of {name}", self.notes):
                    errors[name] = truth.of(name, fn)
        return errors

    def time(self, mode: str, errors: dict[str, dict[str, tuple[float, float]]]) -> None:
        """Times the calls of a mode, and adds a row of each."""
        bench = self.case.bench
        shared = dict(op=bench.name, axes=bench.form, shape=written(self.case.shape), dtype=self.case.dtype)
        ready: dict[str, Callable[[int], object]] = {}
        peaks, counts = {}, {}
        for name, fn in self.fns.items():
            self.setting.say(f"{self.case} {mode}: {name} warms up")
            failed = self.results.failed if name == OURS else None
            with attempt(f"{self.case} {mode}: {name} is left out", self.notes, failed=failed):
                call = self.call(fn, mode)
                counts[name] = self.counted(name, call)
                call(0)
                peaks[name] = peak_bytes(functools.partial(call, 0), self.device)
                ready[name] = call
        if not ready:
            return
        work = self.work(mode, counts)
        self.setting.say(f"{self.case} {mode}: {' '.join(ready)}")
        with attempt(f"{self.case} {mode}: not timed", self.notes):
            times = interleaved(ready, len(self.sets), self.device, self.setting.seconds)
            baseline = times.get(bench.baseline)
            for name, timing in times.items():
                row = shared | dict(mode=mode, provider=name, baseline=bench.baseline, peak_mib=peaks[name] / 2**20)
                row |= judgement(errors.get(name, {}).get(mode))
                row |= durations(timing, baseline) | self.rates(work, timing.p50) | details(counts[name], name)
                self.results.rows.append({key: row[key] for key in COLUMNS})
                self.setting.keep(self.results.rows[-1])

    def call(self, fn: Provider, mode: str) -> Callable[[int], object]:
        random = Random(DTYPES[self.case.dtype], self.device, 1)
        return calls(fn, self.sets, self.case.bench.p, mode=mode, random=random)

    def counted(self, name: str, call: Callable[[int], object]) -> CallCount:
        """Makes a call, and returns the ops of tpfuse in it; a compiled one is not looked into."""
        with contextlib.nullcontext(CallCount()) if name == "compile" else count() as counted:
            call(0)
        return counted

    def work(self, mode: str, counts: dict[str, CallCount]) -> CallCount | None:
        """Returns the useful work: of the first provider that calls ops of tpfuse, timed or not; None, and a note,
        where none does."""
        for name, fn in self.case.bench.providers.items():
            if name not in counts:
                with contextlib.suppress(Exception):  # nobody asked for it
                    counts[name] = self.counted(name, self.call(fn, mode))
            if name in counts and counts[name].calls:
                return counts[name]
        self.notes.append(f"{self.case} {mode}: no rates: no provider calls an op of tpfuse to count bytes of")
        return None

    def rates(self, counted: CallCount | None, seconds: float) -> Row:
        """Returns a row's rates, and what they are bound by."""
        rates = speed(counted, self.case.dtype, seconds, self.setting.card)
        read = self.one_set if counted is None else min(self.one_set, counted.least)  # of a table, a few rows
        cached = not fills_cache(len(self.sets) * read, self.device)
        return rates | dict(bound=bound(rates, self.case.dtype, self.setting.card, cached=cached))


def judgement(pair: tuple[float, float] | None) -> Row:
    """Returns the error, the limit, and whether it is beyond it; None where there is no error."""
    if pair is None:
        return dict(error=None, limit=None, wrong=None)
    error, limit = pair
    return dict(error=error, limit=limit, wrong=not error <= limit)  # so is NaN


def durations(timing: Timing, baseline: Timing | None) -> Row:
    """Returns the times of a row, and how many times as fast as the baseline it is; None where that is not timed."""
    row: Row = dict(timed=timing.method, speedup=None, speedup_p20=None, speedup_p80=None)
    row |= {f"p{q}_us": 1e6 * getattr(timing, f"p{q}") for q in (20, 50, 80)}
    if baseline is not None:
        faster = speedup(baseline, timing)
        row |= dict(speedup=faster.p50, speedup_p20=faster.p20, speedup_p80=faster.p80)
    return row


@contextlib.contextmanager
def attempt(
    failure: str, notes: list[str], *, failed: list[str] | None = None, but: type[Exception] | tuple[()] = ()
) -> Iterator[None]:
    """Makes a failure a line, also of ``failed`` unless there is no backward: one provider that does not run must not
    cost the others.  ``but`` is let through."""
    try:
        yield
    except but:
        raise
    except Exception as error:
        notes.append(f"{failure}: {next(iter(str(error).splitlines()), type(error).__name__)}")
        if failed is not None and not isinstance(error, NoBackward):
            failed.append(notes[-1])


def speed(counted: CallCount | None, dtype: str, seconds: float, card: Card) -> Row:
    """Returns every provider's rates, which count the useful work: the least bytes, and the flops that tpfuse
    declares."""
    if counted is None:
        return dict.fromkeys(("tflops", "gbs", "roofline", "bytes", "flops"))
    moved, flops = counted.least, counted.flops
    tflops = flops / seconds / 1e12 if flops else None
    share = card.floor(dtype, moved, flops) / seconds
    return dict(tflops=tflops, gbs=moved / seconds / 1e9, roofline=share, bytes=moved, flops=flops)


def bound(rates: Row, dtype: str, card: Card, *, cached: bool) -> str | None:
    """Returns what ``rates["roofline"]`` is a share of: "matrix" or "memory", or "cache" where it says nothing.

    That is where memory would be the limit, but the inputs may have come from the cache (``cached``), or must have,
    since the call was faster than memory is.
    """
    if rates["roofline"] is None:
        return None
    memory, matrix = card.seconds(dtype, rates["bytes"], rates["flops"])
    if matrix > memory:
        return "matrix"
    return "cache" if cached or rates["roofline"] > 1 else "memory"


def details(counted: CallCount, name: str) -> Row:
    """Returns the registers, the spills and the path of a row."""
    path = counted.path or {"torch": "eager", "compile": "inductor"}.get(name)
    return dict(registers=counted.largest("registers"), spills=counted.largest("spills"), path=path)
