"""One op = one schema, a plain-torch reference and, where there is one, a Triton launcher.  PyTorch picks by device.

``Library`` with an ``autograd.Function`` on top, rather than ``custom_op``: half the overhead a call, and the Function
may pick what it saves.  Both trace with ``fullgraph=True``.  The namespace carries the library's version and RESULTS,
so that a compiled graph in a disk cache never outlives the fake kernels it was traced with.

Arguments that belong together travel as a record, a NamedTuple named in the reference's signature.  torch's schemas
know no records: here, and only here, one is spelled out into its fields (``mask: Mask`` becomes ``mask_rng, mask_p,
..``) when an op is called, and packed again before an implementation runs.  ``reference``, ``cpu``, ``launch``,
``fake`` and ``cost`` therefore all take the reference's arguments.
"""

import inspect
import math
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import _C, Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..._version import __version__
from ..replay import UNKNOWN, Replayed, active_recorder, eager, on_cpu, read
from ..replay.calls import LAUNCHED
from .errors import check_rows
from .heap import keep_freed_memory
from .leaves import tree
from .main_grad import cast

RESULTS = 4  # raised with each change of what an op returns within a version
NAMESPACE = "tpfuse_" + f"{__version__}_{RESULTS}".replace(".", "_").replace("+", "_")
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
OPS: dict[str, "Op"] = {}  # by name
R = typing.TypeVar("R", bound=tuple[Any, ...])  # a record
# The ledger counts ops by these.
KINDS = "GEMM", "attention", "normalisation", "elementwise", "communication"
GEMM, ATTENTION, NORM, ELEMENTWISE, COMMUNICATION = KINDS
keep_freed_memory()


class Cost(NamedTuple):
    """Bytes that one call moves and flops that it computes.

    The bytes are those that reach memory: an element counts once a launch, however often it is read.  ``sent`` bytes go
    to other ranks; ``scores`` are those that attention makes: an exponential each, and its share of a mask.
    """

    read: int
    written: int
    flops: int = 0
    sent: int = 0
    scores: int = 0


def tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors among an op's arguments, those in records included."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, tuple):
            yield from tensors(arg)


def moved(*operands: Tensor | None) -> int:
    """Returns the bytes of the tensors' distinct elements; what a dimension of stride 0 repeats counts once."""
    return sum(
        t.element_size() * math.prod(n for n, s in zip(t.shape, t.stride()) if s or not n)
        for t in operands
        if t is not None
    )


def least(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    """Returns the lower bound, which is the cost of an op that makes one pass: every input read once, every output
    written once."""
    return Cost(moved(*tensors(args)), moved(*outputs))


def flatten(args: Iterable[Any]) -> list[Any]:
    """Returns the arguments with every record's fields in its place."""
    flat: list[Any] = []
    for arg in args:
        flat.extend(arg) if isinstance(arg, tuple) else flat.append(arg)
    return flat


def dense(record: R) -> R:
    """Returns a record whose tensors are contiguous, as kernels read those that they are given no strides of."""
    make: Any = type(record)
    return make(*(value.contiguous() if isinstance(value, Tensor) else value for value in record))


Make = Callable[..., Any]  # makes a record of its fields


class Spelling(NamedTuple):
    """A reference's arguments as torch's schema has them."""

    signature: inspect.Signature  # flat: a record's fields in its place
    steps: tuple[tuple[Make | None, int | slice], ...]  # (a record's _make, its fields) or (None, the argument)
    tail: int  # flat arguments from here on are passed on as they are; the dispatcher omits trailing defaults

    def pack(self, flat: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the reference's arguments for those of a call through the schema."""
        if not self.steps:
            return flat
        packed = [flat[index] if make is None else make(flat[index]) for make, index in self.steps]
        return (*packed, *flat[self.tail :])


def spelling(reference: Callable[..., Any]) -> Spelling:
    signature, hints = inspect.signature(reference), typing.get_type_hints(reference)
    flat: list[inspect.Parameter] = []
    steps: list[tuple[Make | None, int | slice]] = []
    records = 0  # the steps up to the last record
    for name, parameter in signature.parameters.items():
        hint = hints[name]
        make = getattr(hint, "_make", None)  # a record has it
        if make is not None:
            fields = typing.get_type_hints(hint).items()
            steps.append((make, slice(len(flat), len(flat) + len(fields))))
            flat += [inspect.Parameter(f"{name}_{f}", parameter.kind, annotation=a) for f, a in fields]
            records = len(steps)
        else:
            steps.append((None, len(flat)))
            flat.append(parameter.replace(annotation=hint))
    tail = len(flat) - (len(steps) - records)
    return Spelling(signature.replace(parameters=flat), tuple(steps[:records]), tail if records else 0)


class Op:
    """``torch.ops.<NAMESPACE>.<name>``: CPU runs ``cpu`` or the reference, CUDA ``launch`` or the reference, tracing
    ``fake``.

    ``fake`` is the reference itself where that needs shapes only; an op with data-dependent control flow brings its
    own.  ``cost(args, outputs)`` is what its launcher moves and computes (:func:`least` unless given), from shapes
    alone.  ``check(*args)`` raises the ValueError of a call that breaks a rule of shapes, dtypes or numbers.  All of
    them take the reference's arguments, records packed.  ``kind`` is one of KINDS.  ``replay``: the launcher's calls
    are recorded, and repeated without it (kernels/replay); a repeated call has passed ``check``.  An op never mutates
    or aliases its inputs; only a backward op may fill an ``out`` it is given (``mutates=("out",)``).  fp64 on a GPU
    runs the reference.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        launch: Callable[..., Any] | None = None,
        *,
        kind: str,
        cpu: Callable[..., Any] | None = None,
        fake: Callable[..., Any] | None = None,
        check: Callable[..., None] | None = None,
        replay: bool = False,
        mutates: tuple[str, ...] = (),
        cost: Callable[[tuple[Any, ...], tuple[Any, ...]], Cost] = least,
    ):
        self.name, self.kind, self._cost = name, kind, cost
        self.reference, self.cpu, self.check = reference, cpu or reference, check
        self.launch = Replayed(launch) if replay and launch is not None else launch
        OPS[name] = self
        self._spelling, self._names = spelling(reference), tuple(inspect.signature(reference).parameters)
        flat_fake = self._flat(self._shapes_only(fake or reference))
        _LIBRARY.define(name + torch.library.infer_schema(flat_fake, mutates_args=mutates))
        _LIBRARY.impl(name, self._flat(self.cpu, "cpu"), "CPU")
        _LIBRARY.impl(name, self._flat(self._cuda, "cuda"), "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{name}", flat_fake, lib=_LIBRARY)
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default

    def _flat(self, implementation: Callable[..., Any], device: str | None = None) -> Callable[..., Any]:
        """Returns ``implementation`` for a call through the schema.

        Autocast acts in public functions; inside an op it would quietly lower what the op keeps in fp32, so it is
        switched off for ``device``.
        """
        pack = self._spelling.pack

        def run(*flat: Any) -> Any:
            if device is not None and torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return implementation(*pack(flat))
            return implementation(*pack(flat))

        run.__signature__ = self._spelling.signature  # type: ignore[attr-defined]
        return run

    def _shapes_only(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``fake``, which refuses to give memory that nobody has written as the result of numbers and of a
        tensor on the meta device."""
        on_meta = lambda t: t.device.type == "meta"

        def run(*args: Any) -> Any:
            results = fake(*args)
            if any(map(on_meta, tensors(args))) and not all(map(on_meta, tensors((results,)))):
                raise ValueError(
                    f"{self.name}: all tensors must have numbers, or none, got one on the meta device beside others;"
                    " a module that was made there is given its own by to_empty and tpfuse.init_weights"
                )
            return results

        return run

    def _cuda(self, *args: Any) -> Any:
        double = any(t.dtype == torch.float64 for t in tensors(args))
        return (self.reference if self.launch is None or double else self.launch)(*args)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Makes the call: directly where the dispatcher would do no more than call the implementation, which spares
        the host the spelling out, the dispatch and the packing."""
        if named:
            args = self._in_order(args, named)
        launch, direct, recorded = self.launch, eager(), active_recorder() is not None
        if direct and not recorded and "cpu" not in LAUNCHED and on_cpu(args):
            if self.check is not None:
                self.check(*args)
            return self.cpu(*args)
        call = read(args) if direct or recorded else None
        if call is not None and type(launch) is Replayed and (result := launch.replay_known(call)) is not UNKNOWN:
            return result
        if self.check is not None:
            self.check(*args)
        device = None if call is None else call.device
        if call is None or device is None:
            return self.overload(*flatten(args))
        if launch is not None and device.type in LAUNCHED and not call.double:
            return launch.run(args, call) if type(launch) is Replayed else launch(*args)
        if device.type == "cpu":
            return self.cpu(*args)
        return self._cuda(*args) if device.type == "cuda" else self.overload(*flatten(args))

    def _in_order(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Returns the arguments, of which those behind ``args`` are given by name, in the reference's order."""
        names = self._names[len(args) : len(args) + len(named)]
        if len(names) < len(named):
            raise TypeError(f"{self.name}: no argument is called {', '.join(sorted(named.keys() - set(names)))}")
        return *args, *[named[name] for name in names]

    def pack(self, flat: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the reference's arguments for those of a call through the schema."""
        return self._spelling.pack(flat)

    def write(self, places: tuple[Tensor, ...], *args: Any, **named: Any) -> Any:
        """Makes the call inside another op: outputs go to contiguous ``places``, which implementations take last."""
        double = places[0].dtype == torch.float64
        implementation = self.cpu if places[0].is_cpu or double or self.launch is None else self.launch
        return implementation(*self._in_order(args, named), *places)

    def cost(self, args: tuple[Any, ...], outputs: Tensor | tuple[Tensor, ...] | None) -> Cost:
        """Returns the cost of the call that took ``args`` and gave ``outputs``, None where it fills an argument; meta
        tensors will do."""
        return self._cost(args, (outputs,) if isinstance(outputs, Tensor) else tuple(outputs or ()))


def op(reference: Callable[..., Any], **options: Any) -> Op:
    """Registers an :class:`Op` named after its reference: ``linear_fwd = op(linear_fwd_ref, kind=GEMM)``."""
    return Op(reference.__name__.removesuffix("_ref"), reference, **options)


A = typing.TypeVar("A", bound=Tensor | None)
B = typing.TypeVar("B", bound=Tensor | None)
C = typing.TypeVar("C", bound=Tensor | None)
D = typing.TypeVar("D", bound=Tensor | None)


@typing.overload
def autocast(a: A, /) -> tuple[A]: ...
@typing.overload
def autocast(a: A, b: B, /) -> tuple[A, B]: ...
@typing.overload
def autocast(a: A, b: B, c: C, /) -> tuple[A, B, C]: ...
@typing.overload
def autocast(a: A, b: B, c: C, d: D, /) -> tuple[A, B, C, D]: ...
def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Under ``torch.autocast``: floating tensors (fp64 excepted) in its dtype; otherwise the tensors as they are."""
    if not (torch.compiler.is_compiling() or _C._is_any_autocast_enabled()):
        return tensors
    model = next(t for t in tensors if t is not None)
    if not autocasts(model):
        return tensors
    dtype = torch.get_autocast_dtype(model.device.type)
    lower = (torch.float32, torch.float16, torch.bfloat16)
    return tuple(cast(t, dtype) if t is not None and t.dtype in lower else t for t in tensors)


def autocasts(x: Tensor) -> bool:
    """Returns whether autocast is on for x's device."""
    device = x.device.type
    return device != "meta" and torch.is_autocast_enabled(device)


def launched(x: Tensor) -> bool:
    """Returns whether ops of x are for launchers, whose kernels a CPU has under Triton's interpreter alone."""
    return not x.is_cpu or "cpu" in LAUNCHED


def acc_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of sums and statistics of x: fp32, or fp64 for fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def has_numbers(x: Tensor) -> bool:
    """Returns False for a fake tensor, and in a graph that is compiled, where sizes may be symbols."""
    return not (torch.compiler.is_compiling() or isinstance(x, FakeTensor))


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x in ``dtype``: itself where it has that, which ``x.to`` calls the dispatcher to find out."""
    return x if x.dtype is dtype else x.to(dtype)


def copied(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a contiguous copy of x in ``dtype``, whatever x's strides: those that an op's fake result has."""
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


def dtype_of(x: Tensor | None) -> torch.dtype | None:
    return None if x is None else x.dtype


def new_vector(model: Tensor, n: int, dtype: torch.dtype | None) -> Tensor:
    """Returns an uninitialised vector [n] of ``dtype``; [0] for None."""
    return model.new_empty(0, dtype=acc_dtype(model)) if dtype is None else model.new_empty(n, dtype=dtype)


def as_rows(name: str, x: Tensor) -> Tensor:
    """Returns x [..., D] as contiguous [M, D]: itself if it is that, which spares autograd a node.  Raises the
    ValueError of the public function ``name`` for an x without dimensions or of another dtype."""
    check_rows(name, x)
    if x.dim() == 2:
        return x.contiguous()
    *leading, columns = x.shape
    return x.reshape(-1 if columns else math.prod(leading), columns).contiguous()


def scalar(value: float | Tensor, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """Returns a number, or a tensor, in ``dtype`` on ``device``; a number is written there by a kernel, since a GPU
    would have to be waited for with a copy."""
    if isinstance(value, Tensor):
        return value.to(device, dtype)
    if isinstance(value, float) and torch.compiler.is_compiling():  # of full() it would be a constant of the graph
        return torch.zeros((), dtype=dtype, device=device) + value
    return torch.full((), value, dtype=dtype, device=device)


def sum_parts(parts: Tensor, *addends: Tensor, as_tree: bool = False) -> Tensor:
    """[R, ...] -> [...]: a new tensor, added in rank order in fp32 (fp64 for fp64), then the addends; not yet rounded.

    ``as_tree``: parts as a binary tree, each node rounded to their dtype (:mod:`.leaves`), then widened.
    """
    acc = acc_dtype(parts)
    terms = [tree(parts.unbind(0)), *addends] if as_tree else [*parts.unbind(0), *addends]
    part, terms = terms[0], terms[1:]
    if terms and part.dtype == terms[0].dtype == acc and part.is_contiguous():
        total = part + terms.pop(0)  # in one pass
    else:
        total = copied(part, acc)
    for term in terms:
        total += term
    return total


def row_blocks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of rows whose fp32 temporaries stay in a core's cache, at least one; for CPU implementations."""
    step = max(1, (1 << 17) // max(columns, 1))
    return ((i, min(i + step, rows)) for i in range(0, max(rows, 1), step))
