"""What a rank holds of a model apart from activations, and how long its optimizer takes: by parameter counts."""

from collections.abc import Sequence

from ..ledger.aten import ELEMENTWISE
from ..ledger.memory import OPTIMIZERS, State
from ..ledger.recorder import FORWARD, Entry
from .devices import AnyDevice
from .split import Job, Pieces, Split


def rank_parameters(pieces: Pieces, stages: Sequence[range]) -> float:
    """Returns the elements of a rank that holds the blocks ``stages``, before FSDP."""
    return sum(piece.parameters for layers in stages for piece in pieces.stage(layers))


def rank_state(pieces: Pieces, stages: Sequence[range], job: Job, split: Split) -> State:
    """Returns the bytes of a rank that holds the blocks ``stages``, as of ``ledger.state_bytes``.

    The same numbers, but for what FSDP pads: it cuts every parameter by its first dimension.  Buckets are DDP's, which
    a pipeline does not have.
    """
    size, elements = job.dtype.itemsize, rank_parameters(pieces, stages)
    blocks = [size * pieces.blocks[layer].parameters for layers in stages for layer in layers]
    whole = size * elements
    share = whole / split.dp if split.sharded else whole
    replicas = split.dp > 1
    gathered = sum(sorted([*blocks, whole - sum(blocks)])[-2:]) if split.sharded and replicas else 0
    return State(
        parameters=round(share),
        gradients=round(share),
        optimizer=round(share * OPTIMIZERS[job.optimizer](size) / size),
        buckets=round(whole) if replicas and not split.sharded and split.pp == 1 else 0,
        gathered=round(gathered),
    )


def optimizer_seconds(elements: float, job: Job, split: Split, device: AnyDevice) -> float:
    """Returns the seconds of an optimizer's step over ``elements`` of a rank, before FSDP: one pass through memory that
    reads parameters, gradients and states and writes parameters and states."""
    size = job.dtype.itemsize
    states, own = OPTIMIZERS[job.optimizer](size), round(elements / split.dp if split.sharded else elements)
    read, written = own * (2 * size + states), own * (size + states)
    step = Entry(job.optimizer, ELEMENTWISE, FORWARD, read, written, read + written, flops=0)
    return device.seconds(step, job.dtype)
