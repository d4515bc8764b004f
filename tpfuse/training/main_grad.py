"""Gradients that are added in fp32 over micro-batches, and the fp32 weights that an optimizer steps on.

bf16 has 8 significant bits.  A sum of 64 gradients in bf16 loses a bit or two more with every doubling of the terms,
and an update of less than 1/512 of a weight is lost whole: with Adam's steps, most of them.  So both are fp32 here:

    p.main_grad        the sum of p's gradients, to which the GEMM of each backward adds; p.grad stays None
    main.parameters()  the weights that the optimizer steps on, whose .grad is main_grad: fp32 copies of 16-bit
                       parameters, of which each step of the optimizer is rounded into the model; of fp32 and fp64
                       parameters the same memory

Each gradient is in the dtype of the weight that it belongs to, as torch demands of ``.grad``.

The gradients of one device and dtype lie in one buffer, so that their sum over the data-parallel ranks takes few
messages.  A place whose weight's ``.grad`` is None holds nothing: ``zero()`` and the optimizer's ``zero_grad()`` do
this, and what is added first then finds zeros.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..kernels.runtime.captures import forget_captured
from ..kernels.runtime.main_grad import DDP, PLACES
from ..kernels.runtime.rules import listed
from ..layers.module import ParallelModule, Spec
from ..layers.shards import named_specs
from ..models.model import staged_in
from ..parallel import TensorParallel
from ..pipeline.copies import compare_copies, copied, sum_copies
from ..ranks.agreement import raise_everywhere
from ..ranks.messages import attempt
from .calls import CallRecord, record_calls
from .foreign.guard import install
from .originals import original_of
from .totals import Buffer, GradSlot, Holder, ReduceState

_STEPPED = WeakIdKeyDictionary()  # what optimizers step on -> a reference to its GradSlot


class _Weights(ParallelModule):
    """The weights that optimizers step on, of which wholes() then knows what they are slices of."""

    def hold(self, spec: Spec, weight: nn.Parameter) -> None:
        name = f"weight_{len(self.specs)}"
        self.specs[name] = spec
        self.register_parameter(name, weight)


class MainGrad:
    """Adds the gradients of a model in fp32, inside the GEMMs that make them, until :meth:`zero`.

        main = tpfuse.MainGrad(model, mesh["dp"])
        optimizer = torch.optim.AdamW(tpfuse.param_groups(model, weight_decay=0.1), lr=3e-4)
        for micro in micro_batches:
            model(**micro).loss.backward()
        main.reduce()
        tpfuse.clip_grad_norm_(model, 1.0)
        optimizer.step()
        main.zero()

    ``dp`` is the data-parallel group: a one-dimensional DeviceMesh or a ProcessGroup, over which :meth:`reduce` takes
    the mean, or None; experts that are divided among the replicas have it already.  It takes DistributedDataParallel's
    place.  A model's pipeline stages, whose loss is one over all replicas, want the sum: ``dp`` is then the model's
    own, and copies of a parameter on two stages are added up too.  The trainable parameters are those of now; make it
    after whatever replaces or freezes parameters, and before the optimizer, which is to hold :meth:`parameters` or
    ``tpfuse.param_groups(model)``.  It lasts as long as the model's parameters do.

    ValueError if the model is on the meta device, under DistributedDataParallel, made of DTensors (FSDP2 keeps fp32
    gradients of its own), has no trainable parameter, or has a MainGrad already, and for a ``dp`` that is not that of
    pipeline stages.  All data-parallel ranks call it.
    """

    def __init__(self, model: nn.Module, dp: "dist.ProcessGroup | dist.DeviceMesh | None" = None):
        model = _checked(model)
        trained = [entry for entry in named_specs(model) if entry[1].requires_grad]
        self._ranks = TensorParallel(dp)
        _check_replicas(model, self._ranks)
        _check_experts(trained, self._ranks)
        self._ranks.agree("MainGrad", {"trainable parameters": [(n, tuple(p.shape)) for n, p, *_ in trained]})
        self._model, self._state = weakref.ref(model), ReduceState()
        holders = {p: (weakref.ref(m), name) for m in model.modules() for name, p in m._parameters.items()}
        kinds: dict[tuple[torch.device, torch.dtype, bool], list[tuple[str, nn.Parameter, Holder]]] = {}
        for n, p, _, tp in trained:
            kind = p.device, torch.promote_types(p.dtype, torch.float32), tp.replicas > 1
            kinds.setdefault(kind, []).append((n, p, holders[p]))
        self._buffers = [self._make(members, dtype, complete) for (_, dtype, complete), members in kinds.items()]
        modules: dict[TensorParallel, _Weights] = {}
        for _, p, spec, tp in trained:
            PLACES[p].module = modules.setdefault(tp, _Weights(tp))
            PLACES[p].module.hold(spec, PLACES[p].main)
        self._record = CallRecord("MainGrad", self._ranks.group)
        if self._ranks.size > 1:
            record_calls(model, self._record)
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))
            _hooks.append(register_optimizer_step_post_hook(_after_step))
        install()

    def _make(self, members: list[tuple[str, nn.Parameter, Holder]], dtype: torch.dtype, complete: bool) -> Buffer:
        buffer = Buffer([p for _, p, _ in members], dtype, complete)
        for (name, p, held), total in zip(members, buffer.totals, strict=True):
            place = GradSlot(p, name, total, self._state, held=held)
            buffer.places.append(place)
            PLACES[p], _STEPPED[place.main] = place, weakref.ref(place)
            p.register_post_accumulate_grad_hook(place.hook)
            p.main_grad = total  # type: ignore[attr-defined]  # a name of ours
            p.grad = None
        return buffer

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields the weights that an optimizer is to step on, in the model's order."""
        model = self._model()
        for p in () if model is None else model.parameters():
            if p in PLACES:
                yield PLACES[p].main

    @torch.no_grad()
    def reduce(self) -> None:
        """Averages the gradients over the data-parallel ranks and hands them to the optimizer.

        It is called once a step, after the last backward, without data parallelism too.  The mean (of pipeline stages
        the sum, that of copies first) is taken in fp32 (fp64 for fp64) in rank order, so that the bits are the same on
        every rank and in every run.  All ranks of a pipeline call it.  RuntimeError if it was called already.
        ValueError on every data-parallel rank, and on every rank of a pipeline, before a gradient changes, if
        parameters of the model were replaced, moved or made trainable since, if replicas differ in what decided the
        calls since :meth:`zero` (how many, modes, autocast, seed and step, dropout, dtypes), or if just one of the two
        ranks that hold a parameter trains it.
        """
        if self._state.reduced:
            raise RuntimeError("MainGrad: reduce() was called already in this step; call zero() before the next")
        model = self._model()
        staged = None if model is None else staged_in(model)
        stages = None if staged is None else staged.groups.pp("MainGrad.reduce")
        _, error = attempt(lambda: self._record.compare(self._check_model))
        raise_everywhere(error, [] if stages is None else [stages], call="MainGrad.reduce")
        if stages is not None:
            places = {name: PLACES[p] for name, p in copied(staged).items() if p in PLACES}
            compare_copies("MainGrad.reduce", places, stages)
            sum_copies([place.add(lambda total: total) for place in places.values()], stages)
        if self._ranks.size > 1:
            for buffer in self._buffers:
                if not buffer.complete:
                    buffer.reduce(self._ranks, self._ranks.size if staged is None else 1)
        self._state.reduced = True

    @torch.no_grad()
    def zero(self) -> None:
        """Forgets the gradients, before the first backward of the next step."""
        for buffer in self._buffers:
            buffer.all.zero_()
            for place in buffer.places:
                place.main.grad, place.clean = None, True
            forget_captured(p for place in buffer.places if (p := place.parameter) is not None)
        self._state.reduced = False
        self._record.clear()

    def _check_model(self) -> None:
        """ValueError if the model's parameters are others than they were."""
        model = self._model()
        if model is None:
            raise ValueError("MainGrad: the model no longer exists")
        slots = [(place, place.parameter) for buffer in self._buffers for place in buffer.places]
        parameters, held = dict(model.named_parameters()), {id(p) for _, p in slots}
        new = [name for name, p in parameters.items() if p.requires_grad and id(p) not in held]
        present = {id(p) for p in parameters.values()}
        gone = [place.name for place, p in slots if id(p) not in present]
        moved = [
            place.name
            for place, p in slots
            if p is not None
            and (p.device != place.total.device or (place.shares and p.data_ptr() != place.main.data_ptr()))
        ]
        for change, names in (("were replaced", gone), ("were moved", moved), ("are new or were made trainable", new)):
            if names:
                raise ValueError(
                    f"MainGrad: parameters of the model {change} since it was made: {listed(names)}; make MainGrad, and"
                    " the optimizer after it, when the model is complete"
                )


def _checked(model: nn.Module) -> nn.Module:
    """Returns the model that holds the parameters.  ValueError for one that cannot have a MainGrad."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(DDP)
    model = getattr(model, "_orig_mod", model)
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not parameters and staged_in(model) is None:  # other stages may have some
        raise ValueError(f"MainGrad: {type(model).__name__} has no trainable parameter")
    for name, p in parameters:
        if p.is_meta:
            raise ValueError(f"MainGrad: {name} is on the meta device; give the model its values first")
        if isinstance(p, DTensor):
            raise ValueError(
                f"MainGrad: {name} is a DTensor, whose gradients FSDP2 keeps: fully_shard an fp32 model with"
                " MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) for gradients in fp32"
            )
        if p in PLACES:
            raise ValueError(f"MainGrad: {name} has a main_grad already; a model has one MainGrad")
        if not p.is_floating_point():
            raise ValueError(f"MainGrad: {name} is of {p.dtype}, and gradients are of real floating-point parameters")
    return model


def _check_replicas(model: nn.Module, ranks: TensorParallel) -> None:
    """ValueError where the replicas of pipeline stages, over which their loss is one, are other ranks."""
    staged = staged_in(model)
    if staged is None:
        return
    group = staged.groups.dp
    expected = None if group is None or group.size() == 1 else group.group_name
    if expected != (ranks.group_name if ranks.size > 1 else None):
        raise ValueError(
            "MainGrad: the loss of pipeline stages is over the replicas that the model was given; give both the same:"
            f" {type(staged).__name__}(..., dp=mesh['dp']) and MainGrad(model, mesh['dp'])"
        )


def _check_experts(trained: list[tuple[str, nn.Parameter, Spec, TensorParallel]], ranks: TensorParallel) -> None:
    """ValueError for experts that are divided among other replicas than these."""
    dp = [] if ranks.group is None else dist.get_process_group_ranks(ranks.group)
    for name, *_, tp in trained:
        if tp.replicas > 1 and tp.replica_ranks != dp:
            raise ValueError(
                f"MainGrad: {name} is divided among replicas {tp.replica_ranks}; give MainGrad the mesh['dp'] of that"
                f" mesh, got ranks {dp}"
            )


# ---- for optimizers, clipping and checkpoints ----


def stepped(p: nn.Parameter) -> nn.Parameter:
    """Returns what an optimizer steps on for a parameter: its weight in a MainGrad, up to date, or itself."""
    place: GradSlot | None = PLACES.get(p) if PLACES else None
    if place is None:
        return p
    place.refresh()
    return place.main


def gradient(p: nn.Parameter) -> Tensor | None:
    """Returns a parameter's gradient, that in a MainGrad if it has one.  RuntimeError if that is not reduced yet."""
    place: GradSlot | None = PLACES.get(p) if PLACES else None
    if place is None:
        return p.grad
    place.check()
    return place.main.grad


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuses to step on parameters that have no .grad, or before reduce()."""
    for weight in _held(optimizer):
        p, place = original_of(weight), _place_of(weight)
        if place is not None:
            place.check()
            place.refresh()
        elif p in PLACES:
            raise ValueError(
                f"MainGrad: the optimizer holds {PLACES[p].name} of the model, whose gradient is in main_grad; make the"
                " optimizer, after MainGrad, of main.parameters(), tpfuse.param_groups(model) or tpfuse.WholeMatrices"
            )


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for p in _held(optimizer):
        place = _place_of(p)
        if place is not None:
            place.store()


def _place_of(weight: nn.Parameter) -> GradSlot | None:
    reference = _STEPPED.get(original_of(weight))
    return None if reference is None else reference()


def _held(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (p for group in optimizer.param_groups for p in group["params"])


_hooks: list[Any] = []  # of all optimizers, once the first MainGrad is made
