"""KFAC: gradients of linear layers' weights times the inverses of two factors of their curvature."""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...kernels.runtime.captures import capture, captured_by
from ...kernels.runtime.errors import check
from ...kernels.runtime.op import acc_dtype
from ...kernels.runtime.rules import NOT_NEGATIVE, POSITIVE, check_rules, integer, listed, number, quoted
from ...layers.linear import ColumnProjection, RowParallelLinear
from ...layers.module import local
from ...models.model import staged_in
from ...pipeline import Filling, Work
from ...pipeline.trees import micro_batches_of
from ...ranks.agreement import Header, agree_over, agreement_of
from ...ranks.groups import process_group
from ...ranks.messages import gather, together
from ..matrices import WholeMatrices
from .bubbles import check_copies, pieces, stages_of
from .curvature import SIDES, Curvature, Moment

if TYPE_CHECKING:
    from ...pipeline import Pipeline

_RMS = 0.2
_RULES = dict(
    lr=NOT_NEGATIVE, momentum=number(0, 1, "[)"), weight_decay=NOT_NEGATIVE,
    damping=POSITIVE, decay=number(0, 1, "[)"), refresh=integer(),
)  # fmt: skip


class KFAC(torch.optim.Optimizer):
    """K-FAC (Martens & Grosse 2015, arXiv:1503.05671) for the weights of a model's column- and row-parallel linear
    layers: queries, keys and values, attention's output and both of an MLP.  Other parameters, biases too, are for
    another optimizer:

        kfac = tpfuse.KFAC(model, lr=1e-3)
        adamw = torch.optim.AdamW(kfac.remaining(model), lr=1e-3)
        model(ids, labels=ids).loss.backward()
        kfac.step()
        adamw.step()

    The update is M' = G^-1 M A^-1 of the gradient's ``momentum`` M.  A and G are means over the rows that the layers'
    backward passes multiply (:mod:`.curvature` has the equations), in fp32, fp64 of fp64 weights; over steps a running
    mean with ``decay``.  Both are made and inverted once in ``refresh`` steps.  ``damping``: what is added to a factor,
    squared, over the square of its mean eigenvalue.  M' is scaled to a root mean square of 0.2, which is about that of
    AdamW's update (Liu et al. 2025, arXiv:2502.16982), so that a learning rate and a decoupled ``weight_decay`` of
    AdamW can be used.

    Factors are those of whole weights: the update does not depend on the tensor-parallel size, and the state is whole
    on every rank.  ``dp``: the data-parallel replicas, over whose rows factors are averaged; a model over pipeline
    stages knows its own.

    Beside a :class:`tpfuse.MainGrad`, made before, it steps on the fp32 weights.

    ValueError for a model without such weights to train (as with LoRA), kv heads that several ranks hold, DTensors,
    context parallelism, ``TensorParallel(bitwise=...)``, weights that have a KFAC or that two ranks of a pipeline hold,
    for a world larger than the tensor-parallel group without ``dp``, and on every rank where ranks have other numbers,
    here or at a step.
    """

    local_state = True  # save_checkpoint's question: the state is of plain tensors where matrices are DTensors
    rules = _RULES | dict(steps=integer(0))  # of the groups' numbers, for a checkpoint's

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        damping: float = 0.1,
        decay: float = 0.95,
        refresh: int = 1,
        dp: DeviceMesh | dist.ProcessGroup | None = None,
    ):
        check(
            isinstance(model, nn.Module), f"KFAC: model must be a module, whose weights it finds, got {quoted(model)}"
        )
        numbers = dict(lr=lr, momentum=momentum, weight_decay=weight_decay, damping=damping, decay=decay)
        numbers |= dict(refresh=refresh)
        weights = weights_of(model)
        replicas = _replica_group(model, process_group("KFAC: dp", dp, "dp"))
        self._axes = _axes_of(model, replicas)
        together(lambda: check_rules("KFAC", numbers, _RULES), self._axes)
        agree_over([*self._axes.items()], numbers)
        self.matrices = WholeMatrices(model, only=weights)
        check_copies(model, self.matrices)
        self._moment = Moment(functools.partial(_losses, weakref.ref(model), replicas))
        self._curvature: dict[nn.Parameter, Curvature] = {}
        for name, (p, placement, matrix) in self.matrices.sources.items():
            check(captured_by(p) is None, f"KFAC: {name} has a KFAC already")
            groups = [group for group in (placement.tp.group, replicas) if group is not None and group.size() > 1]
            self._curvature[matrix] = Curvature(name, placement, groups, self._moment, weight=p)
            capture(p, self._curvature[matrix].receive)
        self._work: list[Work] = []
        super().__init__(self.matrices.parameters(), numbers | dict(steps=0))
        self._moment.group = self.param_groups[0]

    def remaining(self, model: nn.Module) -> list[nn.Parameter]:
        """Returns the parameters of ``model`` that are not here, for another optimizer."""
        return self.matrices.others(model)

    def work(self, pipeline: "Pipeline") -> list[Work]:
        """Returns factors and inversions of all ranks as pieces of work, with measured seconds, for the bubbles of a
        pipeline; each rank of the pipeline calls it, after a step of this optimizer.

            timeline = pipeline.measure(ids, labels=ids)
            pipeline.fill(fill(timeline, kfac.work(pipeline)))

        The matrices of a filling's first step wait for their pieces; ``refresh`` then has no meaning: every factor is
        made and inverted once in the filling's steps.  ValueError before the first step.
        """
        unknown = [c.name for c in self._curvature.values() if c.size is None]
        check(not unknown, f"KFAC.work: make a step first, which tells the sizes of {listed(unknown)}")
        self._moment.pipeline = pipeline
        stages = dict(zip(self._curvature.values(), stages_of(pipeline, self.matrices), strict=True))
        refreshes = {c: functools.partial(self._refresh, p) for p, c in self._curvature.items()}
        self._work = pieces(pipeline, stages, refreshes)
        return self._work

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the weights.  Every rank calls it.

        ValueError on every rank where a weight has a gradient and its matrices have not been captured: a compiled
        module, a LoRA adapter beside a weight that is trained, a KFAC that was made after the backward pass; and where
        ranks have other numbers.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        (group,) = self.param_groups
        for ranks, (name, axis, _) in self._axes.items():
            compare = agreement_of(ranks, f"{name}.step", each_call=True, axis=axis)
            compare(ranks, {key: group[key] for key in self.rules}, {})
        self.matrices.gather_gradients()
        if self._moment.filler is not None:
            self._check_placed(self._moment.filler.filling)
        elif self._moment.due:
            self._check_captured()
            for p in self._curvature:
                for side in SIDES:
                    self._refresh(p, side)
        for p in self._curvature:
            if p.grad is not None:
                self._update(p, group)
                p.grad = None  # whole on every rank; a gradient scaler would take it for the next step's
        group["steps"] += 1
        return loss

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """ValueError: the weights are those of the model's layers, which give the factors."""
        check(not self.param_groups, "KFAC has the weights of its model's layers alone; give others another optimizer")
        super().add_param_group(dict(param_group))

    def __getstate__(self) -> NoReturn:
        """TypeError: a copy would be of no model's layers, and would step on nothing."""
        raise TypeError("a KFAC, which takes its factors from its model's layers, cannot be copied; use state_dict()")

    def _check_placed(self, filling: Filling) -> None:
        """ValueError, the same on every rank, for a filling without some pieces of the latest ``work``."""
        count, placed = (Counter((piece.rank, piece.run) for piece in work) for work in (self._work, filling.work))
        check(count <= placed, "KFAC: the pipeline's filling has not all pieces of the latest KFAC.work(...)")

    def _check_captured(self) -> None:
        """ValueError on every rank of the groups that names weights whose factors would be of no rows at all.

        That a replica has no rows alone is no error: its loss does not depend on the weight, whose gradient is of the
        others' rows, as are its factors.
        """
        groups = dict.fromkeys(group for curvature in self._curvature.values() for group in curvature.groups)
        found = [(bool(c.sums), p.grad is not None) for p, c in self._curvature.items()]
        for group in groups:
            of_weights = zip(*gather(found, group), strict=True)
            found = [(any(x for x, _ in row), any(x for _, x in row)) for row in of_weights]
        named = zip(self._curvature.values(), found, strict=True)
        missing = [c.name for c, (captured, trained) in named if trained and not captured]
        check(
            not missing,
            f"KFAC: the matrices of the gradient of {listed(missing)} have not been captured since the latest step:"
            " KFAC(model) is made before the backward pass, and neither a compiled module, a weight beside an adapter"
            " nor the schedule 2bw is captured",
        )

    def _refresh(self, p: nn.Parameter, side: str) -> None:
        (group,) = self.param_groups
        self._curvature[p].refresh(side, self.state[p], group["decay"], group["damping"])

    def _update(self, p: nn.Parameter, group: Mapping[str, Any]) -> None:
        """Moves this rank's slice of a matrix."""
        curvature, state, dtype = self._curvature[p], self.state[p], acc_dtype(p)
        assert p.grad is not None
        gradient = local(p.grad).to(dtype)
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].mul_(group["momentum"]).add_(gradient)
        update = curvature.precondition(state["momentum"], state)
        update /= update.norm().clamp(min=torch.finfo(dtype).tiny)  # apart from the next line: 0 times infinity is NaN
        update *= _RMS * update.numel() ** 0.5
        local(p).mul_(1 - group["lr"] * group["weight_decay"]).add_(
            update[curvature.placement.spec.local(curvature.placement.tp)], alpha=-group["lr"]
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients of the model's weights that are here, and forgets what their matrices have added since
        the latest step, as after a backward pass that failed, or a gradient that is not to be stepped on.

        ``zero_grad()`` of a GPT or Bert, and ``zero()`` of a MainGrad, forget them too.  A pipeline's step that fails
        leaves both as they were.
        """
        super().zero_grad(set_to_none)
        self.matrices.zero_grad(set_to_none)
        for curvature in self._curvature.values():
            curvature.forget()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state, in its dtypes: torch would round factors to a weight's.

        ValueError for numbers by which nothing can be trained.
        """
        for group in state_dict["param_groups"]:
            check_rules("KFAC.load_state_dict", group, self.rules)
        super().load_state_dict(dict(state_dict))
        for p, number_ in zip(self._curvature, sum((g["params"] for g in state_dict["param_groups"]), []), strict=True):
            saved = state_dict["state"].get(number_, {})
            self.state[p] = {key: value.to(p.device, copy=True) for key, value in saved.items()}
        self._moment.group = self.param_groups[0]


def weights_of(model: nn.Module) -> list[nn.Parameter]:
    """Returns the trained weights of the model's linear layers.  ValueError where there are none, or ones of which no
    whole factor can be made."""
    weights = []
    for module in model.modules():
        if isinstance(module, ColumnProjection | RowParallelLinear):
            check(module.tp.cp is None, "KFAC is not built for context parallelism; use another optimizer")
            check(
                module.tp.bitwise is None, "KFAC's sums are not by leaves: leave bitwise off, or use another optimizer"
            )
            weights += [
                p for leaf, p in module.named_parameters(recurse=False) if "bias" not in leaf and p.requires_grad
            ]
    check(len(weights) > 0, f"KFAC: {type(model).__name__} has no weight of a parallel linear layer to train")
    return weights


def _losses(reference: "weakref.ref[nn.Module]", replicas: dist.ProcessGroup | None) -> int:
    """Returns of how many losses a step's gradient is the mean: of those of replicas, or of the micro-batches of a
    tree; a pipeline's step has one over all."""
    model = reference()
    if model is None or staged_in(model) is not None:
        return 1
    return micro_batches_of(model) or (1 if replicas is None else replicas.size())


def _axes_of(model: nn.Module, replicas: dist.ProcessGroup | None) -> dict[dist.ProcessGroup, Header]:
    """Returns the groups whose ranks step together, with what an error of theirs says."""
    layers = [m for m in model.modules() if isinstance(m, ColumnProjection | RowParallelLinear)]
    axes = {layer.tp.group: Header("KFAC") for layer in layers if layer.tp.group is not None}
    return axes if replicas is None else axes | {replicas: Header("KFAC", axis="data-parallel")}


def _replica_group(model: nn.Module, dp: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Returns the ranks over whose rows factors are averaged.  ValueError where they are not known."""
    groups: Any = getattr(model, "groups", None)
    of_model = None if groups is None else groups.dp
    if dp is not None and of_model is not None:
        ranks, replicas = map(dist.get_process_group_ranks, (dp, of_model))
        check(
            ranks == replicas,
            f"KFAC: {type(model).__name__} was given dp={replicas}, and dp here is {ranks}; leave dp off, or pass the"
            " same mesh['dp'] to both",
        )
    if dp is not None or of_model is not None:
        return of_model if dp is None else dp
    sizes = [module.tp.size for module in model.modules() if isinstance(module, ColumnProjection | RowParallelLinear)]
    world = dist.get_world_size() if dist.is_initialized() else 1
    check(
        (groups is not None and groups.staged) or world <= max(sizes),
        f"KFAC: {world} ranks are more than the {max(sizes)} of tensor parallelism, and replicas would step on"
        " different factors; give their group: KFAC(model, dp=mesh['dp'])",
    )
    return None
