"""accelerate on a split model: data and gathers over the data-parallel ranks, DDP over them, whole checkpoints.

accelerate takes every process for a replica.  Its own ParallelismConfig cures that for data loaders alone, so a class
of the user's own joins the two: ``class Accelerator(tpfuse.AcceleratorMixin, accelerate.Accelerator)``.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..kernels.runtime.errors import check
from ..models.files.write import whole_tensors
from ..models.model import Model
from ..parallel import TensorParallel
from ..ranks.messages import together
from ..training.calls import CallRecord, record_calls
from ..training.checkpoint import load_checkpoint, save_checkpoint
from ..training.optim import clip_grad_norm_

FOLDER = "tpfuse"  # of a checkpoint of accelerate or the Trainer, which holds every rank's shards and optimizer state
FOREIGN: Any = object  # what a class of the user's own puts behind a mixin


def model_of(model: nn.Module) -> Model | None:
    """Returns the tpfuse model in ``model``; None where there is none."""
    return next((m for m in model.modules() if isinstance(m, Model)), None)


class MeshSizes(NamedTuple):
    """The arguments of accelerate's ParallelismConfig: the tensor-parallel size and the number of replicas."""

    tp_size: int
    dp_shard_size: int

    def __str__(self) -> str:
        return f"tp_size={self.tp_size}, dp_shard_size={self.dp_shard_size}"


def _sizes(config: Any) -> MeshSizes:
    return MeshSizes(config.tp_size, config.dp_shard_size)


def check_processes(model: Model, counts: Mapping[str, int]) -> None:
    """Raises ValueError where a library counts other processes than torch.distributed does: each reads the environment
    by itself, and one that sees a process alone divides and gathers over none."""
    if not model.groups.all():
        return
    world = dist.get_world_size()
    wrong = [f"{library} counts {count}" for library, count in counts.items() if count != world]
    check(
        not wrong,
        f"torch.distributed has {world} processes, and {', '.join(wrong)}; start the script by torchrun, or set RANK,"
        " WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each process before an Accelerator or"
        " TrainingArguments is made",
    )


def sizes_of(model: Model) -> MeshSizes:
    """Returns the sizes of a model over the whole world.

    ValueError, on every rank, if the world's ranks are not in the order that accelerate's data loaders suppose.
    """
    tp, world, rank = model.tp, dist.get_world_size(), dist.get_rank()
    dp, calls = world // tp.call_size, tp.call_size

    def examine() -> None:
        check(
            dp == 1 or model.groups.dp_rank is not None,
            f"{world} ranks are {dp} replicas of {calls} {tp.call_axis} ranks, and the model does not know of them;"
            " give parallelize, or the model, dp=mesh['dp']",
        )
        check(
            divmod(rank, calls) == (model.groups.dp_rank or 0, tp.call_rank),
            f"rank {rank} is data-parallel rank {model.groups.dp_rank or 0} and {tp.call_axis} rank {tp.call_rank};"
            f" accelerate needs init_device_mesh(device, {_shape(dp, tp)}), tp last",
        )

    together(examine, model.groups.all())
    return MeshSizes(calls, dp)


def _shape(dp: int, tp: TensorParallel) -> str:
    if tp.cp is None:
        return f"({dp}, {tp.size}), mesh_dim_names=('dp', 'tp')"
    return f"({dp}, {tp.cp_size}, {tp.size}), mesh_dim_names=('dp', 'cp', 'tp')"


class AcceleratorMixin(FOREIGN):  # type: ignore[misc]
    """Stands before accelerate's Accelerator, which then trains split models.

    ``Accelerator(parallelism_config=ParallelismConfig(tp_size=2, dp_shard_size=2))``, the second number being that of
    the replicas.  ``prepare`` wraps the model in DDP over the replicas; ``gather``, ``gather_for_metrics`` and
    ``reduce`` count every replica once; ``save_state`` keeps every rank's shards, and ``load_state`` reads them at any
    tensor-parallel size; ``get_state_dict`` returns whole tensors by Hugging Face's names (all ranks call it).
    """

    knows_split_models = True  # which tpfuse.training.foreign.accelerate asks
    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *args: Any, parallelism_config: Any = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if parallelism_config is not None:
            self.tell(parallelism_config)

    def tell(self, config: Any) -> None:
        """Gives accelerate its ParallelismConfig, which its constructor refuses on CPUs."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        check(config.total_size == world, f"accelerate: {world} ranks, and {config} is of {config.total_size}")
        check(
            not self.dispatch_batches or self._dispatches(config),
            f"accelerate: dispatch_batches=True is right for one replica and split_batches=False, got {_sizes(config)}"
            f" and split_batches={self.split_batches}; give dispatch_batches=False: replicas read rows of their own",
        )
        self.state.parallelism_config = config
        self.state.device_mesh = config.get_device_mesh(self.device.type)

    @property
    def _tp(self) -> int:
        return 1 if self.parallelism_config is None else int(self.parallelism_config.tp_size)

    @property
    def dispatch_batches(self) -> bool | None:
        """Returns what accelerate was told; False where it was not and would dispatch the same rows to all replicas,
        or other rows to each rank of one."""
        told: bool | None = super().dispatch_batches
        return False if told is None and not self._dispatches(self.parallelism_config) else told

    def _dispatches(self, config: Any) -> bool:
        """Returns whether accelerate's dispatcher, to which all ranks of a mesh with tp are one replica, is right."""
        return config is None or config.tp_size == 1 or (config.dp_shard_size == 1 and not self.split_batches)

    def _prepare_tp(self, *args: Any) -> tuple[Any, ...]:
        return args  # accelerate's own makes DTensors here, and warns where there are none

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepares a model as accelerate does, with DDP over the replicas alone.

        ValueError if the ParallelismConfig is not the model's.
        """
        split = model_of(model)
        alone = split is None or all(group.size() == 1 for group in split.groups.all())
        if split is None or alone or getattr(model, "_is_accelerate_prepared", False):
            return super().prepare_model(model, device_placement, evaluation_mode)
        check_processes(split, {"accelerate": self.num_processes})
        sizes, config = sizes_of(split), self.parallelism_config
        configured = None if config is None else _sizes(config)
        if split.tp.call_size == 1 and configured is None:
            whole: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
            if isinstance(whole, DistributedDataParallel):
                record_calls(whole, CallRecord("accelerate", split.groups.dp))
            return whole
        check(configured == sizes, f"accelerate: give parallelism_config=ParallelismConfig({sizes}), got {configured}")
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        if evaluation_mode or sizes.dp_shard_size == 1:
            return prepared
        assert split.groups.dp is not None
        handler: Any = getattr(self, "ddp_handler", None)
        options = {} if handler is None else handler.to_kwargs()
        self._models[-1] = DistributedDataParallel(prepared, process_group=split.groups.dp, **options)
        record_calls(self._models[-1], CallRecord("accelerate", split.groups.dp))
        self._models[-1]._is_accelerate_prepared = True
        return self._models[-1]

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepares a scheduler as accelerate does; it steps once for each replica, not once for each process."""
        prepared = super().prepare_scheduler(scheduler)
        if self._tp > 1 and not prepared.split_batches:
            prepared.split_batches, step, count = True, prepared.step, self.parallelism_config.dp_shard_size
            prepared.step = lambda *args, **kwargs: [step(*args, **kwargs) for _ in range(count)]
        return prepared

    # ---- every replica once ----

    def gather(self, tensor: Any) -> Any:
        """Returns the tensors of all replicas, one after the other."""
        gathered = super().gather(tensor)
        if self._tp == 1:
            return gathered
        world = dist.get_world_size()
        replicas = lambda x: x.unflatten(0, (world // self._tp, self._tp, len(x) // world))
        return _apply(lambda x: replicas(x)[:, 0].flatten(0, 1), gathered)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Returns what all replicas hold, without what was repeated to fill the last batch."""
        use_gather_object = use_gather_object or not _tensors(input_data)
        if self._tp > 1 and use_gather_object and dist.get_rank() % self._tp:
            input_data = []  # accelerate joins what it gets by iterating over each rank's
        return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Returns the sum or the mean over the replicas."""
        total = super().reduce(tensor, reduction, scale)
        if reduction != "sum" or self._tp == 1:
            return total
        return _apply(lambda x: x / self._tp if x.is_floating_point() else x // self._tp, total)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clips by the norm over all shards, or by that of all leaves; ValueError for leaves if ``parameters`` are not
        those of a prepared model, or ``norm_type`` is not 2."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        identities = {id(p) for p in parameters}
        covered = (m for m in self._models if {id(p) for p in m.parameters() if p.grad is not None} <= identities)
        model, leaves = next(covered, None), any(m.tp.bitwise for m in map(model_of, self._models) if m is not None)
        ours = model is not None and norm_type == 2
        check(ours or not leaves, "clip_grad_norm_: of bitwise give model.parameters(), and norm_type=2")
        if not ours or (self._tp == 1 and not leaves):
            return super().clip_grad_norm_(parameters, max_norm, norm_type)  # torch's, which is over all shards too
        self.unscale_gradients()
        return clip_grad_norm_(model, max_norm)  # type: ignore[arg-type]

    # ---- files ----

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Returns whole tensors by Hugging Face's names on every rank; every rank calls it."""
        split = model_of(model)
        return super().get_state_dict(model, unwrap) if split is None else dict(whole_tensors(split.files))

    def save_state(self, output_dir: str | None = None, **options: Any) -> Any:
        """Saves as accelerate does; the model and its optimizer by :func:`save_checkpoint`, in a folder of it."""
        with self._apart("save_state") as (model, optimizer):
            folder = super().save_state(output_dir, **options)
            if model is not None:
                save_checkpoint(Path(folder) / FOLDER, model, optimizer, step=int(getattr(self, "step", 0)))
        return folder

    def load_state(self, input_dir: str | None = None, **options: Any) -> None:
        """Loads what :meth:`save_state` wrote, at any tensor-parallel size.

        ValueError if there is no such state.
        """
        with self._apart("load_state") as (model, optimizer):
            if model is not None:
                check(input_dir is not None, "load_state: input_dir must be given")
                step = load_checkpoint(Path(str(input_dir)) / FOLDER, model, optimizer)
                check(step is not None, f"load_state: {input_dir} has no folder {FOLDER!r}, which save_state writes")
            super().load_state(input_dir, **options)

    @contextlib.contextmanager
    def _apart(self, caller: str) -> Iterator[tuple[Any, Any]]:
        """Takes a model of tpfuse and its optimizer out of accelerate's lists while the context is open."""
        if not any(map(model_of, self._models)):
            yield None, None
            return
        lists = self._models, self._optimizers
        sizes = tuple(map(len, lists))
        check(sizes == (1, 1), f"{caller}: prepare one model of tpfuse with one optimizer, got {sizes}")
        self._models, self._optimizers = [], []
        try:
            yield lists[0][0], lists[1][0].optimizer
        finally:
            self._models, self._optimizers = lists


def _apply(function: Callable[[Any], Any], values: Any, error_on_other_type: bool = False) -> Any:
    recursively_apply: Any = import_module("accelerate.utils").recursively_apply
    return recursively_apply(function, values, error_on_other_type=error_on_other_type)


def _tensors(values: Any) -> bool:
    """Returns True if accelerate gathers ``values`` as tensors."""
    try:
        _apply(lambda x: x, values, error_on_other_type=True)
    except TypeError:
        return False
    return True
