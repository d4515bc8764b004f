"""Ring attention (Liu et al. 2023, arXiv:2310.01889) over head-tail chunks, of torch's own attention on a CPU: what
"heads" and "keys" are timed beside.

A rank has the chunks r and 2 C - 1 - r of 2 C.  Keys and values travel from rank to rank; every rank attends to what
has come, and merges by the log of the sums.  In backward the gradients of keys and values travel on with them, in fp32.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Block:
    """The queries and keys of one turn that see each other: slices of a piece, and whether causally."""

    def __init__(self, rank: int, source: int, rows: int):
        half = rows // 2
        self.causal = rank == source
        self.queries = slice(half, rows) if source > rank else slice(0, rows)  # later keys: the tail alone sees them
        self.keys = slice(0, half) if source < rank else slice(0, rows)  # earlier ones: their head is seen


class RingAttention(torch.autograd.Function):
    """q [B, H, n, E], k and v [B, G, n, E] of this rank's two chunks -> o [B, H, n, E], causal."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, size, (B, H, n, _) = dist.get_rank(), dist.get_world_size(), q.shape
        o, lse = torch.zeros_like(q), q.new_full((B, H, n), -torch.inf)
        travelling = torch.stack((k, v))
        for turn in range(size):
            block = Block(rank, (rank - turn) % size, n)
            k_t, v_t = (t[:, :, block.keys].repeat_interleave(H // k.shape[1], 1) for t in travelling)
            part, part_lse = _FORWARD(q[:, :, block.queries], k_t, v_t, 0.0, block.causal)
            sums, o_t = lse[:, :, block.queries], o[:, :, block.queries]
            total = torch.logaddexp(sums, part_lse)
            o_t.mul_((sums - total).exp()[..., None]).add_(part * (part_lse - total).exp()[..., None])
            sums.copy_(total)
            travelling = _shifted(travelling) if turn < size - 1 else travelling
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (q, k, v, o, lse), do = ctx.saved_tensors, do.contiguous()
        rank, size, (_, H, n, _), G = dist.get_rank(), dist.get_world_size(), q.shape, k.shape[1]
        dq, travelling = torch.zeros_like(q), torch.stack((k, v))
        gradients = torch.zeros(travelling.shape, dtype=torch.float32)
        for turn in range(size):
            block = Block(rank, (rank - turn) % size, n)
            k_t, v_t = (t[:, :, block.keys].repeat_interleave(H // G, 1) for t in travelling)
            mine = (t[:, :, block.queries] for t in (do, q))
            do_t, q_t = mine
            dq_t, *dkv = _BACKWARD(
                do_t, q_t, k_t, v_t, o[:, :, block.queries], lse[:, :, block.queries], 0.0, block.causal
            )
            dq[:, :, block.queries] += dq_t
            for total, gradient in zip(gradients, dkv, strict=True):
                total[:, :, block.keys] += gradient.unflatten(1, (G, -1)).sum(2)
            travelling = _shifted(travelling) if turn < size - 1 else travelling
            gradients = _shifted(gradients)
        return dq, *gradients.to(k.dtype).unbind()


def _shifted(x: Tensor) -> Tensor:
    """Sends x to the next rank, and returns that of the one before."""
    rank, size, received = dist.get_rank(), dist.get_world_size(), torch.empty_like(x)
    sends = dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, received, (rank - 1) % size)
    for handle in dist.batch_isend_irecv([*sends]):
        handle.wait()
    return received
