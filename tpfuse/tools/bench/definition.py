"""A benchmark of one op: its axes, standard shapes, inputs, and who provides it."""

import importlib
import importlib.machinery
import importlib.util
import pathlib
import re
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.runtime.op import acc_dtype
from ...kernels.runtime.philox import make_rng
from ...kernels.runtime.rules import brief, check_number, number
from ..command import unknown
from ..options import DTYPES as DTYPES

FOLDER = pathlib.Path(__file__).with_name("ops")
MODES = "fwd", "bwd", "step"  # bwd: autograd.grad on a graph that is kept; step: forward and backward, nothing kept
Shape = tuple[int, ...]


class Random:
    """Makes the inputs of one call: random values, which differ from call to call and repeat from run to run."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int):
        self.dtype, self.device, self.seed = dtype, device, seed
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        """Returns a leaf that wants a gradient."""
        return self.constant(*shape).mul_(std).add_(mean).requires_grad_()

    def constant(self, *shape: int) -> Tensor:
        """Returns normal numbers that want no gradient."""
        return torch.randn(shape, dtype=self.dtype, device=self.device, generator=self.generator)

    def ids(self, high: int, *shape: int) -> Tensor:
        """Returns int64 numbers from 0 to ``high`` - 1."""
        return torch.randint(high, shape, device=self.device, generator=self.generator)

    def rng(self) -> Tensor:
        """Returns what tpfuse's dropout takes its masks from."""
        return make_rng(self.seed, 1).to(self.device)


@dataclass(frozen=True)
class Bench:
    """A benchmark of an op, which its file holds as ``BENCH``.

    ``inputs(random, *shape)`` makes a tuple; a provider, of any name, takes it, unpacked, and returns a tensor or a
    tuple of them.  Speed-ups are over the provider ``baseline``.  "torch", or without it the baseline, is plain PyTorch
    and in fp64 the truth that errors are taken against; "compile" is made of "torch".  The bytes and flops are those of
    the first provider that calls ops of tpfuse.  With ``p`` providers take ``p=`` too; errors are then taken at p = 0,
    since every library draws its own masks, unless ``exact`` is given, the truth with the masks of tpfuse.
    ``yardsticks`` are providers that have no error: they do part of the work, or have masks of their own beside
    ``exact``.  ``remark(card, dtype, shape)`` makes a line to print below the table, such as where the op pays, for a
    ``card`` that is None on a CPU.
    ``shapes`` are the standard ones, ``cpu_shapes`` those on a CPU.  ``modes``: "fwd" alone where there is no gradient.

    Raises ValueError where a provider is missing or a shape has other axes.
    """

    name: str
    axes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    cpu_shapes: tuple[Shape, ...]
    inputs: Callable[..., tuple[Any, ...]]
    providers: dict[str, Callable[..., Any]]
    p: float | None = None
    exact: Callable[..., Any] | None = None
    yardsticks: tuple[str, ...] = ()
    baseline: str = "torch"
    remark: Callable[..., str] | None = None
    modes: tuple[str, ...] = MODES

    def __post_init__(self) -> None:
        subject, has = f"the Bench {self.name!r}", ", ".join(map(repr, self.providers)) or "none"
        if self.baseline not in self.names:
            raise unknown("baseline", self.baseline, self.names, f", the providers of {subject}")
        if "compile" in self.providers:
            raise ValueError(f"{subject} has a provider 'compile', which is made of 'torch': give it another name")
        for name, fn in dict(self.providers, inputs=self.inputs).items():
            if not callable(fn):
                raise ValueError(f"{subject}: {name} must be a function, got {brief(repr(fn))}")
        for name in self.yardsticks:
            if name not in self.providers:
                raise ValueError(f"{subject} has a yardstick {name!r} that is no provider; it has {has}")
        if self.p is not None:
            check_number(f"{subject}: p", self.p, number(0, 1, "[)"))
        self._check_shapes(subject)

    def _check_shapes(self, subject: str) -> None:
        if not self.axes or not self.cpu_shapes:
            raise ValueError(f"{subject} needs at least one of axes and of cpu_shapes")
        for axis in self.axes:
            if "x" in axis:
                raise ValueError(f"{subject}: axes are written joined by x, which no name may hold, got {axis!r}")
        for shape in (*self.shapes, *self.cpu_shapes):
            valid = isinstance(shape, tuple) and all(isinstance(size, int) and size > 0 for size in shape)
            if not valid or len(shape) != len(self.axes):
                raise ValueError(
                    f"{subject}: a shape is a tuple of {len(self.axes)} positive integers, {self.form}; got {shape!r}"
                )

    @property
    def form(self) -> str:
        """The axes as a shape is written, "MxD"."""
        return "x".join(self.axes)

    @property
    def names(self) -> list[str]:
        """The providers, and "compile" after the one that it is made of."""
        return [each for name in self.providers for each in ([name, "compile"] if name == "torch" else [name])]

    @property
    def truth(self) -> Callable[..., Any]:
        """The provider that errors are taken against, in fp64."""
        return self.exact or self.providers.get("torch") or self.providers[self.baseline]

    def judged(self, name: str) -> bool:
        """Returns True for a provider that has errors."""
        return ("torch" if name == "compile" else name) not in self.yardsticks

    def parse(self, text: str) -> Shape:
        """Returns the shape of "8192x4096"; ValueError where it is none of this op."""
        example = written(self.cpu_shapes[0])
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text) or text.count("x") + 1 != len(self.axes):
            sizes = re.findall(r"[1-9]\d*", text)
            near = f": did you mean {'x'.join(sizes)}?" if len(sizes) == len(self.axes) else ""
            raise ValueError(
                f"{self.name}: a shape is {self.form}, {len(self.axes)} positive integers joined by x, such as"
                f" {example}; got {text!r}{near}"
            )
        return tuple(map(int, text.split("x")))

    def swept(self, text: str, shapes: Sequence[Shape]) -> list[Shape]:
        """Returns each of ``shapes`` at the sizes of one axis: "M=256..8192" doubles M from 256 on, up to 8192.

        Raises ValueError for anything else, and for an axis that the op does not have.
        """
        parsed = re.fullmatch(r"(\w+)=([1-9]\d*)\.\.([1-9]\d*)", text)
        if not parsed or int(parsed[2]) > int(parsed[3]):
            raise ValueError(f"a sweep is AXIS=FROM..TO, such as {self.axes[0]}=256..8192; got {text!r}")
        if parsed[1] not in self.axes:
            raise unknown("axis", parsed[1], self.axes, f", the axes of {self.name}")
        at, low, high = self.axes.index(parsed[1]), int(parsed[2]), int(parsed[3])
        sizes = [low << i for i in range((high // low).bit_length())]
        return list(dict.fromkeys((*shape[:at], size, *shape[at + 1 :]) for shape in shapes for size in sizes))


def written(shape: Shape) -> str:
    """Returns "8192x4096" of (8192, 4096)."""
    return "x".join(map(str, shape))


def acc(x: Tensor) -> Tensor:
    """Returns x in fp32, or fp64 where it is fp64: how plain torch code writes ``x.float()``."""
    return x.to(acc_dtype(x))


def discover() -> list[str]:
    """Returns the names of tpfuse's own ops: the files of ``ops``."""
    return sorted(path.stem for path in FOLDER.glob("[!_]*.py"))


def load(name: str) -> Bench:
    """Returns the benchmark of one of tpfuse's ops, or the BENCH of a file, "path/to/my_op.py".

    Raises ValueError where there is no such op or file, and for a file that does not run or has no BENCH.
    """
    if name.endswith(".py"):
        return _from_file(pathlib.Path(name))
    if name not in discover():
        raise unknown("op", name, discover(), ", or a file of your own, NAME.py")
    return importlib.import_module(f"{__package__}.ops.{name}").BENCH


def load_all(names: Sequence[str]) -> list[Bench]:
    """Returns each benchmark once, "all" standing for tpfuse's own; ValueError where two share a name."""
    sources = [source for name in names for source in (discover() if name == "all" else [name])]
    named: dict[str, str] = {}
    benches = []
    for source in dict.fromkeys(sources):
        bench = load(source)
        if same := named.get(bench.name):
            raise ValueError(f"{same} and {source} are both called {bench.name!r}: one BENCH needs another name")
        named[bench.name] = source
        benches.append(bench)
    return benches


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """Runs the file as it is now: bytecode on disk is told apart by size and second alone."""

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _from_file(path: pathlib.Path) -> Bench:
    """Returns the BENCH of a file, which runs as a module of its own."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    name = f"{__package__}.own.{path.stem}"  # apart from every module that the file may import
    spec = importlib.util.spec_from_file_location(name, path, loader=_SourceLoader(name, str(path)))
    assert spec is not None and spec.loader is not None  # of every file that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickle look for it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} does not run: {type(error).__name__}: {error}") from error
    bench = getattr(module, "BENCH", None)
    if not isinstance(bench, Bench):
        has = "no BENCH" if bench is None else f"as BENCH a {type(bench).__name__}"
        raise ValueError(f"{path} has {has}; it needs BENCH = tpfuse.bench.Bench(...)")
    return bench
