"""A benchmark of one op: its axes, standard shapes, inputs, and who provides it."""

import importlib
import pathlib
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tpfuse.kernels.runtime.op import acc_dtype
from tpfuse.kernels.runtime.philox import make_rng

FOLDER = pathlib.Path(__file__).parents[1] / "kernels"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Shape = tuple[int, ...]


class Random:
    """Makes the inputs of one call: random values, which differ from call to call and repeat from run to run."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int):
        self.dtype, self.device, self.seed = dtype, device, seed
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        """A leaf that wants a gradient."""
        return self.constant(*shape).mul_(std).add_(mean).requires_grad_()

    def constant(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device, generator=self.generator)

    def ids(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, device=self.device, generator=self.generator)

    def rng(self) -> Tensor:
        return make_rng(self.seed, 1).to(self.device)


@dataclass(frozen=True)
class Bench:
    """``inputs(random, *shape)`` makes a tuple; a provider takes it, unpacked, and returns a tensor or a tuple of them.

    "torch" is plain PyTorch, from which "compile" is made and, in fp64, the truth that errors are taken against.
    With ``p`` providers take ``p=`` too; errors are then taken at p = 0, since every library draws its own masks,
    unless ``exact`` is given: torch with *tpfuse's* mask, against which tpfuse alone is compared.  ``yardsticks`` are
    providers that do only part of the work: they have no error.  ``shapes`` are the standard ones, ``cpu_shapes``
    those on a CPU.
    """

    name: str
    axes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    cpu_shapes: tuple[Shape, ...]
    inputs: Callable[..., tuple]
    providers: dict[str, Callable]
    p: float | None = None
    exact: Callable | None = None
    yardsticks: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """tpfuse and torch, what torch.compile makes of torch, then the peers."""
        first = ["tpfuse", "torch", "compile"]
        return first + [name for name in self.providers if name not in first]

    def parse(self, text: str) -> Shape:
        """ "8192x4096" -> (8192, 4096); ValueError where it is no shape of this op."""
        form = "x".join(self.axes)
        example = "x".join(map(str, self.cpu_shapes[0]))
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text) or text.count("x") + 1 != len(self.axes):
            raise ValueError(
                f"{self.name}: a shape is {form}, {len(self.axes)} positive integers joined by x, such as {example};"
                f" got {text!r}"
            )
        return tuple(map(int, text.split("x")))


def acc(x: Tensor) -> Tensor:
    """x in fp32, or fp64 where it is fp64: how plain torch code writes ``x.float()``."""
    return x.to(acc_dtype(x))


def discover() -> dict[str, str]:
    """Op -> module, for every file of bench/kernels that defines a BENCH."""
    files = sorted(path for path in FOLDER.glob("*.py") if "\nBENCH = " in path.read_text())
    return {path.stem: f"bench.kernels.{path.stem}" for path in files}


def load(name: str) -> Bench:
    modules = discover()
    if name not in modules:
        raise ValueError(f"there is no op {name!r}; there are {', '.join(modules)}")
    return importlib.import_module(modules[name]).BENCH
