"""The graph of ops of a stack of transformer blocks: flops, bytes and parameters of each, and the ops it reads.

The counts are those of one forward and one backward pass over the whole, before anything is split:

    kind        flops       bytes moved        which are, forward | backward
    linear      6 M W       3 (in + out)       x, y | twice dy, x again, dx; the weights' own, 3 W, are apart
    attention   12 M S H E  3 (in + out)       q, k, v, o | q, k, v, o, do, and dq, dk, dv: scores stay on the chip
    norm        0           3 in + 2 out       x, y | x, dy, dx
    activation  0           3 in + 2 out       x, y | x, dy, dx
    add         0           8 out              branch, residual, sum | dy, branch's dx; and where the residual forks,
                                               two gradients and their sum

M rows, S positions, W elements of a weight, H heads of width E; flops as of model_flops (all keys, causal or not).
"""

from typing import NamedTuple

from ....kernels.runtime.errors import check
from ...ledger.memory import OPTIMIZERS
from ...ledger.shapes import Shape
from ..split import Job

LINEAR, ATTENTION, NORM, ACTIVATION, ADD = "linear", "attention", "norm", "activation", "add"
OPS = 10  # of a block


class Tensor(NamedTuple):
    """An activation [batch, seq, width] of ``size`` bytes; ``units``: equal parts that its width can be cut into, such
    as heads."""

    batch: int
    seq: int
    units: int
    size: int


class BlockOp(NamedTuple):
    """An op: ``flops`` and ``moved`` bytes of forward and backward, elements of its ``weights``, and the indices of the
    ops whose outputs it reads."""

    name: str
    kind: str
    flops: int
    moved: int
    weights: int
    output: Tensor
    inputs: tuple[int, ...]


class Graph(NamedTuple):
    """The ops of some blocks.  ``element``: bytes of an element of weights and activations.  ``state``: bytes of a
    parameter with its gradient and optimizer states, summed over all blocks of the model that are laid out alike."""

    ops: tuple[BlockOp, ...]
    element: int
    state: float

    def read(self, op: BlockOp) -> Tensor:
        """Returns the tensor that an op reads; both are alike where it reads two."""
        return self.ops[op.inputs[0]].output


def stack(job: Job, blocks: int = 1) -> Graph:
    """Returns the ops of ``blocks`` blocks, of which the last one's output enters the first: the whole stack is these
    over and over.

    ``job.batch``: sequences that the whole mesh runs at once.  Biases of linear layers are left out.  ValueError for
    blocks that are not a norm before attention and one before the MLP, one after the other.
    """
    c, s = job.config, Shape.of(job.config)
    for name, usual in (("post_norm", False), ("parallel_residual", False), ("branch_norm", False), ("pre_norm", True)):
        found = getattr(c, name, usual)
        check(found == usual, f"plan: layouts are of pre-norm blocks, attention before the MLP; got {name}={found}")
    check(blocks >= 1, f"plan: blocks must be a positive integer, got {blocks}")
    check(job.batch >= 1 and job.seq >= 1, f"plan: batch and seq must be positive, got {job.batch} and {job.seq}")
    rows, element = job.batch * job.seq, job.dtype.itemsize
    tensor = lambda width, units: Tensor(job.batch, job.seq, units, rows * width * element)
    h, qkv, heads = tensor(s.D, s.D), tensor(s.qkv, s.G), tensor(s.H * s.E, s.H)
    wide, narrow = tensor(s.ffn_in, s.F), tensor(s.F, s.F)
    vectors = s.D * (2 if c.norm == "layer" and c.norm_bias else 1)
    ops: list[BlockOp] = []
    for k in range(blocks):
        first = OPS * k
        before = (first - 1) % (OPS * blocks)
        rest = [  # name, kind, parameters, output, inputs
            ("norm 1", NORM, vectors, h, (before,)),
            ("qkv", LINEAR, s.D * s.qkv, qkv, (first,)),
            ("attention", ATTENTION, 0, heads, (first + 1,)),
            ("out", LINEAR, s.H * s.E * s.D, h, (first + 2,)),
            ("add 1", ADD, 0, h, (first + 3, before)),
            ("norm 2", NORM, vectors, h, (first + 4,)),
            ("fc 1", LINEAR, s.D * s.ffn_in, wide, (first + 5,)),
            ("activation", ACTIVATION, 0, narrow, (first + 6,)),
            ("fc 2", LINEAR, s.F * s.D, h, (first + 7,)),
            ("add 2", ADD, 0, h, (first + 8, first + 4)),
        ]
        sources = {first + i: output for i, (_, _, _, output, _) in enumerate(rest)} | {before: h}
        for name, kind, weights, output, inputs in rest:
            flops = {LINEAR: 6 * rows * weights, ATTENTION: 12 * rows * job.seq * s.H * s.E}.get(kind, 0)
            moved = _moved(kind, sources[inputs[0]].size, output.size)
            name = f"{k}.{name}" if blocks > 1 else name
            ops.append(BlockOp(name, kind, flops=flops, moved=moved, weights=weights, output=output, inputs=inputs))
    return Graph(tuple(ops), element, (2 * element + OPTIMIZERS[job.optimizer](element)) * s.L / blocks)


def _moved(kind: str, read: int, written: int) -> int:
    if kind in (LINEAR, ATTENTION):
        return 3 * (read + written)
    return 8 * written if kind == ADD else 3 * read + 2 * written
