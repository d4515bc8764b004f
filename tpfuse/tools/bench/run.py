"""One op at one shape and dtype, in every mode and by every provider: a row of figures for each."""

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch import config as functorch

from ...kernels.runtime.rules import quoted
from ..accuracy import kernel_limit, rms_errors
from .count import CallCount, count
from .definition import DTYPES, Bench, Random, Shape, written
from .measure import fills_cache, interleaved, peak_bytes, sets_needed, side_stream
from .roofline import Card

MODES = "fwd", "bwd", "step"  # bwd: autograd.grad on a graph that is kept; step: forward and backward, nothing kept
COLUMNS = (
    "op shape dtype mode provider p20_us p50_us p80_us tflops gbs roofline bound error error_ratio registers spills"
    " peak_mib timed path"
).split()
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
    """Rows with the keys COLUMNS, "bytes" and "flops", and a line for everything that could not be had."""

    rows: list[Row]
    notes: list[str]


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


def outputs_of(fn: Provider, inputs: Inputs, p: float | None) -> tuple[Tensor, ...]:
    """Returns those outputs of a call that have a gradient."""
    result = fn(*inputs) if p is None else fn(*inputs, p=p)
    return tuple(y for y in (result if isinstance(result, tuple) else (result,)) if y.requires_grad)


def output_gradients(outputs: tuple[Tensor, ...], random: Random) -> list[Tensor]:
    """Returns random numbers; 1 for a loss, as ``loss.backward()`` has it."""
    return [random.constant(*y.shape).to(y.dtype) if y.dim() else torch.ones_like(y) for y in outputs]


def calls(fn: Provider, sets: list[Inputs], p: float | None, mode: str, random: Random) -> Callable[[int], object]:
    """Returns the call of one mode, by the number of the set of inputs."""
    leaves = [[t for t in inputs if t.requires_grad] for inputs in sets]
    if mode == "fwd":
        return lambda i: outputs_of(fn, sets[i], p)
    if mode == "bwd":
        forwards = [outputs_of(fn, inputs, p) for inputs in sets]
        dys = [output_gradients(outputs, random) for outputs in forwards]
        return lambda i: torch.autograd.grad(forwards[i], leaves[i], dys[i], retain_graph=True, allow_unused=True)
    dy = output_gradients(outputs_of(fn, sets[0], p), random)

    def step(i: int) -> Inputs:
        outputs = outputs_of(fn, sets[i], p)
        return outputs, torch.autograd.grad(outputs, leaves[i], dy, allow_unused=True)

    return step


# ---- errors ----


def results(fn: Provider, inputs: Inputs, p: float | None, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    """Returns the results of each mode, for output gradients that are random numbers of ``dtype``."""
    outputs = outputs_of(fn, inputs, p)
    dys = output_gradients(outputs, Random(dtype, inputs[0].device, 1))
    grads = torch.autograd.grad(outputs, [t for t in inputs if t.requires_grad], dys)
    values = [y.detach() for y in outputs]
    return {"fwd": values, "bwd": list(grads), "step": [*values, *grads]}


def double(inputs: Inputs) -> Inputs:
    """Returns the inputs in fp64."""
    return tuple(t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in inputs)


class Errors:
    """The errors of every provider against torch in fp64, on one set of inputs; the worst tensor counts.

    The ratio is to torch in the run's own dtype, tensor by tensor.  Where fp64 does not fit into memory there are none.
    """

    def __init__(self, bench: Bench, make: Callable[[], Inputs]):
        self.bench, self.make = bench, make
        self.p = bench.p if bench.exact or bench.p is None else 0.0
        exact, inputs = bench.exact or bench.providers["torch"], make()
        self.dtype = inputs[0].dtype
        self.truth = results(exact, double(inputs), self.p, self.dtype)
        self.torch = self.against_truth(exact)

    @property
    def allowed(self) -> list[float]:
        """The limits of a right kernel's errors, of each value and gradient."""
        return [kernel_limit(error, self.dtype) for error in self.torch["step"]]

    def against_truth(self, fn: Provider) -> dict[str, list[float]]:
        """Returns the error of each tensor, by mode."""
        values = results(fn, self.make(), self.p, self.dtype)
        return {mode: rms_errors(values[mode], self.truth[mode]) for mode in MODES}

    def of(self, name: str, fn: Provider) -> dict[str, tuple[float, float]]:
        """Returns {mode: (error, ratio)}; empty where there is nothing to compare."""
        if name in self.bench.yardsticks or self.bench.exact and name != "tpfuse":
            return {}
        errors = self.against_truth(fn)
        ratio = lambda error, peer: 0.0 if error == 0 else error / max(peer, 1e-300)
        return {mode: (max(errors[mode]), max(map(ratio, errors[mode], self.torch[mode]))) for mode in MODES}


# ---- rows ----


def measure(case: BenchCase, setting: Setting, results: Results | None = None) -> Results:
    """Measures a case.  Rows are added to ``results`` as they come, so that an interrupt leaves them there."""
    results = Results([], []) if results is None else results
    with side_stream(setting.device), functorch.patch(donated_buffer=False):  # so that a compiled graph can be kept
        _Measurement(case, setting, results).run()
    return results


class _WarmCalls(NamedTuple):
    """The calls of one mode by provider, the bytes that each adds, and what tpfuse's counts as: None without it."""

    calls: dict[str, Callable[[int], object]]
    peaks: dict[str, int]
    counted: CallCount | None


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
        self.setting.say(f"{self.case}: errors")
        errors = self.errors()
        for mode in self.case.modes:
            ready = self.warm(mode)
            if ready.calls:
                self.time(mode, ready, errors)

    @property
    def one_set(self) -> int:
        """The bytes of one set of inputs."""
        return sum(t.nbytes for t in self.sets[0])

    def errors(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Returns {provider: {mode: (error, ratio)}} of those that have them."""
        errors = {}
        with attempt(f"{self.case}: no errors", self.notes):
            truth = Errors(self.case.bench, lambda: self.case.inputs(0, self.device))
            for name, fn in self.fns.items():
                with attempt(f"{self.case}: no error of {name}", self.notes):
                    errors[name] = truth.of(name, fn)
        return errors

    def warm(self, mode: str) -> _WarmCalls:
        """Makes each call once.  tpfuse is counted even where it is not timed."""
        bench, counted = self.case.bench, None
        ready = _WarmCalls({}, {}, None)
        for name, fn in {"tpfuse": bench.providers["tpfuse"], **self.fns}.items():
            timed = name in self.fns
            self.setting.say(f"{self.case} {mode}: {name} {'warms up' if timed else 'is counted'}")
            with attempt(f"{self.case} {mode}: {name} is left out", self.notes):
                random = Random(DTYPES[self.case.dtype], self.device, 1)
                call = calls(fn, self.sets, bench.p, mode=mode, random=random)
                if name == "tpfuse":
                    counted = self.count(mode, functools.partial(call, 0))
                if timed:
                    call(0)
                    ready.peaks[name] = peak_bytes(functools.partial(call, 0), self.device)
                    ready.calls[name] = call
        return ready._replace(counted=counted)

    def count(self, mode: str, call: Callable[[], object]) -> CallCount | None:
        """Returns a call's costs; None, and a note, where it calls no op of tpfuse."""
        with count() as counted:
            call()
        if counted.calls:
            return counted
        self.notes.append(f"{self.case} {mode}: no rates: the provider tpfuse calls no op of tpfuse to count bytes of")
        return None

    def time(self, mode: str, ready: _WarmCalls, errors: dict[str, dict[str, tuple[float, float]]]) -> None:
        """Times the calls of a mode, and adds a row of each."""
        self.setting.say(f"{self.case} {mode}: {' '.join(ready.calls)}")
        with attempt(f"{self.case} {mode}: not timed", self.notes):
            for name, timing in interleaved(ready.calls, len(self.sets), self.device, self.setting.seconds).items():
                row = self.rates(ready.counted, timing.p50) | dict(op=self.case.bench.name, provider=name, mode=mode)
                row |= dict(shape=written(self.case.shape), dtype=self.case.dtype, timed=timing.method)
                row |= dict(p20_us=timing.p20 * 1e6, p50_us=timing.p50 * 1e6, p80_us=timing.p80 * 1e6)
                row |= details(ready.counted if name == "tpfuse" else None, name)
                row["error"], row["error_ratio"] = errors.get(name, {}).get(mode, (None, None))
                row["peak_mib"] = ready.peaks[name] / 2**20
                self.results.rows.append({key: row[key] for key in (*COLUMNS, "bytes", "flops")})
                self.setting.keep(self.results.rows[-1])

    def rates(self, counted: CallCount | None, seconds: float) -> Row:
        """Returns a row's rates, and what they are bound by."""
        rates = speed(counted, self.case.dtype, seconds, self.setting.card)
        read = self.one_set if counted is None else min(self.one_set, counted.least)  # of a table, a few rows
        cached = not fills_cache(len(self.sets) * read, self.device)
        return rates | dict(bound=bound(rates, self.case.dtype, self.setting.card, cached=cached))


@contextlib.contextmanager
def attempt(failure: str, notes: list[str], *, but: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Makes a failure a line: one provider that does not run must not cost the others.  ``but`` is let through."""
    try:
        yield
    except but:
        raise
    except Exception as error:
        notes.append(f"{failure}: {next(iter(str(error).splitlines()), type(error).__name__)}")


def speed(counted: CallCount | None, dtype: str, seconds: float, card: Card) -> Row:
    """Returns every provider's rates, which count the useful work: the least bytes, and the flops that tpfuse
    declares."""
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


def details(counted: CallCount | None, name: str) -> Row:
    """Returns the registers, the spills and the path of a row."""
    if counted is None:
        return dict(registers=None, spills=None, path={"torch": "eager", "compile": "inductor"}.get(name, name))
    return dict(registers=counted.largest("registers"), spills=counted.largest("spills"), path=counted.path)
