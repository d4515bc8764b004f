"""save_checkpoint: state -> shards, meta.json, latest."""

import functools
import hashlib
import itertools
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

from torch import nn

from ...layers.partial import warn_of_drift
from ...pipeline.delays import delay_of
from ...pipeline.placement import Stage
from ...ranks.messages import RankEnded
from ..ok_topk import OkTopk
from . import background as thread
from .conditions import Adapters, adapters_of, conditions, config_of, merged_adapters
from .errors import named
from .folder import SAVING, check_shared, new_checkpoint, publish, read_latest, tidy
from .hooks import hook_pieces
from .job import JobProcess, check_held, take
from .meta import NATURAL, VERSION, WITH_MORE, Meta, check_json, is_natural, read_text, sealed
from .pending import KEY as PENDING
from .pending import check_pending_everywhere, pending_pieces
from .pieces import BUFFER, Piece, PieceInfo, Place, shares
from .ranks import Ranks, all_ranks
from .replicas import SAME_BITS, bits_of, differences
from .shards import NAMES, FileEntry, check_size, write_shard
from .stages import check_stages, merged, stage_in
from .state import (
    MODEL,
    NUMBER,
    Group,
    Optimizers,
    as_tuple,
    buffer_pieces,
    check_dtypes,
    check_numbers,
    entries_of,
    groups_of,
    kinds_of,
    numbered,
    owners_of,
    parameter_of,
    pieces_of,
    plain_names,
    unwrap,
)

_GROUPS = "param_groups"  # of meta.json: what pipeline stages have parts of
_ADAPTERS = "adapters"  # the same, of the layers
_OWN = "conditions", _GROUPS  # what may differ between ranks; of the first rank 0's is kept


class _Save(NamedTuple):
    """A save, ready to be written: this rank's pieces, and what meta.json will say."""

    directory: Path
    pieces: list[Piece]
    meta: Meta
    ranks: Ranks


@overload
def save_checkpoint(
    directory: str | Path,
    model: nn.Module,
    optimizer: Optimizers,
    *,
    step: int,
    extra: Any = None,
    hook: OkTopk | None = None,
    background: Literal[False] = False,
) -> Path: ...
@overload
def save_checkpoint(
    directory: str | Path,
    model: nn.Module,
    optimizer: Optimizers,
    *,
    step: int,
    extra: Any = None,
    hook: OkTopk | None = None,
    background: Literal[True],
) -> thread.Saving: ...
def save_checkpoint(
    directory: str | Path,
    model: nn.Module,
    optimizer: Optimizers,
    *,
    step: int,
    extra: Any = None,
    hook: OkTopk | None = None,
    background: bool = False,
) -> Path | thread.Saving:
    """Writes ``directory``/step-..., then makes it the latest.  Every rank calls it; returns the path.

    ``optimizer``: one, or a list of several that step each parameter once, as Muon and AdamW do.  Of whole matrices
    (:class:`tpfuse.WholeMatrices`, :class:`tpfuse.KFAC`) their state is in the checkpoint once, of any shape.
    ``extra`` is the caller's own state (JSON values: sampler position, scheduler), the same on every rank.  ``hook``:
    the state of a communication hook, whose residuals are saved with it.

    ``background``: returns as soon as the state is copied to the CPU; the files are written while training goes on.
    Returned is then a handle, whose ``result()`` waits and gives the path or the error; an error that nobody asked for
    is raised by the next save or load in the folder.  One save at a time: the next one waits, and so does the end of
    the process.

    ValueError where the state cannot be saved or differs between ranks, in what several of them hold by a single bit,
    OSError where the files cannot be written, the
    folder is not one that all ranks share, or another job saves in it: the same on every rank.  Then nothing of this
    checkpoint is left, and the one before stays the latest.  Where a rank ends meanwhile, RankEnded on the others (over
    gloo) names it.

    Of a model over pipeline stages the checkpoint holds the whole: every stage writes its own parameters, and of those
    that two stages hold one writes each, the one with fewer bytes so far.  Where gradients are one step late, it
    completes the batch in flight and saves the gradient that waits; training goes on with the same bits as without.
    """
    with named("save_checkpoint"):
        thread.settle()
        directory, ranks = Path(directory), all_ranks(background=background)
        thread.raise_earlier(directory, ranks)
        warn_of_drift(unwrap(model), "save_checkpoint")
        inner = unwrap(model)
        delay = delay_of(inner)
        pending = None if delay is None else delay.finish()

        def collect() -> tuple[list[Piece], Meta]:
            pieces, meta = _collect(inner, optimizer, step, extra)
            residuals, about_hook = hook_pieces(entries_of(inner), hook, ranks)
            gradients, about_pending = pending_pieces(entries_of(inner), pending)
            pieces += residuals + gradients
            kept = [part for part in pieces if part.local.numel() or not math.prod(part.shape)]
            return kept, meta | about_hook | about_pending

        plain = plain_names(entries_of(inner))  # of which warn_of_drift tells, beyond rounding
        is_compared = lambda name: not name.startswith(BUFFER) and parameter_of(name) not in plain
        save = _prepare(directory, ranks, stage_in(inner), collect, is_compared=is_compared)
        if not background:
            return _write(save)
        copies = ranks.together(lambda: [x._replace(local=x.local.to("cpu", copy=True)) for x in save.pieces])
        return thread.start(directory, functools.partial(_write, save._replace(pieces=copies)))


# ---- the state ----


def _collect(model: nn.Module, optimizer: Optimizers, step: int, extra: Any) -> tuple[list[Piece], Meta]:
    """Returns what is here of every tensor, and meta.json but for the files."""
    if not is_natural(step):
        raise ValueError(f"step must be {NATURAL}, got {step!r}")
    entries, optimizers = entries_of(model), as_tuple(optimizer)
    groups = groups_of(entries, optimizers)
    check_json("extra", extra)
    check_json("the optimizer's groups", groups)
    check_numbers("the optimizer", groups, optimizers)
    meta = dict(version=VERSION, step=step, extra=extra, optimizer=kinds_of(optimizers))
    counter = numbered(model)
    meta |= (
        dict(seed=0, model_step=0) if counter is None else dict(seed=int(counter.seed), model_step=int(counter.step))
    )
    meta |= {"config": config_of(model), "conditions": conditions(model), _GROUPS: groups}
    if adapters := adapters_of(model):
        meta[_ADAPTERS] = adapters
    copied = json.loads(json.dumps(meta))  # the caller's changes do not reach it
    pieces = [*buffer_pieces(model).values(), *pieces_of(entries, owners_of(optimizers))]
    check_dtypes(pieces)
    return pieces, copied


class _Mine(NamedTuple):
    """The summary of a rank's state that it sends to the others."""

    held: list[PieceInfo]
    digests: dict[str, tuple[str, str]]
    groups: list[Group]
    adapters: Adapters
    stage: Stage | None

    def parameters(self) -> set[str]:
        return {p.name.removeprefix(MODEL) for p in self.held if p.name.startswith(MODEL)}


def _prepare(
    directory: Path,
    ranks: Ranks,
    stage: Stage | None,
    collect: Callable[[], tuple[list[Piece], Meta]],
    *,
    is_compared: Callable[[str], bool],
) -> _Save:
    """Collects the state, compares what several ranks hold and divides it among them."""
    pieces: dict[Place, Piece] = {}
    meta: Meta = {}

    def mine() -> _Mine:
        collected, about = collect()
        pieces.update({(p.name, p.offset): p for p in collected})
        meta.update(about)
        infos = [
            PieceInfo(p.name, p.offset, tuple(p.local.shape), shape=p.shape, dtype=p.local.dtype)
            for p in pieces.values()
        ]
        own = _OWN if stage is None else (*_OWN, _ADAPTERS)
        digests = {key: _digest(value) for key, value in about.items() if key not in own}
        return _Mine(infos, digests, about[_GROUPS], adapters=about.get(_ADAPTERS, {}), stage=stage)

    replies = ranks.gather(mine)
    check_pending_everywhere([PENDING in reply.digests for reply in replies])
    nothing = "nothing", ""  # of a key that a rank's meta.json would not have
    for rank, reply in enumerate(replies):
        for key in (replies[0].digests | reply.digests).keys():
            reference, value = (r.digests.get(key, nothing) for r in (replies[0], reply))
            if value != reference:
                raise ValueError(
                    f"{key} must be the same on every rank, got {reference[0]} on rank 0 and {value[0]} on rank {rank}"
                )
    check_stages([reply.stage for reply in replies])
    meta[_GROUPS] = merged([reply.groups for reply in replies], [reply.parameters() for reply in replies])
    if adapters := merged_adapters([reply.adapters for reply in replies]):
        meta[_ADAPTERS] = adapters
    infos = [reply.held for reply in replies]
    if any(p.name.startswith((BUFFER, NUMBER)) for p in itertools.chain(*infos)):
        meta["version"] = WITH_MORE
    places = shares(infos)[ranks.rank]
    holders = Counter((p.name, p.offset) for held in infos for p in held)
    shared = [place for place in pieces if holders[place] > 1 and is_compared(place[0])]
    bits = ranks.gather(lambda: {place: bits_of(pieces[place].local) for place in shared})
    differing = differences(dict(enumerate(bits)))
    if differing:
        raise ValueError(f"{'; '.join(differing)}: {SAME_BITS}")
    meta["tensors"] = {p.name: [NAMES[p.dtype], p.shape] for p in itertools.chain(*infos)}
    return _Save(directory, [pieces[place] for place in pieces if place in places], meta, ranks)


def _digest(value: Any) -> tuple[str, str]:
    """Returns the beginning of a value, for an error, and a checksum."""
    text = json.dumps(value)
    return text[:60], hashlib.sha256(text.encode()).hexdigest()


# ---- the files ----


def _write(save: _Save) -> Path:
    ranks = save.ranks
    begun = ranks.on_first(lambda: _begin(save))
    path = save.directory / begun.name
    try:
        ranks.together(lambda: check_shared(path, begun.saving))
        shards = ranks.gather(lambda: _write_shard(save, path))
        keep = ranks.on_first(lambda: _publish(save, path, {k: v for d in shards for k, v in d.items()}, begun.job))
    except BaseException as error:
        if ranks.rank == 0:
            _discard(path)
        if isinstance(error, RankEnded):
            raise RankEnded(f"{path} is not whole and is not published: {error}") from error
        raise
    if ranks.rank == 0 and keep is not None:
        tidy(path, keep)
    return path


class _Begun(NamedTuple):
    """Rank 0's message to the others: the checkpoint's name, the text that it wrote there, and the folder's job."""

    name: str
    saving: bytes
    job: JobProcess


def _begin(save: _Save) -> _Begun:
    job = take(save.directory)
    path = new_checkpoint(save.directory, save.meta["step"])
    try:
        return _Begun(path.name, read_text(path / SAVING), job)
    except OSError:
        _discard(path)
        raise


def _write_shard(save: _Save, path: Path) -> dict[str, FileEntry]:
    files: list[dict[str, Piece]] = []  # a file has a tensor once, of which a rank may have several pieces
    for part in save.pieces:
        file = next((file for file in files if part.name not in file), None)
        if file is None:
            files.append(file := {})
        file[part.name] = part
    names = [f"shard-{save.ranks.rank:05d}{f'-{i}' * bool(i)}.safetensors" for i in range(len(files))]
    return {name: write_shard(path / name, file) for name, file in zip(names, files, strict=True)}


def _publish(save: _Save, path: Path, shards: dict[str, FileEntry], job: JobProcess) -> set[str] | None:
    """Makes the checkpoint the latest, once every file is seen here -> what to keep; None where that is not known."""
    for file, shard in shards.items():
        check_size(path / file, shard)
    keep = None
    with suppress(OSError, ValueError):  # a latest that cannot be read is replaced
        previous = read_latest(path.parent)
        keep = {path.name} | ({previous} if previous else set())
    check_held(path.parent, job)
    publish(path, sealed(save.meta | dict(name=path.name, files=shards)))
    return keep


def _discard(path: Path) -> None:
    """Removes a checkpoint that was not published."""
    with suppress(OSError, ValueError):
        if read_latest(path.parent) == path.name:
            return
    shutil.rmtree(path, ignore_errors=True)
