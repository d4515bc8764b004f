"""The tensors of a forward and a backward on this rank, in the order of execution."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...collectives import summed
from ...kernels.runtime.function import observed
from ...layers.hooks import onlooker
from ...layers.partial import unchecked
from ...layers.shards import SplitParameter, named_specs
from ...layers.wiring import Normed
from ...models.model import Model
from ...models.rows import BatchRows
from ...parallel import TensorParallel
from ..watch import storage_of

# Functions whose outputs are rows, columns or the parts of a sum of rows, and their names: "owner" is the module whose
# parameters they read, "running" the one that calls them.
OPS = {
    "_Attention": "{running} attention",
    "_CrossEntropy": "{running} cross_entropy",
    "_FusedNorm": "{running} {args[0].name}",
    "_GatherAttentionExchange": "{owner}.out linear_exchange",  # three ops in one, whose output is the third's
    "GatherLinear": "{owner} gather_linear",
    "_GatherLinearCrossEntropy": "{owner} gather_linear_cross_entropy",
    "GatherMLPExchange": "{owner} gather_mlp_exchange",
    "LinearExchange": "{owner} linear_exchange",
    "_ScatterRows": "{running} scatter_rows",
}


class Key(NamedTuple):
    """A tensor: its kind, name, and which of the tensors of this kind and name it is."""

    kind: str
    name: str
    number: int = 0

    @property
    def label(self) -> str:
        """The name, with a number where it is not the first."""
        return self.name + f" ({self.number + 1})" * (self.number > 0)


class Slice(NamedTuple):
    """A tensor of this rank, and of a parameter the whole that it is a slice of."""

    tensor: Tensor
    parameter: SplitParameter | None = None


class Trace(dict[Key, Slice]):
    """A run's tensors in the order of execution.  ``rows``: those of the library's own models, some of them padding."""

    def __init__(self, tp: TensorParallel):
        super().__init__()
        self.tp = tp
        self.rows: BatchRows | None = None
        self.counts: dict[tuple[str, str], int] = {}

    def key(self, kind: str, name: str) -> Key:
        """Returns the key of the next tensor of this kind and name."""
        number = self.counts.get((kind, name), 0)
        self.counts[kind, name] = number + 1
        return Key(kind, name, number)

    def add(self, key: Key, x: Tensor) -> None:
        self[key] = Slice(x.detach().clone())

    def add_parameters(self, kind: str, model: nn.Module, value: Callable[[nn.Parameter], Tensor | None]) -> None:
        for name, p, spec, tp in named_specs(model):
            if (x := value(p)) is not None:
                self[self.key(kind, name)] = Slice(x.detach().clone(), SplitParameter(spec, tp))

    def comparable(self, split: "Trace") -> list[Key]:
        """Returns the keys in both, without those of an op that runs another number of times there."""
        return [key for key in self if key in split and self.counts[key[:2]] == split.counts[key[:2]]]


Loss = Callable[[dict[str, Tensor]], Tensor]


def trace(model: nn.Module, inputs: Mapping[str, Any], tp: TensorParallel, *, loss: Loss, ops: bool) -> Trace:
    """Runs a model forward, and backward ``loss`` of its outputs by names.

    The trace has the initial weights, the outputs of modules and of the model, and the gradients of float inputs and of
    parameters; with ``ops`` also the outputs of the ops in fused layers, and the gradients of all outputs.
    """
    recorded = Trace(tp)
    recorded.add_parameters("weight", model, lambda p: p)
    tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if isinstance(model, Model) and tokens is not None:
        recorded.rows = BatchRows(tokens.shape[:2], tp)
    given = {k: x for k, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
    floats = {k: x.detach().clone().requires_grad_() for k, x in given.items()}
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        recorder = _Recorder(recorded, model, ops)
        for handle in recorder.hooks():
            stack.callback(handle.remove)
        with observed(recorder.op) if ops else contextlib.nullcontext():
            result = dict(tensors("", model(**{**inputs, **floats})))
        for name, x in result.items():
            recorder.output("loss" if name == "loss" and x.dim() == 0 else "output", name, x)
        with unchecked():
            loss(result).backward()
    for name, x in floats.items():
        if x.grad is not None:
            recorded.add(recorded.key("input gradient", name), x.grad)
    if not ops:
        recorded.add_parameters("gradient", model, lambda p: p.grad)
    return recorded


class _Recorder:
    """Looks on while a model runs; for its sake nothing runs otherwise."""

    def __init__(self, recorded: Trace, model: nn.Module, ops: bool):
        self.recorded, self.model, self.ops = recorded, model, ops
        self.running = [""]  # names of modules
        self.owners = {storage_of(p): name.rpartition(".")[0] for name, p in model.named_parameters()}

    def hooks(self) -> Iterator[Any]:
        """Installs the hooks and yields their handles."""
        for name, part in self.model.named_modules():
            if name:
                yield from self._follow(name, part)
        if self.ops:
            for name, p, spec, tp in named_specs(self.model):
                if p.requires_grad:
                    yield p.register_post_accumulate_grad_hook(self._gradient(name, SplitParameter(spec, tp)))

    def _follow(self, name: str, part: nn.Module) -> Iterator[Any]:
        @onlooker
        def enter(_module: nn.Module, _args: Any) -> None:
            self.running.append(name)

        @onlooker
        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            self.running.pop()
            if not _in_backward():  # where torch's checkpoint runs it again
                for field, x in tensors(name, output):
                    self.output("output", field, x)

        yield part.register_forward_pre_hook(enter)
        yield part.register_forward_hook(leave)

    def _gradient(self, name: str, parameter: SplitParameter) -> Callable[[Tensor], None]:
        key = self.recorded.key("gradient", name)

        def record(p: Tensor) -> None:
            assert p.grad is not None
            self.recorded.pop(key, None)  # of another use of the parameter
            self.recorded[key] = Slice(p.grad.detach().clone(), parameter)

        return record

    def op(self, function: type, args: tuple[Any, ...], outputs: Any) -> None:
        if (template := OPS.get(function.__name__)) is None or _in_backward():
            return
        name = template.format(running=self.running[-1], owner=self._owner(args), args=args).strip()
        for x in outputs if isinstance(outputs, tuple) else (outputs,):
            if isinstance(x, Tensor) and x.is_floating_point():
                self.output("op", name, x)

    def _owner(self, args: tuple[Any, ...]) -> str:
        """Returns the module whose parameters an op reads, or else that runs."""
        running = self.running[-1]
        read = [self.owners[s] for x in args if isinstance(x, Tensor) and (s := storage_of(x)) in self.owners]
        names = [name.split(".") for name in read if name.startswith(running)]
        shared = [parts[0] for parts in zip(*names) if len({*parts}) == 1]
        return ".".join(shared) or running

    def output(self, kind: str, name: str, x: Tensor) -> None:
        self.recorded.add(self.recorded.key(kind, name), self._of_rows(kind, x))
        if not (self.ops and x.requires_grad):
            return
        key = self.recorded.key(f"gradient of {kind}", name)

        def record(dx: Tensor | None) -> None:
            if dx is not None:
                # -0 counts as 0: where ranks add parts, the sum of -0 and the others' 0 is 0
                self.recorded.add(key, self._of_rows(kind, dx) + 0.0)

        x.register_hook(record)

    def _of_rows(self, kind: str, x: Tensor) -> Tensor:
        """Returns an op's [R, m, D] as [m, D]: with stride 0 they are copies, else the parts of a sum."""
        if kind != "op" or x.dim() != 3:
            return x
        return x[0] if len(x) == 1 or x.stride(0) == 0 else summed(x, self.recorded.tp)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0


def tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the float tensors in a nested value, by names."""
    if isinstance(value, Normed):  # whose n stands there once a rank
        value = value.rows
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name or "the result", value
        return
    fields = value._asdict() if hasattr(value, "_asdict") else value
    if isinstance(fields, (tuple, list)):
        fields = {str(i): item for i, item in enumerate(fields, 1)}
    if isinstance(fields, Mapping):
        for key, item in fields.items():
            yield from tensors(f"{name}.{key}" if name else str(key), item)
