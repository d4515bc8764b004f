"""The graph of ops of a stack of transformer blocks: flops, bytes and parameters of each, and the ops it reads.

The counts are those of one forward and one backward pass over the whole, before anything is split:

    kind        flops       bytes moved        which are, forward | backward
    linear      6 M W       3 (in + out)       x, y | twice dy, x again, dx; the weights' own, 3 W, are apart
    attention   12 M S H E  3 (in + out)       q, k, v, o | q, k, v, o, do, and dq, dk, dv: scores stay on the chip
    norm        0           3 in + 2 out       x, y | x, dy, dx
    activation  0           3 in + 2 out       x, y | x, dy, dx
    add         0           8 out              branch, residual, sum | dy, branch's dx; and at the fork of the residual
                                               that each add joins, two gradients and their sum

The ops and their inputs follow the block's wiring (tpfuse/layers/wiring.py); each norm is an op of its own.  M
rows, S positions, W elements of a weight, H heads of width E; flops as of model_flops (all keys, causal or not).
"""

from typing import NamedTuple

from ....kernels.runtime.errors import check
from ....layers.wiring import WIRINGS, Branch, Norm, Steps
from ...ledger.memory import BY_ELEMENTS
from ...ledger.shapes import Shape
from ..split import Job

LINEAR, ATTENTION, NORM, ACTIVATION, ADD = "linear", "attention", "norm", "activation", "add"
ENTRY = -1  # as an input: the stream that enters a block
_BRANCHES = {
    "attention": (("qkv", LINEAR), ("attention", ATTENTION), ("out", LINEAR)),
    "mlp": (("fc 1", LINEAR), ("activation", ACTIVATION), ("fc 2", LINEAR)),
}


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


class _Node(NamedTuple):
    """An op of any block: name, kind, and the indices of its inputs in the block; ENTRY: the stream that enters it."""

    name: str
    kind: str
    inputs: tuple[int, ...]


def block_nodes(steps: Steps) -> list[_Node]:
    """Returns the ops of a block that runs ``steps``; the last one's output is the stream that leaves it."""
    nodes: list[_Node] = []
    stream, reads, output = ENTRY, dict[str | None, int](), ENTRY

    def add(kind: str, *inputs: int, name: str | None = None) -> int:
        count = 1 + sum(node.kind == kind for node in nodes)
        nodes.append(_Node(name or f"{kind} {count}", kind, inputs))
        return len(nodes) - 1

    for step in steps:
        if isinstance(step, Norm):
            reads[step.to] = add(NORM, stream)
        elif isinstance(step, Branch):
            output = reads.pop(step.name, stream)
            for name, kind in _BRANCHES[step.name]:
                output = add(kind, output, name=name)
        else:
            output = output if step.branch_norm is None else add(NORM, output)
            stream = add(ADD, output, stream)
            reads[step.to] = stream if step.norm is None else add(NORM, stream)
            stream = reads[step.to] if step.stream else stream
    assert stream == len(nodes) - 1
    return nodes


def stack(job: Job, blocks: int = 1) -> Graph:
    """Returns the ops of ``blocks`` blocks, of which the last one's output enters the one at the front: the model is
    these over and over.

    ``job.batch``: sequences that the whole mesh runs at once.  Biases of linear layers are left out.  ValueError for
    numbers that are not positive.
    """
    c, (s, *_) = job.config, Shape.kinds(job.config)
    for shape in Shape.kinds(c):
        if shape.experts is not None:
            count = shape.experts.num_experts
            raise ValueError(f"layouts: experts have one layout, by expert, got num_experts={count}")
    check(blocks >= 1, f"plan: blocks must be a positive integer, got {blocks}")
    check(job.batch >= 1 and job.seq >= 1, f"plan: batch and seq must be positive, got {job.batch} and {job.seq}")
    rows, element = job.batch * job.seq, job.dtype.itemsize
    tensor = lambda width, units: Tensor(job.batch, job.seq, units, rows * width * element)
    h, vectors = tensor(s.D, s.D), s.D * (2 if c.norm == "layer" and c.norm_bias else 1)
    shapes = {  # elements of weights, output; by name or by kind
        "qkv": (s.D * s.qkv, tensor(s.qkv, s.G)),
        "attention": (0, tensor(s.H * s.E, s.H)),
        "out": (s.H * s.E * s.D, h),
        "fc 1": (s.D * s.ffn_in, tensor(s.ffn_in, s.F)),
        "activation": (0, tensor(s.F, s.F)),
        "fc 2": (s.F * s.D, h),
        NORM: (vectors, h),
        ADD: (0, h),
    }
    nodes, ops = block_nodes(WIRINGS[c.wiring]), list[BlockOp]()
    shaped = [shapes.get(node.name) or shapes[node.kind] for node in nodes]
    for k in range(blocks):
        for (name, kind, inputs), (weights, output) in zip(nodes, shaped):
            read = h if inputs[0] == ENTRY else shaped[inputs[0]][1]
            flops = {LINEAR: 6 * rows * weights, ATTENTION: 12 * rows * job.seq * s.H * s.E}.get(kind, 0)
            moved, name = _moved(kind, read.size, output.size), f"{k}.{name}" if blocks > 1 else name
            sources = tuple((k * len(nodes) + i) % (blocks * len(nodes)) for i in inputs)
            ops.append(BlockOp(name, kind, flops=flops, moved=moved, weights=weights, output=output, inputs=sources))
    return Graph(tuple(ops), element, (2 * element + BY_ELEMENTS[job.optimizer](element)) * s.L / blocks)


def _moved(kind: str, read: int, written: int) -> int:
    if kind in (LINEAR, ATTENTION):
        return 3 * (read + written)
    return 8 * written if kind == ADD else 3 * read + 2 * written
