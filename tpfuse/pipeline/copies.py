"""Parameters that two ranks of a pipeline hold, and the sum of their gradients; those that no replica shares."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..layers.shards import named_specs


def copied(staged: Any) -> list[nn.Parameter]:
    """Returns the parameters that the opposite rank holds too: all of a second chain's, or a tied embedding."""
    return [p for name, p in staged.named_parameters() if staged.stages.copies_of(name) == 2]


def divided_among_replicas(staged: Any) -> set[nn.Parameter]:
    """Returns the experts' parameters of which each replica holds others, with gradients of the rows of all."""
    placed = zip(named_specs(staged), staged.parameters(), strict=True)
    return {p for (*_, ranks), p in placed if ranks.replicas > 1}


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
