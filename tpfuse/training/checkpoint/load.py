"""load_checkpoint: latest -> meta.json -> shards -> state; nothing changes before every rank has read everything."""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ...kernels.runtime.rules import listed
from ...layers.shards import named_buffers
from ...pipeline.delays import Pending, delay_of
from ...ranks.shared_memory import host
from ..ok_topk import OkTopk
from . import background as thread
from . import state, version1
from .conditions import check_adapters, check_config, conditions, warn_of_differences
from .errors import named
from .folder import META, SAVING, read_latest, warn_of_newer
from .hooks import HookState, Reading, put_hook, read_hook
from .meta import Meta, files_of, has_contents, opened, read_text
from .pending import check_pending, ranks_without, read_pending
from .pieces import BUFFER, Sources, Stored, check_apart, check_count, fill
from .ranks import Ranks, all_ranks
from .shards import DTYPES, ShardReader, TensorEntry, parts, verify
from .stages import held_elsewhere


def load_checkpoint(
    directory: str | Path,
    model: nn.Module,
    optimizer: state.Optimizers | None = None,
    *,
    hook: OkTopk | None = None,
) -> tuple[int, Any] | None:
    """Restores the latest checkpoint in place; returns (step, extra), or None where there is none.

    ``directory`` is the folder that checkpoints are saved in, or one checkpoint in it, as save_checkpoint returns it.

    The tensor-parallel, data-parallel and pipeline-parallel sizes and the schedule may differ from those that wrote it.
    ``optimizer``: one, or a list in the order in which they were saved.  Without it only the model is restored, and
    without ``hook`` no communication hook's residuals, of which a warning tells; at another number of replicas each
    residual is the mean of those that were saved.  Every file's checksum is compared.  Warnings say what else is not as
    it was and decides the last bits: versions, processor, threads, sizes, schedule, overlap, dtype.

    A gradient that waits, of training with gradients one step late, goes on waiting in what delays those of ``model``.

    ValueError where the format, the parameters' names or shapes, the model's config, or the optimizer's class or groups
    are not the checkpoint's, and for a gradient that waits where nothing delays the model's; OSError where a file is
    missing or damaged: the same on every rank, before anything changes.
    """
    with named("load_checkpoint"):
        thread.settle()
        directory, model, ranks = Path(directory), state.unwrap(model), all_ranks()
        thread.raise_earlier(directory, ranks)
        latest = ranks.on_first(lambda: _find(directory))
        if latest is None:
            ranks.together(lambda: _check_none(directory))
            return None
        path, raw = directory / latest[0], latest[1]
        ranks.together(lambda: _check_same(path / META, raw))
        checkpoint = _Checkpoint(path, opened(path / META, raw), ranks)
        old = checkpoint.meta["version"] == 1
        if path != directory:
            ranks.on_first(lambda: warn_of_newer(path))
        if old and ranks.rank == 0:
            version1.warn(path)
        entries = state.entries_of(model)
        optimizers = ranks.together(lambda: state.as_tuple(optimizer))
        wanted = _Wanted(model, entries, held_elsewhere(ranks, model, entries), optimizers, hook=hook)
        ready = (_read_1 if old else _read)(checkpoint, wanted)
        if ranks.rank == 0:
            _warn_of_buffers(checkpoint, wanted)
        _put(checkpoint.meta, ready, model, optimizers)
        put_hook(hook, ready.hook)
        if not old and ranks.rank == 0:
            warn_of_differences(path, checkpoint.meta["conditions"], conditions(model))
        return checkpoint.meta["step"], checkpoint.meta["extra"]


class _Checkpoint(NamedTuple):
    """A checkpoint, and the ranks that read it."""

    path: Path
    meta: Meta
    ranks: Ranks


class _Wanted(NamedTuple):
    """The model and optimizer that a checkpoint is read for."""

    model: nn.Module
    entries: state.Entries
    elsewhere: set[str]  # the model's tensors that other pipeline stages hold
    optimizers: tuple[torch.optim.Optimizer, ...]
    hook: OkTopk | None


class _LoadedState(NamedTuple):
    """Everything that was read, in tensors of its own."""

    model: state.Values
    optimizer: state.OptimizerState
    hook: HookState | None
    pending: Pending | None


def _find(directory: Path) -> tuple[str, bytes] | None:
    """Returns the latest checkpoint's name in ``directory``, "" where that is a checkpoint, and its meta.json.

    OSError for a directory that is none, and for a checkpoint that was never finished.
    """
    if directory.exists() and not directory.is_dir():
        raise OSError(f"{directory} is a file, and not a folder of checkpoints")
    if (directory / SAVING).exists():
        raise OSError(f"{directory} is a checkpoint that was not finished")
    name = "" if (directory / META).exists() else read_latest(directory)
    return None if name is None else (name, read_text(directory / name / META))


def _check_none(directory: Path) -> None:
    """OSError where this rank sees a checkpoint and rank 0 sees none."""
    if _find(directory) is not None:
        raise OSError(
            f"{directory} of {host()[0]} has a checkpoint, and rank 0 sees none: all ranks must share one folder"
        )


def _check_same(path: Path, raw: bytes) -> None:
    """OSError where this rank does not see the checkpoint that rank 0 reads."""
    if not has_contents(path, raw):
        raise OSError(f"{path} of {host()[0]} is not the file that rank 0 reads: all ranks must share one folder")


def _check(checkpoint: _Checkpoint, stock: state.Stock, wanted: _Wanted, without: Sequence[int] = ()) -> None:
    """ValueError where the checkpoint is not of this model and optimizer.  ``without``: of :func:`ranks_without`."""
    path, meta = checkpoint.path, checkpoint.meta
    state.check_model(path, wanted.model, stock, wanted.elsewhere)
    if meta["version"] != 1:
        check_config(path, meta["config"], wanted.model)
        check_adapters(path, meta.get("adapters") or {}, wanted.model)
    if wanted.optimizers:
        kind = state.kinds_of(wanted.optimizers)
        if meta.get("optimizer", kind) != kind:
            written = meta["optimizer"][:60] or "none"
            raise ValueError(f"the optimizer is {kind}, {path} was written with {written}")
        groups = state.groups_of(wanted.entries, wanted.optimizers)
        state.check_numbers(path, meta["param_groups"], wanted.optimizers)
        state.check_groups(path, groups, meta["param_groups"], wanted.elsewhere)
        check_pending(path, without, checkpoint.ranks)


def _warn_of_buffers(checkpoint: _Checkpoint, wanted: _Wanted) -> None:
    """Warns where the model has buffers, and a checkpoint from before these were saved has none."""
    tensors = named_buffers(wanted.model).keys() | {
        name.removeprefix(BUFFER) for name in wanted.elsewhere if name.startswith(BUFFER)
    }
    if tensors and not state.has_buffers(checkpoint.meta.get("tensors", {})):
        warnings.warn(
            f"load_checkpoint: {checkpoint.path} holds no buffers, the model's stay as they are:"
            f" {listed(sorted(tensors))}",
            stacklevel=3,
        )


def _read(checkpoint: _Checkpoint, wanted: _Wanted) -> _LoadedState:
    stock = {name: (DTYPES[dtype], tuple(shape)) for name, (dtype, shape) in checkpoint.meta["tensors"].items()}
    without = ranks_without(checkpoint.meta, wanted.model, checkpoint.ranks)
    checkpoint.ranks.together(lambda: _check(checkpoint, stock, wanted, without))
    sources = _verified(checkpoint, stock)
    return checkpoint.ranks.together(lambda: _filled(checkpoint, stock, sources, wanted))


def _read_1(checkpoint: _Checkpoint, wanted: _Wanted) -> _LoadedState:
    stock, sources = checkpoint.ranks.together(lambda: version1.read_index(checkpoint.path))
    checkpoint.ranks.together(lambda: _check(checkpoint, stock, wanted))
    return checkpoint.ranks.together(lambda: _filled(checkpoint, stock, sources, wanted))


def _verified(checkpoint: _Checkpoint, stock: state.Stock) -> Sources:
    """Compares the checksum of every file, each rank of its share -> where every piece is."""
    path, ranks = checkpoint.path, checkpoint.ranks
    files = files_of(checkpoint.meta)
    mine = sorted(files, key=lambda file: (-files[file].size, file))[ranks.rank :: ranks.size]

    def verify_mine() -> dict[str, dict[str, TensorEntry]]:
        for file in mine:
            verify(path / file, files[file])
        return {file: parts(path / file) for file in mine}

    opened_files, sources = ShardReader(path), {name: list[Stored]() for name in stock}
    for entries_of_rank in ranks.gather(verify_mine):
        for file, entries in entries_of_rank.items():
            for name, part in entries.items():
                if name not in stock or stock[name][0] != part.dtype or len(stock[name][1]) != len(part.size):
                    raise ValueError(f"{path / file} holds {name}, of which {META} says something else")
                sources[name].append(Stored(part.offset, part.size, opened_files.reader(file, name)))
    return sources


def _filled(checkpoint: _Checkpoint, stock: state.Stock, sources: Sources, wanted: _Wanted) -> _LoadedState:
    """Reads what this rank needs."""
    path, meta, ranks = checkpoint
    for name, stored in sources.items():
        check_apart(f"{path}: {name}", stock[name][1], [(s.offset, s.size) for s in stored])
        check_count(path, name, sum(math.prod(s.size) for s in stored), math.prod(stock[name][1]))
    owners = state.owners_of(wanted.optimizers)
    pieces = state.fresh(path, wanted.entries, stock, owners) | state.fresh_buffers(wanted.model, stock)
    for piece in pieces.values():
        fill(path, piece, sources[piece.name])
    reading = Reading(path, meta, stock, sources, entries=wanted.entries, ranks=ranks)
    residuals, pending = read_hook(wanted.hook, reading), read_pending(reading)
    return _LoadedState(pieces, state.optimizer_state(wanted.entries, pieces, owners), residuals, pending)


def _put(meta: Meta, ready: _LoadedState, model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    state.put_model(model, ready.model)
    if optimizers:
        state.put_optimizers(optimizers, ready.optimizer, meta["param_groups"])
    if (delay := delay_of(model)) is not None:
        delay.resume(ready.pending if optimizers else None)
    if (counter := state.numbered(model)) is not None:
        counter.seed, counter.step = meta["seed"], torch.tensor(meta["model_step"], dtype=torch.int64)
