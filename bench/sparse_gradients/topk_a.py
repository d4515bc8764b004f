"""TopkA: every rank's own largest entries, gathered and added up by all; what Ok-Topk is compared with."""

import torch
import torch.distributed as dist

from tpfuse.training.ok_topk.entries import largest


class TopkA:
    """A hook's state: ``density`` of each bucket's entries are sent, 2 k (P - 1) words a rank; the rest is kept."""

    def __init__(self, density: float, group: dist.ProcessGroup):
        self.density, self.group = density, group
        self.residuals: dict[int, torch.Tensor] = {}

    def __call__(self, bucket: dist.GradBucket) -> torch.Tensor:
        x = bucket.buffer()
        residual = self.residuals.get(bucket.index())
        if residual is None or len(residual) != len(x):
            residual = torch.zeros_like(x)
        residual = self.residuals[bucket.index()] = residual + x
        k = max(1, round(self.density * len(x)))
        mine, _ = largest(residual, k)
        residual[mine.index] = 0
        index, value = torch.zeros(k, dtype=torch.int32), x.new_zeros(k)
        index[: len(mine)], value[: len(mine)] = mine.index.int(), mine.value
        size = self.group.size()
        indices = [torch.empty_like(index) for _ in range(size)]
        values = [torch.empty_like(value) for _ in range(size)]
        dist.all_gather(indices, index, group=self.group)
        dist.all_gather(values, value, group=self.group)
        x.zero_()
        for i, v in zip(indices, values, strict=True):  # in rank order
            x.index_add_(0, i.long(), v)
        return x.div_(size)


def topk_a_hook(state: TopkA, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(state(bucket))
    return future
