"""The communication hook: DistributedDataParallel's gradients by :func:`sparse_sum`, with what was not sent kept."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...kernels.runtime.errors import check
from ...kernels.runtime.rules import check_numbers, integer, number
from ...layers.shards import wholes
from ...layers.spec import Spec
from ...layers.state import is_split
from ...parallel import TensorParallel
from ...ranks.agreement import Header, agree, agree_over, digest
from ...ranks.messages import attempt, channel, raise_together
from .algorithm import Dials, Summed, TopkState, sparse_sum
from .messages import Replicas

# The density above which entries may be more words than whole gradients: 6 k (P - 1) / P against 2 n (P - 1) / P.
WHOLE = 1 / 3
_ZERO, _FINITE, _BAD = 0, 1, 2  # a rank's gradient of a parameter
_RULES = dict(density=number(1e-9, 1), warmup_steps=integer(0), exact_every=integer(), borders_every=integer())


class Unit:
    """Parameters whose gradients are one vector: those of one of DDP's buckets in the first step, for good, that are of
    one :func:`unit_kind`: all tensor-parallel ranks that hold them must choose the same entries.

    ``residual`` [n], of fp32 or wider: what this rank's gradients have had that was not given to a sum yet.
    """

    def __init__(self, parameters: list[Tensor], residual: Tensor):
        self.parameters, self.residual, self.state = parameters, residual, TopkState()

    def parts(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Yields each parameter with its part of the residual, shaped as the parameter."""
        sizes = [p.numel() for p in self.parameters]
        for p, part in zip(self.parameters, self.residual.split(sizes), strict=True):
            yield p, part.view(p.shape)

    def but(self, idle: set[int]) -> Tensor:
        """Returns the residual, with zeros in place of the parameters of these ids."""
        if idle.isdisjoint(map(id, self.parameters)):
            return self.residual
        parts = (torch.zeros_like(part) if id(p) in idle else part for p, part in self.parts())
        return torch.cat([part.flatten() for part in parts])


class _Bucket(NamedTuple):
    """A bucket that DDP handed to the hook, and the future that it waits for."""

    buffer: Tensor
    gradients: list[Tensor]  # views of the buffer
    parameters: list[Tensor]
    future: torch.futures.Future[Tensor]


class OkTopk:
    """The state of :func:`ok_topk_hook`, for one DistributedDataParallel.

        state = tpfuse.OkTopk(density=0.01, warmup_steps=100, group=mesh["dp"].get_group())
        ddp.register_comm_hook(state, tpfuse.ok_topk_hook)

    Of each bucket a step sends the ``density`` of its entries that are largest in the sum over the replicas; the rest
    stays with the rank that has it and is added to its next gradient (error feedback).  Over the first ``warmup_steps``
    steps the density falls to that from 1, by the same factor each time (Lin et al. 2018, arXiv:1712.01887); where more
    than a third would be sent, gradients are averaged whole.  ``exact_every``: steps after which the thresholds are
    estimated exactly; ``borders_every``: steps after which the regions that ranks add up are balanced anew.

    Every rank holds a residual of its parameters' size, in fp32 (or fp64, as the gradients).  Checkpoints hold it:
    ``save_checkpoint(..., hook=state)`` and ``load_checkpoint(..., hook=state)``.

    ``sent``: the bytes that this rank has sent in the last step, of which ``sent_entries`` were values and indices; a
    gradient averaged whole counts 2 (P - 1) / P times, as in a ring of P ranks.

    ValueError for a density that is not in (0, 1], or steps that are not integers in their range.
    """

    def __init__(
        self,
        density: float = 0.01,
        *,
        warmup_steps: int = 0,
        exact_every: int = 128,
        borders_every: int = 64,
        group: dist.ProcessGroup | None = None,
    ):
        steps = dict(warmup_steps=warmup_steps, exact_every=exact_every, borders_every=borders_every)
        check_numbers("OkTopk", dict(density=density) | steps, _RULES)
        self.warmup_steps, self.group = warmup_steps, group
        self.dials = Dials(density, exact_every, borders_every)
        self.step = 0
        self.units: list[Unit] = []
        self.sent = self.sent_entries = 0
        self._buckets: list[_Bucket] = []
        self._split_over: list[dist.ProcessGroup | None] | None = None  # whose ranks fail together; known by a step

    @property
    def _over(self) -> dist.ProcessGroup:
        group = dist.group.WORLD if self.group is None else self.group
        check(group is not None, "OkTopk: there is no process group; call torch.distributed.init_process_group first")
        return group  # type: ignore[return-value]

    @property
    def replica(self) -> int:
        """This rank's number among the replicas."""
        return self._over.rank()

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return self._over.size()

    def _take(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        if bucket.index() == 0:  # of a pass that ended in an error some may be left
            self._buckets = []
        self._buckets.append(_Bucket(bucket.buffer(), bucket.gradients(), bucket.parameters(), future))
        if bucket.is_last():
            buckets, self._buckets = self._buckets, []
            try:
                self._finish(buckets)
            except ValueError as error:
                _raise_later(error)
            for reduced in buckets:
                reduced.future.set_result(reduced.buffer)
        return future

    def _finish(self, buckets: list[_Bucket]) -> None:
        """Puts the averages into the buckets.  Nothing is changed before every rank's gradients are found finite."""
        for bucket in buckets:
            shapes = [tuple(p.shape) for p in bucket.parameters]
            check(not bucket.buffer.is_sparse, f"ok_topk_hook: gradients must be dense, got a sparse one of {shapes}")
        replicas = Replicas(self._over)
        if self._split_over is None:
            self._split_over = _calls(buckets)
        kinds = _kinds(buckets)
        settings = torch.tensor([digest(self._settings())]).view(torch.uint8).to(kinds.device)
        gathered = replicas.gather(torch.cat([settings, kinds]))
        kinds = gathered[:, len(settings) :]
        self._agree(lambda: self._check(buckets, gathered[:, : len(settings)], kinds), self._split_over)
        dials, warm = self.dials, self.step < self.warmup_steps
        if warm:
            dials = dials._replace(density=dials.density ** (self.step / self.warmup_steps))
        if warm and dials.density > WHOLE:
            for bucket in buckets:
                replicas.average_(bucket.buffer)
        else:
            self._sum(buckets, dials, replicas, _idle(buckets, kinds))
        self.step += 1
        self.sent, self.sent_entries = replicas.sent, replicas.entries

    def _settings(self) -> dict[str, Any]:
        """Returns what decides a step, and must be the same on every rank."""
        return dict(self.dials._asdict(), warmup_steps=self.warmup_steps, step=self.step)

    def _agree(self, check: Callable[[], None], groups: Sequence[dist.ProcessGroup | None]) -> None:
        """Makes an error of one tensor-parallel rank, and settings that are other ones on some, an error of all."""
        _, error = attempt(check)
        number, found = digest(self._settings()), error is not None
        for group in groups:
            links = channel(group)
            if links is not None:
                heads = links.exchange("ok_topk_hook", number, int(found))
                found = bool(heads[:, 1].any()) or bool((heads[:, 0] != number).any())
        if found:
            raise_together(error, groups)
            agree_over([(group, Header("ok_topk_hook")) for group in groups], self._settings())

    def _check(self, buckets: list[_Bucket], settings: Tensor, kinds: Tensor) -> None:
        """ValueError, the same on every replica, where their settings differ or a gradient is not finite."""
        if bool((settings != settings[0]).any()):
            agree(self._over, Header("ok_topk_hook", axis="data-parallel"), self._settings())
        error = _not_finite(buckets, kinds)
        if error is not None:
            raise error

    def _sum(self, buckets: list[_Bucket], dials: Dials, replicas: Replicas, idle: set[int]) -> None:
        gradients = {id(p): g for b in buckets for p, g in zip(b.parameters, b.gradients, strict=True)}
        if not self.units:
            self.units = [unit for bucket in buckets for unit in _units(bucket)]
        held = {id(p) for unit in self.units for p in unit.parameters}
        check(
            held == gradients.keys(), "ok_topk_hook: the parameters are not those of the first step: use a new OkTopk"
        )
        for unit in self.units:
            for p, part in unit.parts():
                part += gradients[id(p)].view(p.shape)
            summed = sparse_sum(unit.but(idle), unit.state, dials, replicas)
            _give(unit, summed, gradients, replicas.size)


def ok_topk_hook(state: OkTopk, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Averages gradients over the replicas by what is large in them (Li & Hoefler 2022, arXiv:2201.07598).

        ddp.register_comm_hook(state, tpfuse.ok_topk_hook)

    The messages go when the last bucket is there: they do not overlap with the backward pass.

    The backward pass ends in a ValueError on every rank, which names the rank and the parameter, where a gradient is
    not finite, or which names the setting that ranks differ in; no residual has changed then, and the step can be
    left out.
    """
    return state._take(bucket)


def _raise_later(error: ValueError) -> None:
    """Raises out of the backward pass once DDP has ended its own part of it: a hook's error would leave DDP in the
    middle, where it can do no further step."""

    def now() -> None:
        raise error

    queue = torch.autograd.Variable._execution_engine.queue_callback
    try:
        queue(lambda: queue(now))  # DDP queues its end after the hook's return
    except RuntimeError:  # there is no backward pass on a rank that has joined, and no step to go on to
        raise error from None


def unit_kind(spec: Spec, tp: TensorParallel) -> int:
    """Returns how many tensor-parallel ranks in a row hold the same slice of a parameter, 0 where each has it whole."""
    return spec.copies if is_split(spec, tp) else 0


def _units(bucket: _Bucket) -> list[Unit]:
    placements = wholes()
    kinds: dict[int, list[Tensor]] = {}
    for p in bucket.parameters:
        kinds.setdefault(unit_kind(*placements[p]) if p in placements else 0, []).append(p)
    dtype = torch.promote_types(bucket.buffer.dtype, torch.float32)
    return [
        Unit(parameters, bucket.buffer.new_zeros(sum(p.numel() for p in parameters), dtype=dtype))
        for parameters in kinds.values()
    ]


def _give(unit: Unit, summed: Summed, gradients: dict[int, Tensor], size: int) -> None:
    """Writes the average over the gradients, and takes from the residual what has been given."""
    average = torch.zeros_like(unit.residual)
    average[summed.total.index] = summed.total.value / size
    for p, part in zip(unit.parameters, average.split([p.numel() for p in unit.parameters]), strict=True):
        gradients[id(p)].copy_(part.view_as(gradients[id(p)]))
    unit.residual[summed.contributed] = 0
    unit.state = summed.state


def _calls(buckets: list[_Bucket]) -> list[dist.ProcessGroup | None]:
    """Returns the groups of ranks that make the same calls, of those that the parameters are split over."""
    placements = wholes()
    split = [placements[p].tp for bucket in buckets for p in bucket.parameters if p in placements]
    groups = {tp.call_group_name: tp.call_group for tp in split if tp.call_group_name is not None}
    return [groups[name] for name in sorted(groups)]


def _kinds(buckets: list[_Bucket]) -> Tensor:
    """Returns for each parameter of the buckets, one after another, whether its gradient is all zeros, finite or not
    finite: uint8."""
    gradients = [g for bucket in buckets for g in bucket.gradients]
    largest = torch.zeros(len(gradients), dtype=torch.float64, device=buckets[0].buffer.device)
    nonempty = [i for i, g in enumerate(gradients) if g.numel()]
    if nonempty:
        norms = torch._foreach_norm([gradients[i] for i in nonempty], torch.inf)
        largest[nonempty] = torch.stack(norms).double()
    kinds = torch.full_like(largest, _FINITE, dtype=torch.uint8)
    return kinds.masked_fill(largest == 0, _ZERO).masked_fill(~largest.isfinite(), _BAD)


def _idle(buckets: list[_Bucket], kinds: Tensor) -> set[int]:
    """Returns the ids of the parameters whose gradient is zero on every replica.

    DDP may have found that none has used them, and then leaves out what the hook gives: their residuals wait.
    """
    parameters = [p for bucket in buckets for p in bucket.parameters]
    return {id(parameters[i]) for i in (kinds == _ZERO).all(0).nonzero().flatten().tolist()}


def _not_finite(buckets: list[_Bucket], kinds: Tensor) -> ValueError | None:
    """Returns the same error on every replica, where a gradient of one is not finite."""
    bad = (kinds == _BAD).nonzero()
    if not len(bad):
        return None
    rank, place = bad[0].tolist()
    shape = tuple([p for bucket in buckets for p in bucket.parameters][place].shape)
    return ValueError(
        f"ok_topk_hook: gradients must be finite, got a NaN or an infinity on rank {rank} of the replicas in a"
        f" parameter of shape {shape}; nothing was sent or kept of this step"
    )
