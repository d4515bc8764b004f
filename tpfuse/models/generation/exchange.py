"""Messages of generation: all-gathers and sums, through memory that the ranks of one machine share."""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from ...collectives import all_gather, all_reduce, summed
from ...kernels.runtime.op import acc_dtype
from ...parallel import TensorParallel, resolve
from ...ranks.failure import named
from ...ranks.shared_memory import SharedMemory, shared_memory
from ...ranks.turns import ROOM


class Exchange(NamedTuple):
    """Messages of generation: read where they lie in shared memory where there is room, else the group's."""

    tp: TensorParallel
    memory: SharedMemory | None

    def gather(self, x: Tensor) -> Tensor:
        """All-gathers [...] -> [R, ...], valid until the next call begins (:meth:`.SharedMemory.view_all`)."""
        if self.memory is None or x.numel() * x.element_size() > ROOM:
            return all_gather(x.contiguous(), self.tp.size, self.tp.group_name)
        with named("all_gather", resolve(cast(str, self.tp.group_name))):
            return self.memory.view_all(x)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, as :func:`summed` takes it."""
        if self.memory is None or x.numel() * x.element_size() > ROOM:
            return all_reduce(x, self.tp)
        parts = self.gather(x)
        # Additions of two parts, or of fp32, are the sum in fp32: fewer calls of torch than the op's.
        if len(parts) > 2 and (self.tp.bitwise is not None or acc_dtype(parts) != parts.dtype):
            return summed(parts, self.tp)
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        return total


def exchange(tp: TensorParallel, device: torch.device) -> Exchange:
    """Returns a group's messages for tensors of a device.  Each rank calls it; the first call makes the memory."""
    return Exchange(tp, shared_memory(tp.group) if device.type == "cpu" else None)
