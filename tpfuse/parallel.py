"""Tensor parallelism as a value: rank, size and group, passed as an argument, never global.  It pickles and
deep-copies."""

import copy
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ._version import __version__
from .kernels.runtime.errors import check
from .kernels.runtime.philox import FirstRow, RowPieces
from .kernels.runtime.processor import order_of_sums
from .kernels.runtime.rules import INTEGERS, WHOLE, check_number
from .ranks.agreement import Header, agree
from .ranks.groups import call_group, check_pieces, process_group
from .ranks.messages import channel, gather, together
from .ranks.shared_memory import host

OVERLAP = "auto", "pairwise", "off"
CP_KINDS = "auto", "heads", "keys"
PAIRS = 8  # of chunks of gathered keys' queries, at every number of ranks that divides it
BITWISE = 1, 2, 4, 8, 16, 32
TILES = 12, 24, 48, 96  # CPU kernels of GEMMs take 4, 6 or 12 rows at a time, those left over in another order


@dataclass(frozen=True, init=False)
class TensorParallel:
    """One tensor-parallel group, seen from this rank.

    ``group``: a one-dimensional DeviceMesh, a ProcessGroup, or nothing (size 1, no process group needed).
    ``sequence_parallel``: between GEMMs each rank holds 1/R of the rows (Korthikanti et al. 2022, arXiv:2205.05198);
    else all of them.  ``overlap``: hides messages behind GEMMs, and those of exchanged heads behind attention; results
    stay the same to rounding, as a GEMM of fewer rows may add in another order.  "off": not; "pairwise": tiles travel
    piece by piece while others are multiplied (gloo and NCCL groups; a ValueError elsewhere); "auto": pairwise where it
    was measured to win.

    ``one_machine``: all ranks of a gloo group are on one machine, where the cores that multiply also copy messages, so
    that "auto" hides none.

    ``bitwise``: the number V of leaves of every dimension that is split, a power of two: loss, gradients and weights
    have the same bits at every size that divides V, with and without sequence parallelism (docs/bits.md).  None: sums
    over ranks are taken in rank order.  On CPUs, of one kind, with the same instructions and number of threads; with
    ``overlap`` "off" or "auto", which then hides nothing.

    ``batch_invariant``, with ``bitwise``: the number T of rows in a tile, one of TILES.  Every forward GEMM is made in
    tiles of T rows, and attention in tiles of T queries, so that a token's logits have the same bits in training, in a
    prompt and in generation with a cache, in a batch of any size.  A small T makes tokens cheaper, a large one
    training.  None: shapes are those of the call.

    The constructor is a collective: all ranks of the group call it, with the same arguments and versions of tpfuse and
    torch, or get the same ValueError.

    ``cp``: the context-parallel ranks, mesh["cp"]: each holds a piece of every sequence, and all of the weights that
    ``group`` divides (docs/context.md).  Every rank is still given whole sequences and has whole results, and a bare
    backward() leaves complete gradients on each.  Attribute ``cp`` is those ranks; None for none, and for a group of
    one but of "keys".  ``call_group`` has the ranks of ``group`` and of ``cp``, all that make the same calls.

    ``cp_kind``: what attention exchanges over ``cp``.  "heads": each rank attends over whole sequences with a part of
    the heads; pieces are contiguous.  "keys": each gathers all keys and values; its piece is a chunk from the front of
    a sequence and one from its end, so that causal work is balanced; a group of one is kept, since its gradients of k
    and v have the bits of several ranks' (docs/context.md).  "auto": a model takes the kind that sends less, and "keys"
    where heads cannot be divided; layers on their own "heads".

    ``replicas``: the data-parallel replicas that these ranks are of, one; several of ranks that hold experts
    (:meth:`over_replicas`), replica by replica.  ``divisor``: what gradients of experts, sums over the rows of all
    replicas, are divided by.  ``axis``: the word for these ranks in an error.
    """

    rank: int
    size: int
    group_name: str | None
    sequence_parallel: bool
    overlap: str
    one_machine: bool
    bitwise: int | None
    batch_invariant: int | None
    replicas: int
    divisor: int
    axis: str
    cp: "TensorParallel | None"
    cp_kind: str
    call_group_name: str | None

    def __init__(
        self,
        group: "dist.ProcessGroup | dist.DeviceMesh | None" = None,
        *,
        sequence_parallel: bool = False,
        overlap: str = "auto",
        bitwise: int | None = None,
        batch_invariant: int | None = None,
        cp: "dist.ProcessGroup | dist.DeviceMesh | None" = None,
        cp_kind: str = "auto",
    ):
        group, context = (
            process_group(f"TensorParallel: {name}", argument, dim)
            for name, argument, dim in (("group", group, "tp"), ("cp", cp, "cp"))
        )
        context = None if context is None or (context.size() == 1 and cp_kind != "keys") else context
        backend = "" if group is None else dist.get_backend_config(group)
        rank, size, name = (0, 1, None) if group is None else (group.rank(), group.size(), group.group_name)
        messages = channel(group)

        def settle() -> None:  # compared before it is checked, so that an error is every rank's
            if messages is not None:
                options = dict(sequence_parallel=sequence_parallel, overlap=overlap, versions=versions())
                options |= {"cp": None if context is None else context.size(), "cp_kind": cp_kind}
                options |= dict(bitwise=bitwise, batch_invariant=batch_invariant)
                agree(group, Header("TensorParallel"), options | ({} if bitwise is None else order_of_sums()))
            for option, value, choices in (("overlap", overlap, OVERLAP), ("cp_kind", cp_kind, CP_KINDS)):
                check(value in choices, f"TensorParallel: {option} must be one of {', '.join(choices)}, got {value!r}")
            check(
                overlap != "pairwise" or group is None or "gloo" in backend or "nccl" in backend,
                f"TensorParallel: overlap='pairwise' needs a gloo or NCCL group, got {backend}; use 'auto'",
            )
            check(
                batch_invariant is None or (type(batch_invariant) is int and batch_invariant in TILES),
                f"TensorParallel: batch_invariant must be {_either(list(TILES))} rows, got {batch_invariant!r}",
            )
            if bitwise is not None:
                _check_leaves(bitwise, size, overlap, with_cp=context is not None)
            check(
                batch_invariant is None or bitwise is not None,
                "TensorParallel: batch_invariant needs bitwise, a number of leaves: bitwise=1 for one rank",
            )

        together(settle, [] if channel(context) is None else [context])  # whose other ranks would wait
        gloo = overlap == "auto" and "gloo" in backend
        self.__dict__.update(  # the one place where a frozen value is written
            rank=rank,
            size=size,
            group_name=name,
            sequence_parallel=sequence_parallel,
            overlap=overlap,
            one_machine=gloo and messages is not None and len(set(gather(host(), messages))) == 1,
            bitwise=bitwise,
            batch_invariant=batch_invariant,
            replicas=1,
            divisor=1,
            axis="tensor-parallel",
            cp=None,
            cp_kind=cp_kind,
            call_group_name=name,
        )
        if context is not None:
            self._divide_sequences(context)

    def _divide_sequences(self, context: dist.ProcessGroup) -> None:
        """Adds the context-parallel ranks; a collective over them and over this group."""
        name: str = context.group_name
        if channel(context) is not None:
            members = [dist.get_rank()] if self.group is None else dist.get_process_group_ranks(self.group)
            pieces = gather(members, context)
            check_pieces(pieces, context)
            fields = "sequence_parallel", "overlap", "cp_kind"
            shared = {key: getattr(self, key) for key in fields} | {"versions": versions()}
            agree(context, Header("TensorParallel", axis="context-parallel"), shared)
            if self.size > 1:
                name = call_group(context, pieces)
        cp = TensorParallel(context, sequence_parallel=self.sequence_parallel, overlap=self.overlap)
        cp.__dict__["axis"] = "context-parallel"
        self.__dict__.update(cp=cp, call_group_name=name)

    def of_kind(self, cp_kind: str) -> "TensorParallel":
        """Returns these ranks with another ``cp_kind``."""
        ranks = copy.copy(self)
        ranks.__dict__["cp_kind"] = cp_kind
        return ranks

    @staticmethod
    def over_replicas(group: dist.ProcessGroup, tp: "TensorParallel") -> "TensorParallel":
        """Returns the ranks of ``group``, which are those of ``tp``, of one replica after another, with gradients that
        are a mean over the replicas; a collective."""
        ranks = TensorParallel(group, sequence_parallel=tp.sequence_parallel, overlap="off")
        replicas = ranks.size // tp.size
        ranks.__dict__.update(replicas=replicas, divisor=replicas, axis="expert-parallel")
        return ranks

    def with_divisor(self, divisor: int) -> "TensorParallel":
        """Returns these ranks with another ``divisor``: 1 where the loss is one over all replicas."""
        ranks = copy.copy(self)
        ranks.__dict__["divisor"] = divisor
        return ranks

    @property
    def replica_ranks(self) -> list[int]:
        """The ranks of the world that stand in their replicas where this one stands in its own."""
        if self.group is None:
            return []
        step = self.size // self.replicas
        return dist.get_process_group_ranks(self.group)[self.rank % step :: step]

    @property
    def group(self) -> "dist.ProcessGroup | None":
        return None if self.group_name is None else resolve(self.group_name)

    @property
    def call_group(self) -> "dist.ProcessGroup | None":
        """The ranks that make the same calls: those of ``group`` and of ``cp``; None for one."""
        return None if self.call_group_name is None else resolve(self.call_group_name)

    @property
    def call_axis(self) -> str:
        """The word for the ranks of ``call_group`` in an error."""
        return self.axis if self.cp is None else f"tensor- and {self.cp.axis}" if self.size > 1 else self.cp.axis

    @property
    def cp_size(self) -> int:
        """The number of pieces of a sequence."""
        return 1 if self.cp is None else self.cp.size

    @property
    def cp_rank(self) -> int:
        """The index of this rank's piece of every sequence."""
        return 0 if self.cp is None else self.cp.rank

    @property
    def call_size(self) -> int:
        """The number of ranks that make the same calls."""
        return self.size * self.cp_size

    @property
    def call_rank(self) -> int:
        """The number of this rank among them."""
        return self.cp_rank * self.size + self.rank

    @property
    def _kind(self) -> str:
        """``cp_kind``, where there is something to exchange."""
        return "heads" if self.cp is None else self.cp_kind

    @property
    def cp_chunks(self) -> list[int]:
        """The chunks of a sequence, in the order of ranks: one a rank, or of "keys" one from either end."""
        n = self.cp_size
        return [*range(n)] if self._kind != "keys" else [chunk for r in range(n) for chunk in (r, 2 * n - 1 - r)]

    def piece(self, seq: int) -> int:
        """Returns the number of positions of a context-parallel rank's piece of ``seq``; the last may be padding."""
        return piece_of(seq, self.cp_size, self._kind)

    def chunks(self, seq: int, parts: int = 1) -> list[slice]:
        """Returns the chunks of this rank's piece of ``seq`` positions, each in so many equal ``parts``, without the
        padding at the end of a sequence: one with less than the first has positions is followed by none."""
        order = self.cp_chunks
        count = len(order) // self.cp_size
        size = self.piece(seq) // (count * parts)
        starts = [(chunk * parts + i) * size for chunk in order[self.cp_rank * count :][:count] for i in range(parts)]
        return [slice(min(start, seq), min(start + size, seq)) for start in starts]

    def positions(self, seq: int) -> torch.Tensor:
        """Returns this rank's piece of ``seq`` positions, int64, without padding."""
        return torch.cat([torch.arange(chunk.start, chunk.stop, device="cpu") for chunk in self.chunks(seq)])

    def first_row(self, seq: int, batch: int, *, start: int, rows: int) -> FirstRow:
        """Returns where in whole sequences, rows s * batch + b, so many rows of this rank's piece lie, from the row
        ``start`` of the piece on."""
        if self.cp is None:
            return start
        starts = [chunk.start * batch for chunk in self.chunks(seq)]
        split = self.piece(seq) * batch // len(starts) - start  # rows before the second chunk
        if len(starts) == 1 or rows <= split:
            return starts[0] + start
        return starts[1] - split if split <= 0 else RowPieces(starts[0] + start, split, starts[1])

    @property
    def row_shards(self) -> int:
        """The number of shards of the rows between GEMMs: R under sequence parallelism, else 1."""
        return self.size if self.sequence_parallel else 1

    @property
    def row_rank(self) -> int:
        """The index of this rank's shard of rows."""
        return self.rank if self.sequence_parallel else 0

    @property
    def leaves(self) -> int:
        """The number of leaves of a split dimension that are on this rank; 0 without ``bitwise``."""
        return 0 if self.bitwise is None else self.bitwise // self.size

    @property
    def all_leaves(self) -> int:
        """The number of leaves of a split dimension; without ``bitwise`` a rank's slice is one."""
        return self.size if self.bitwise is None else self.bitwise

    @property
    def row_leaves(self) -> int:
        """The number of leaves of the rows that this rank holds between GEMMs; 0 without ``bitwise``."""
        return 0 if self.bitwise is None else self.bitwise // self.row_shards

    @property
    def row_multiple(self) -> int:
        """The number that divides the count of rows: of their leaves, or else of their shards."""
        return self.row_shards if self.bitwise is None else self.bitwise

    @property
    def row_tile(self) -> int:
        """The number of rows in a tile of forward GEMMs, and of queries; 0 without ``batch_invariant``."""
        return 0 if self.batch_invariant is None else self.batch_invariant

    def divide_leaves(self, n: int, name: str) -> int:
        """Returns n / size of a dimension that leaves are of; ValueError, with what works, if n is not divisible."""
        if self.bitwise is not None and n % self.bitwise:
            works = [d for d in BITWISE if n % d == 0]
            raise ValueError(
                f"{name}={n} is not divisible by bitwise={self.bitwise} leaves; use bitwise {_either(works)}"
            )
        return self.divide(n, name)

    def divide(self, n: int, name: str) -> int:
        """Returns n / size; ValueError for an n below 0 or not an integer and, with sizes that work, not divisible."""
        if not isinstance(n, INTEGERS) or n < 0:
            check_number(name, n, WHOLE)
        if n % self.size:
            works = [d for d in range(1, min(n, 4 * self.size) + 1) if n % d == 0]
            raise ValueError(f"{name}={n} is not divisible by {self.axis} size {self.size}; use {_either(works)}")
        return n // self.size

    def rank_copies(self, copies: int) -> int:
        """Returns how many consecutive ranks have the same slice where ``copies`` consecutive leaves have."""
        return max(1, copies // max(self.leaves, 1))

    def chunk(self, n: int, name: str = "size", copies: int = 1) -> tuple[int, int]:
        """Returns (start, stop) of this rank's slice, split as by torch.chunk.  ValueError if a rank gets nothing.

        ``copies`` consecutive leaves, without ``bitwise`` ranks, have the same slice.  With ``bitwise`` a slice is of
        whole leaves, each of ceil(n / bitwise), so that those of one split are joined by another.
        """
        ranks = self.rank_copies(copies)
        size, rank = self.size // ranks, self.rank // ranks
        step = self.slice_size(n, name, copies)
        if step * (size - 1) >= n:
            raise ValueError(
                f"{name}={n} leaves a rank of tensor-parallel size {self.size} with nothing; use a smaller size"
            )
        return rank * step, min(n, (rank + 1) * step)

    def slice_size(self, n: int, name: str = "size", copies: int = 1) -> int:
        """Returns the number of elements in a rank's slice of n (:meth:`chunk`), of which the last ranks may have
        fewer."""
        if self.bitwise is None:
            return -(-n // (self.size // copies))
        return self.leaf(n, name, copies) * max(1, self.leaves // copies)

    def leaf(self, n: int, name: str = "size", copies: int = 1) -> int:
        """Returns the size of a leaf of n elements, the last perhaps less; ValueError if one would have none."""
        assert self.bitwise is not None
        different = self.bitwise // copies
        step = -(-n // different)
        if step * (different - 1) >= n:
            works = [d for d in BITWISE if -(-n // d) * (d - 1) < n]
            raise ValueError(
                f"{name}={n} leaves one of bitwise={self.bitwise} leaves empty; use bitwise {_either(works)}"
            )
        return step

    def agree(self, name: str, values: Mapping[str, Any]) -> None:
        """Compares ``values`` over the ranks of ``call_group``; if they differ, raises one ValueError with all values
        on every rank.

        "NAME: KEY must be the same on every tensor-parallel rank, got rank 0: ...".  Each rank calls it.
        """
        agree(self.call_group, Header(name, axis=self.call_axis), values)


def pairs_of(ranks: int) -> int:
    """Returns the number of pairs of chunks of a sequence whose keys so many ranks gather: PAIRS, or a pair a rank."""
    return PAIRS if PAIRS % ranks == 0 else ranks


def piece_of(seq: int, ranks: int, cp_kind: str) -> int:
    """Returns the number of positions in each of the pieces of a sequence of ``seq``, which are of whole chunks."""
    pairs = pairs_of(ranks)
    return 2 * -(-seq // (2 * pairs)) * pairs // ranks if cp_kind == "keys" else -(-seq // ranks)


def _check_leaves(bitwise: int, size: int, overlap: str, *, with_cp: bool) -> None:
    """Raises ValueError for a number of leaves that cannot be used so."""
    check(
        type(bitwise) is int and bitwise in BITWISE,
        f"TensorParallel: bitwise must be a power of two from 1 to {BITWISE[-1]}, got {bitwise!r}",
    )
    check(overlap != "pairwise", "TensorParallel: overlap='pairwise' adds in another order than bitwise; use 'off'")
    check(not with_cp, f"TensorParallel: cp= is not built for bitwise={bitwise}; leave one of them off")
    works = [d for d in BITWISE if bitwise % d == 0]
    check(
        bitwise % size == 0,
        f"TensorParallel: bitwise={bitwise} leaves are not divisible by tensor-parallel size {size}; use size"
        f" {_either(works)}",
    )


def resolve(group_name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]  # torch's NewType of str


def versions() -> str:
    """Returns the versions that must agree for ranks to compute the same, of this package with a checksum of its
    sources: two machines may have other ones under one number."""
    return f"tpfuse {__version__} #{_sources()}, torch {torch.__version__}"


@functools.cache
def _sources() -> str:
    root, digest = Path(__file__).parent, hashlib.blake2b(digest_size=4)
    for path in sorted(path for kind in ("*.py", "*.json") for path in root.rglob(kind)):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _either(values: list[int]) -> str:
    *most, final = map(str, values)
    return f"{', '.join(most)} or {final}" if most else final
