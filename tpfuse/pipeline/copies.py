"""Parameters that two ranks of a pipeline hold, and the sum of their gradients."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def copied(staged: Any) -> list[nn.Parameter]:
    """Returns the parameters that the opposite rank holds too: all of a second chain's, or a tied embedding."""
    return [p for name, p in staged.named_parameters() if staged.stages.copies_of(name) == 2]


def sum_copies(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Adds the gradients of the opposite rank's copies to these; both get the same bits, as a + b == b + a."""
    peer, gradients = group.size() - 1 - group.rank(), [g for g in gradients if g.numel()]
    received = [torch.empty_like(g) for g in gradients]
    ops = [dist.P2POp(dist.isend, g.contiguous(), group=group, group_peer=peer) for g in gradients]
    ops += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for x in received]
    for message in dist.batch_isend_irecv(ops) if ops else []:
        message.wait()
    for g, x in zip(gradients, received, strict=True):
        g.add_(x)
