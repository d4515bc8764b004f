"""Parameters that two ranks of a pipeline hold, and the sum of their gradients."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import listed
from ..ranks.agreement import digest, gather_number
from ..ranks.messages import gather


def copied(staged: Any) -> dict[str, nn.Parameter]:
    """Returns the parameters that the opposite rank holds too, by name: all of a second chain's, or a tied
    embedding."""
    return {name: p for name, p in staged.named_parameters() if staged.stages.copies_of(name) == 2}


def compare_copies(name: str, trained: Iterable[str], group: dist.ProcessGroup) -> None:
    """Compares the names of the copies that each rank of the pipeline trains; every rank calls it.

    ValueError of ``name`` on every rank where one is frozen on one of the two that hold it.
    """
    trained = sorted(trained)
    numbers = gather_number(group, f"{name}, copies", digest(trained))
    if numbers != numbers[::-1]:
        every = [set(names) for names in gather(trained, group)]
        differing = sorted(set().union(*(a ^ b for a, b in zip(every, reversed(every), strict=True))))
        check(
            not differing,
            f"{name}: two ranks of the pipeline hold {listed(differing)}, which is frozen on one of them and trained on"
            " the other; freeze it on both, or on neither",
        )


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
