"""Causal attention with dropout on the fused qkv; B batch, S positions, H query heads, G kv heads, E width.

torch takes q, k, v as views where H = G; grouped query heads lie unevenly, which makes it copy q.  "flash" is SDPA's
flash backend alone.
"""

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ....kernels import attention
from ..definition import Bench, Random


def inputs(random: Random, B: int, S: int, H: int, G: int, E: int) -> tuple[Tensor, ...]:
    if H % G:
        raise ValueError(f"attention: H = {H} query heads are not divisible by G = {G} kv heads")
    return random(S * B, G, H // G + 2, E).detach().view(S, B, G, H // G + 2, E).requires_grad_(), random.rng()


def tpfuse(qkv: Tensor, rng: Tensor, p: float) -> Tensor:
    return attention(qkv.flatten(0, 1), batch=qkv.shape[1], causal=True, p=p, rng=rng).view(
        *qkv.shape[:2], -1, qkv.shape[-1]
    )


def torch(qkv: Tensor, rng: Tensor, p: float) -> Tensor:
    q, k, v = qkv.split((qkv.shape[3] - 2, 1, 1), 3)
    q, k, v = (t.flatten(2, 3).permute(1, 2, 0, 3) for t in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=q.shape[1] > k.shape[1])
    return o.permute(2, 0, 1, 3)


def flash(qkv: Tensor, rng: Tensor, p: float) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch(qkv, rng, p)


BENCH = Bench(
    name="attention",
    axes=("B", "S", "H", "G", "E"),
    shapes=((8, 512, 16, 16, 64), (4, 2048, 16, 16, 128), (2, 4096, 32, 8, 128)),
    cpu_shapes=((4, 512, 6, 6, 64),),
    inputs=inputs,
    providers=dict(tpfuse=tpfuse, torch=torch, flash=flash),
    p=0.1,
)
