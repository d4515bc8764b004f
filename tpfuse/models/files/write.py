"""A model -> a directory that transformers loads: full tensors, config.json, the tokenizer it came with."""

import contextlib
import filecmp
import math
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...collectives import all_gather
from ...layers.linear import Adaptable
from ...layers.module import Spec
from ...parallel import TensorParallel
from ...ranks.messages import attempt, raise_together, together
from ...ranks.shared_memory import host
from .directory import own_file, read_json
from .disk import NewFiles, save_file, write_json
from .names import ModelFiles
from .read import CONFIG, INDEX, SINGLE
from .source import written

MAX_SHARD_BYTES = 5 << 30
_CALLER = "save_pretrained"
GENERATION = "generation_config.json"
# What stands beside the weights in a directory, of all of transformers' tokenizers.
TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt"
    " tokenizer.model chat_template.jinja chat_template.json prophetnet.tokenizer spiece.model sentencepiece.bpe.model"
    " sentencepiece.model dict.txt bpe.codes emoji.json normalizer.json spm_char.model"
    " vocab-src.json vocab-tgt.json source.spm target.spm target_vocab.json byte_maps.json word_shape.json"
    " word_pronunciation.json spm.model entity_vocab.json"
).split()


def full_tensor(p: Tensor, spec: Spec, tp: TensorParallel) -> Tensor:
    """Returns the whole of a parameter, on every rank; a collective where it is sharded."""
    if isinstance(p, DTensor):
        full: Tensor = p.full_tensor().detach()
        return full[:: spec.copies]  # copies > 1: a rank's slice is one index of dimension 0
    p = p.detach()
    if spec.dim is None or tp.size == 1:
        return p
    n = spec.shape[spec.dim]
    rows = p.movedim(spec.dim, 0)
    chunk = tp.slice_size(n, copies=spec.leaf_copies)
    padded = torch.cat([rows, rows.new_zeros(chunk - len(rows), *rows.shape[1:])])
    shards = all_gather(padded, tp.size, tp.group_name)[:: spec.copies]
    return shards.flatten(0, 1)[:n].movedim(0, spec.dim).contiguous()


def whole_tensors(model: ModelFiles) -> Iterator[tuple[str, Tensor]]:
    """Yields (name in a Hugging Face file, whole tensor) of everything but adapters, on every rank; a collective."""
    sources = model.sources()
    full = ((sources[name], full_tensor(p, spec, tp)) for name, p, spec, tp in model.stored_parameters())
    for hf_name, tensor in written(full):
        yield model.hf_name(hf_name), tensor


class _Written(NamedTuple):
    """A rank's files with the names of their tensors, and the bytes of their parameters."""

    shards: list[tuple[str, list[str]]]
    size: int


def save(model: ModelFiles, path: Path, shard_bytes: int | None = None) -> None:
    """Writes the directory, in files of at most ``shard_bytes`` (MAX_SHARD_BYTES).  Every rank calls it; one writes.

    Of a model over pipeline stages one rank of each writes its shards, and what two hold is the first one's; the first
    stage's puts them under their names, so that no rank has the whole model.

    Files appear whole or not at all, under their final names only when all are written.  ValueError where adapters are
    not merged into the weights: they have a format of their own.  OSError, on every rank and before any tensor is
    gathered, where ``path`` cannot be written; RankEnded (over gloo) on the others where a rank ends meanwhile.
    """
    groups = model.groups.all()
    together(lambda: _check_storable(model), groups)
    stages = model.groups.pp(_CALLER)
    rank = 0 if stages is None else stages.rank()
    leads = model.groups.writes and rank == 0
    new = together(lambda: NewFiles(path, _CALLER) if leads else None, groups)
    with contextlib.nullcontext() if new is None else new:
        names = {name for name, *_ in model.stored_parameters()}
        by_stage = model.groups.over_stages(_CALLER, (names, None if new is None else new.folder))
        mine = names.difference(*(earlier for earlier, _ in by_stage[:rank]))
        stored = [entry for entry in model.stored_parameters() if entry[0] in mine]
        tensors = ((name, full_tensor(p, spec, tp)) for name, p, spec, tp in stored)
        folder = by_stage[0][1]

        def write() -> list[tuple[str, list[str]]]:
            if not model.groups.writes or folder is None:
                return []
            return _write_shards(model, folder / f"shard-{rank}", tensors, shard_bytes or MAX_SHARD_BYTES)

        shards, error = attempt(write)
        for _ in tensors:  # the collectives that remain: all of them here, or those after an error
            pass
        raise_together(error, groups)
        size = sum(math.prod(spec.shape) * p.element_size() for _, p, spec, _ in stored)
        shards_of = model.groups.over_stages(_CALLER, _Written(shards[0], size))
        together(lambda: None if new is None else _finish(model, new, shards_of), groups)


def _check_storable(model: ModelFiles) -> None:
    """Raises the ValueError of adapters, and of a config that the family's config.json cannot express."""
    model.config.to_hf()
    if any(m.adapter is not None for m in model.module.modules() if isinstance(m, Adaptable)):
        raise ValueError(
            f"{_CALLER}: the model has adapters; use save_adapter for them, or merge_lora to have them in the weights"
        )


def _finish(model: ModelFiles, new: NewFiles, parts: Sequence[_Written]) -> None:
    """Gives the shards their names, writes config.json, and moves the files over when all are there."""
    dtype = str(next(model.module.parameters()).dtype).removeprefix("torch.")
    config = (model.origin.config if model.origin is not None else {}) | model.config.to_hf() | model.hf_config()
    config |= dict(dtype=dtype, torch_dtype=dtype)  # the new name and the old
    folder, shards = new.folder, [shard for part in parts for shard in part.shards]
    count = len(shards)
    files = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for (shard, _), file in zip(shards, files, strict=True):
        os.replace(folder / shard, folder / file)
    if count > 1:
        places = {tensor: file for (_, names), file in zip(shards, files, strict=True) for tensor in names}
        total = sum(part.size for part in parts)
        write_json({"metadata": {"total_size": total}, "weight_map": places}, folder / INDEX)
    write_json(config, folder / CONFIG)
    if model.origin is not None and model.origin.path is not None:
        _copy_beside(model.origin.path, folder, new.path)
    stale = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")  # would be loaded in place of these
    new.publish(
        file
        for file in new.path.glob("model*.safetensors*")
        if stale.fullmatch(file.name) and (file.is_symlink() or not file.is_dir())
    )


def _copy_beside(source: Path, folder: Path, target: Path) -> None:
    """Copies what stands beside the weights: the tokenizer's files, the generation config, and Python files where a
    config names some.

    A tokenizer that is in ``target`` stays, with a warning where it is another one: tokens may have been added to it,
    and files of two would be mixed.  So does a generation config.  What is not the directory's own file would be
    somebody else's, so it is left, with a warning.
    """
    same = os.path.realpath(source) == os.path.realpath(target)
    names, there = ([n for n in TOKENIZER_FILES if os.path.lexists(place / n)] for place in (source, target))
    if there and not same:
        if names and (names != there or not all(_equal(source, target, name) for name in names)):
            warnings.warn(
                f"{_CALLER}: {target} has files of a tokenizer, {', '.join(there)}, which stay; those of {source}"
                " differ and are not copied",
                stacklevel=2,
            )
        names = []
    if os.path.lexists(source / GENERATION) and (same or not os.path.lexists(target / GENERATION)):
        names.append(GENERATION)
    if any(_names_code(source, name) for name in (CONFIG, "tokenizer_config.json") if name in (CONFIG, *names)):
        names += [path.name for path in source.glob("*.py")]
    for name in names:
        try:
            shutil.copyfile(own_file(source, name), folder / name)
        except (ValueError, FileNotFoundError) as error:
            warnings.warn(f"{_CALLER}: {error}; it is not copied", stacklevel=2)


def _equal(source: Path, target: Path, name: str) -> bool:
    """Returns whether two directories have the same file of a name."""
    with contextlib.suppress(ValueError, OSError):
        return filecmp.cmp(own_file(source, name), target / name, shallow=False)
    return False


def _names_code(source: Path, name: str) -> bool:
    """Returns whether a config of the directory says which classes of its own read it."""
    with contextlib.suppress(ValueError, OSError):
        return bool(read_json(source, name).get("auto_map"))
    return False


def _write_shards(
    model: ModelFiles, path: Path, tensors: Iterator[tuple[str, Tensor]], shard_bytes: int
) -> list[tuple[str, list[str]]]:
    """Writes the tensors in files of at most ``shard_bytes``, whose names begin as ``path``; returns each with its
    tensors' names."""
    if not path.parent.is_dir():
        raise OSError(f"{_CALLER}: {path.parent} of {host()[0]} is not there: all ranks must share one folder")
    shards: list[tuple[str, list[str]]] = []
    pending: dict[str, Tensor] = {}
    sources = model.sources()

    def flush() -> None:
        file = path.with_name(f"{path.name}-{len(shards)}")
        save_file(pending, file)
        shards.append((file.name, list(pending)))
        pending.clear()

    for hf_name, tensor in written((sources[name], full) for name, full in tensors):
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > shard_bytes:
            flush()
        pending[model.hf_name(model.config.hf.filed.get(hf_name, hf_name))] = tensor.cpu()
    if pending:
        flush()
    return shards
