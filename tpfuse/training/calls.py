"""Replicas compare what has decided the calls of a step, before they add up its gradients.

A forward sends nothing to other replicas, and one may call what the others do not: an evaluation, a pass of
torch.autograd.grad.  So a call counts where a backward pass begins that is to add to a gradient, and all that have
counted are compared once a step, before anything of the reduction is sent: 24 bytes from each replica to each other,
from host to host.  Calls that the same values decide count as one, because replicas may share a step's documents out
in different numbers of micro-batches.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ..layers.hooks import onlooker
from ..layers.module import mark_of, module_state
from ..models.model import Model
from ..parallel import resolve
from ..ranks.agreement import Described, Header, agree, described, digest, torch_modes
from ..ranks.messages import attempt, channel, raise_together

T = TypeVar("T")
_STEP = "model.step after a call"
_CLIPPED = "max_norm of clip_grad_norm_ before a call"
_COUNTED = "calls of this step that add to a gradient"
_CAUSE = "a call with dropout and without step= counts as a step; unequal numbers of micro-batches need step="


class CallValues(NamedTuple):
    """A call by what decides it: what may be another at each call, and the state of the module's parts, in words."""

    numbers: dict[str, str]
    parts: dict[str, str]
    digest: int  # of both


class CallRecord:
    """The calls that have counted since the replicas last compared theirs; ``name`` begins an error."""

    def __init__(self, name: str, replicas: dist.ProcessGroup | None):
        self._header = Header(name, axis="data-parallel", causes=((_STEP, _CAUSE),))
        self._replicas = None if replicas is None else replicas.group_name
        self._calls: list[CallValues] = []
        self._parts: tuple[list[Any], dict[str, str], int] = ([], {}, 0)  # their mark, in words, digest

    def describe(self, module: nn.Module, kwargs: Mapping[str, Any], hooks: str | None = None) -> CallValues:
        """Describes a call of ``module`` with ``kwargs``; ``hooks``: what sends its gradients."""
        mark = mark_of(module)
        if mark != self._parts[0]:
            parts = {key: str(value) for key, value in module_state(module).items()}
            self._parts = mark, parts, digest(parts)
        _, parts, number = self._parts
        values = {"training": module.training, _CLIPPED: _norms.get(module)} | torch_modes()
        if hooks is not None:
            values["communication hooks"] = Described(hooks)
        step = kwargs.get("step")
        if step is not None and not (isinstance(step, Tensor) and not step.is_cpu):  # for a device one would wait
            values["step"] = step
        if isinstance(module, Model):
            values |= module._seed_and_step()
            values[_STEP] = values.pop("model.step")
        numbers = {key: described(value).text for key, value in values.items()}
        return CallValues(numbers, parts, digest((numbers, number)))

    def add(self, call: CallValues) -> None:
        self._calls.append(call)

    def clear(self) -> None:
        """Forgets the calls of a step that did not end."""
        self._calls.clear()

    def compare(self, check: Callable[[], T]) -> T:
        """Compares the different calls in order, forgets them, and returns ``check()``.  Each replica calls it.

        ValueError on every replica where they differ; where ``check()`` raises an error on one, it is one on each.
        """
        calls = list({call.digest: call for call in self._calls}.values())
        self._calls = []
        result, error = attempt(check)
        group = None if self._replicas is None else resolve(self._replicas)
        links = channel(group)
        name, number = f"{self._header.name}: the calls of a step", digest([call.digest for call in calls])
        heads = torch.zeros(1, 2) if links is None else links.exchange(name, number, int(error is not None))
        if error is not None or bool(heads[:, 1].any()):
            raise_together(error, [group])
        if bool((heads[:, 0] != heads[0, 0]).any()):
            agree(group, self._header, {_COUNTED: Described("some" if calls else "none")})
            values = _values(calls)
            agree(group, self._header, {key: Described(", ".join(texts)) for key, texts in values.items()})
            several = [key for key, texts in values.items() if len(texts) > 1]
            texts = [" ".join(f"{key}={(call.numbers | call.parts).get(key)}" for key in several) for call in calls]
            agree(group, self._header, {"what goes together in a call": Described(", ".join(texts))})
        return result[0]


def _values(calls: list[CallValues]) -> dict[str, list[str]]:
    """Returns the different values that each key has in some call, in their order."""
    values: dict[str, dict[str, None]] = {}
    for call in calls:
        for key, text in (call.numbers | call.parts).items():
            values.setdefault(key, {})[text] = None
    return {key: list(texts) for key, texts in values.items()}


_norms: "weakref.WeakKeyDictionary[nn.Module, float]" = weakref.WeakKeyDictionary()


def clipped(module: nn.Module, max_norm: float) -> None:
    """Notes what the gradients were clipped by, which the replicas compare with the next calls: sooner would be a
    message more."""
    _norms[module] = max_norm


# ---- by hooks ----

_records: "weakref.WeakKeyDictionary[nn.Module, CallRecord]" = weakref.WeakKeyDictionary()


def record_calls(module: nn.Module, record: CallRecord) -> None:
    """Counts the calls of a module where backward begins.

    Those of a DistributedDataParallel are compared there too, where the pass is to send gradients.
    """
    if module not in _records:
        module.register_forward_hook(_after_call, with_kwargs=True)
    _records[module] = record


@onlooker
def _after_call(module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
    if torch.compiler.is_compiling() or module not in _records:
        return
    tensors = roots(output)
    if not tensors:
        return
    record, replica = _records[module], module if isinstance(module, DistributedDataParallel) else None
    inner = module if replica is None else replica.module
    hooks = None if replica is None else _hooks_of(replica)
    call, sends = record.describe(inner, kwargs, hooks), replica is not None and _sends(replica)

    def begin() -> None:
        record.add(call)
        if replica is not None and sends:
            _compare(replica, record)

    at_backward(tensors, inner, begin)


def roots(output: Any) -> list[Tensor]:
    """Returns the tensors of a call's output that a backward pass may begin at; none in a CUDA graph's capture."""
    tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    capturing = bool(tensors) and tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
    return [] if capturing else tensors


def at_backward(tensors: list[Tensor], module: nn.Module, begin: Callable[[], None]) -> None:
    """Calls ``begin()`` where the first backward pass from ``tensors`` begins, if it is to add to a gradient of
    ``module``."""

    def hook(gradient: Tensor) -> None:
        if _accumulates(module):
            begin()

    register_multi_grad_hook(tensors, hook, mode="any")


def _hooks_of(replica: DistributedDataParallel) -> str:
    hooks = [hook for hook, _ in replica._comm_hooks]
    return ", ".join(getattr(hook, "__name__", type(hook).__name__) for hook in hooks) or "none"


def _sends(replica: DistributedDataParallel) -> bool:
    """Returns whether the backward pass of a call sends gradients, and that of every other replica does."""
    return replica.require_backward_grad_sync and not replica._join_config.enable


def _compare(replica: DistributedDataParallel, record: CallRecord) -> None:
    try:
        record.compare(lambda: None)
    except Exception:
        replica.reducer._reset_state()  # which would take the next micro-batch's gradients for those of this pass
        raise


def _accumulates(module: nn.Module) -> bool:
    """Returns whether the backward pass that runs is to add to a gradient of the module."""
    trained = (p for p in module.parameters() if p.requires_grad)
    try:
        return any(torch._C._will_engine_execute_node(get_gradient_edge(p).node) for p in trained)
    except RuntimeError:  # torch.autograd.grad is to return one
        return False
