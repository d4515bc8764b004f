"""Dropout on its own.  Its error is taken against torch with the same mask."""

import torch.nn.functional as F

from bench.harness import Bench, Random, acc
from tpfuse.kernels import dropout
from tpfuse.kernels.runtime.philox import Mask, keep_rows, scale


def inputs(random: Random, M: int, D: int) -> tuple:
    return random(M, D), random.rng()


def tpfuse(x, rng, p):
    return dropout(x, p, rng=rng)


def torch(x, rng, p):
    return F.dropout(x, p)


def exact(x, rng, p):
    return (acc(x) * keep_rows(Mask(rng, p), *x.shape, acc(x).dtype) * scale(p)).to(x.dtype)


BENCH = Bench(
    name="dropout",
    axes=("M", "D"),
    shapes=((8192, 1024), (8192, 4096), (8192, 16384)),
    cpu_shapes=((2048, 768),),
    inputs=inputs,
    providers=dict(tpfuse=tpfuse, torch=torch),
    p=0.1,
    exact=exact,
)
