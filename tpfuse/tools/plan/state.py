"""What a rank holds of a model apart from activations, and how long its optimizer takes: by parameter counts."""

from collections.abc import Sequence

from ..ledger.aten import ELEMENTWISE
from ..ledger.memory import OPTIMIZERS, State
from ..ledger.recorder import FORWARD, Entry
from .devices import AnyDevice
from .split import Job, Piece, Pieces, Split


def rank_parameters(pieces: Pieces, stages: Sequence[range]) -> float:
    """Returns the elements of a rank that holds the blocks ``stages``, before FSDP."""
    return sum(piece.parameters for layers in stages for piece in pieces.stage(layers))


def piece_share(piece: Piece, dp: int) -> float:
    """Returns the elements of a piece that FSDP over ``dp`` ranks leaves the first: of each parameter's rows a share
    that is rounded up; an even cut where they are not known."""
    if not piece.sizes:
        return piece.parameters / dp
    return sum(count * -(-rows // dp) * columns for (rows, columns), count in piece.sizes.items())


def rank_share(pieces: Pieces, stages: Sequence[range], split: Split) -> float:
    """Returns the elements of a rank after FSDP."""
    if not split.sharded:
        return rank_parameters(pieces, stages)
    return sum(piece_share(piece, split.dp) for layers in stages for piece in pieces.stage(layers))


def rank_state(pieces: Pieces, stages: Sequence[range], job: Job, split: Split) -> State:
    """Returns the bytes of a rank that holds the blocks ``stages``: the same as of ``ledger.state_bytes``.

    Buckets are DDP's, which a pipeline does not have.
    """
    size, elements = job.dtype.itemsize, rank_parameters(pieces, stages)
    blocks = [size * pieces.blocks[layer].parameters for layers in stages for layer in layers]
    whole = size * elements
    share = size * rank_share(pieces, stages, split)
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
    """Returns the seconds of an optimizer's step over ``elements`` of a rank, which FSDP cuts evenly: one pass through
    memory that reads parameters, gradients and states and writes parameters and states."""
    size = job.dtype.itemsize
    states, own = OPTIMIZERS[job.optimizer](size), round(elements / split.dp if split.sharded else elements)
    read, written = own * (2 * size + states), own * (size + states)
    step = Entry(job.optimizer, ELEMENTWISE, FORWARD, read=read, written=written, least=read + written, flops=0)
    return device.seconds(step, job.dtype)
