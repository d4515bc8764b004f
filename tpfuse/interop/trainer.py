"""transformers' Trainer on a split model: ``class Trainer(tpfuse.TrainerMixin, transformers.Trainer)``."""

import random
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..kernels.runtime.errors import check
from ..models.files.read import ModelDirectory, restore
from ..ranks.messages import gather
from ..training.checkpoint import load_checkpoint, save_checkpoint
from .accelerator import FOLDER, FOREIGN, AcceleratorMixin, check_processes, sizes_of
from .parallelized import Parallelized, parallelized_in

_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"  # transformers' names


class TrainerMixin(FOREIGN):  # type: ignore[misc]
    """Stands before transformers' Trainer, or a class derived from it, which then trains what parallelize has split.

    Ranks of a tensor-parallel group read the same batches; losses, gradients and metrics are taken over the replicas.
    A checkpoint holds the whole model as transformers writes it, and in a folder of its own every rank's shards and
    optimizer state, which resume at any tensor-parallel size.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if (module := self._parallelized) is not None:
            _share_generators(module.parallel.tp.call_group)  # which some trainers seed by the process

    def create_accelerator_and_postprocess(self) -> None:
        if (module := self._parallelized) is not None:
            module.tpfuse_driver = True
            _forget_layout()  # of a Trainer before, whose arguments these are too
        super().create_accelerator_and_postprocess()
        cls = type(self.accelerator)
        self.accelerator.__class__ = type(cls.__name__, (AcceleratorMixin, cls), {})
        if module is not None:
            counts = {"accelerate": self.accelerator.num_processes, "transformers": self.args.world_size}
            check_processes(module.parallel, counts)
        if module is not None and module.parallel.tp.call_size > 1:
            config: Any = import_module("accelerate").ParallelismConfig
            tp, dp = sizes_of(module.parallel)
            self.accelerator.tell(config(tp_size=tp, dp_shard_size=dp))

    @property
    def _parallelized(self) -> Parallelized | None:
        return parallelized_in(self.model)

    def _get_num_items_in_batch(self, *args: Any) -> Any:
        items, module = super()._get_num_items_in_batch(*args), self._parallelized
        # The Trainer has divided by the tensor-parallel size, and AcceleratorMixin.gather had counted nobody twice.
        return items * module.parallel.tp.call_size if module is not None and isinstance(items, torch.Tensor) else items

    # ---- checkpoints: every rank takes part ----

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self.args.should_save or self._parallelized is None:
            super()._save(output_dir, state_dict)
        else:
            self.model.save_pretrained(output_dir or self.args.output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if (module := self._parallelized) is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        step, optimizer = self.state.global_step, self.optimizer.optimizer
        save_checkpoint(Path(output_dir) / FOLDER, module, optimizer, step=step)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or (module := self._parallelized) is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        step = load_checkpoint(Path(checkpoint) / FOLDER, module, self.optimizer.optimizer)
        unsplit = step is None and (Path(checkpoint) / _OPTIMIZER).exists()
        check(
            not unsplit, f"Trainer: {checkpoint} holds the optimizer of an unsplit model; resume without {_OPTIMIZER}"
        )
        if step is not None:
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if (module := self._parallelized) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif load_checkpoint(Path(resume_from_checkpoint) / FOLDER, module) is None:
            restore(module.parallel.files, ModelDirectory(resume_from_checkpoint))  # save_only_model

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


def _share_generators(group: dist.ProcessGroup | None) -> None:
    """Gives the ranks of a group the states of the first one's random generators: what they draw for a batch, which is
    the same on all of them, is the same too."""
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    python, arrays, cpu, gpu = gather((random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda), group)[0]
    random.setstate(python)
    np.random.set_state(arrays)
    torch.set_rng_state(cpu)
    for state in gpu:
        torch.cuda.set_rng_state(state)


def _forget_layout() -> None:
    """Removes the layout of processes that an Accelerator before has left in the state that all of a process share:
    accelerate takes it for an argument of the next, and refuses it on CPUs."""
    shared = import_module("accelerate.state").AcceleratorState._shared_state
    if "parallelism_config" in shared:
        shared["parallelism_config"] = None
