"""Training checkpoints: model, optimizer, rng and the caller's own state.

They are resumable at any tensor-parallel size and never half-written:

    directory/step-00000100/   shards of full tensors (torch.distributed.checkpoint), then meta.json
    directory/latest           the name of the newest whole checkpoint, replaced by one atomic rename after everything
                               is on disk

A save that is killed leaves ``latest`` as it was.  The last two checkpoints are kept.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..interop.huggingface.disk import fsync
from ..layers.module import Spec, named_specs
from ..parallel import TensorParallel
from ..together import on_rank_0
from .dtensor import to_dtensor

VERSION = 1  # of the formats: Philox, parameter layouts, names
_NAME = re.compile(r"step-\d{8}(-\d+)?")
Entries = dict[str, tuple[nn.Parameter, Spec, TensorParallel]]  # parameters by name


def save_checkpoint(
    directory: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, step: int, extra: Any = None
) -> Path:
    """Writes ``directory``/step-..., then makes it the latest.  Every rank calls it; returns the path.

    ``extra`` is the caller's own state (JSON values: sampler position, scheduler), the same on every rank.
    """
    directory, model = Path(directory), _unwrap(model)
    state, meta = _state(model, optimizer), _meta(model, optimizer, step, extra)
    path = directory / on_rank_0(lambda: _new_name(directory, step))
    dcp.save(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    on_rank_0(lambda: _publish(path, meta))
    return path


def load_checkpoint(
    directory: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> tuple[int, Any] | None:
    """Restores the latest checkpoint in place; returns (step, extra), or None where there is none.

    The tensor-parallel and data-parallel sizes may differ from those that wrote it (beyond the number of kv heads the
    tensor-parallel size may not: the layout is another there).  Without ``optimizer`` only the model is restored.
    ValueError, before anything changes, where the format, the parameters' names or shapes, or the optimizer's groups
    are not the checkpoint's.
    """
    directory, model = Path(directory), _unwrap(model)
    if not (directory / "latest").is_file():
        return None
    path = directory / (directory / "latest").read_text().strip()
    meta = json.loads((path / "meta.json").read_text())
    if meta["version"] != VERSION:
        raise ValueError(f"load_checkpoint: {path} has format version {meta['version']}, this tpfuse reads {VERSION}")
    stored = {
        name: m
        for name, m in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items()
        if hasattr(m, "size")
    }
    entries = _entries(model)
    _check_model(path, {f"model.{name}": spec.spread for name, (_, spec, _) in entries.items()}, stored)
    state = {f"model.{name}": _whole(p.detach(), spec, tp) for name, (p, spec, tp) in entries.items()}
    if optimizer is not None:
        _check_groups(path, _groups(entries, optimizer), meta["param_groups"])
        state |= _empty_optimizer_state(entries, stored)
    dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    if optimizer is not None:
        _fill_optimizer(entries, state, optimizer, meta["param_groups"])
    if hasattr(model, "step"):
        model.seed, model.step = meta["seed"], torch.tensor(meta["model_step"], dtype=torch.int64)
    return meta["step"], meta["extra"]


# ---- what is in it ----


def _unwrap(model: nn.Module) -> nn.Module:
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return getattr(model, "_orig_mod", model)


def _entries(model: nn.Module) -> Entries:
    return {name: (p, spec, tp) for (name, spec, tp), p in zip(named_specs(model), model.parameters(), strict=True)}


def _whole(x: Tensor, spec: Spec, tp: TensorParallel) -> Tensor:
    """Returns a slice as torch.distributed.checkpoint can put it together.

    A DTensor, or a plain tensor where it is the whole.
    """
    if isinstance(x, DTensor) or tp.size == 1 or tp.group is None:
        return x
    return to_dtensor(x, spec, DeviceMesh.from_group(tp.group, x.device.type))


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = {}
    for name, (p, spec, tp) in _entries(model).items():
        state[f"model.{name}"] = _whole(p.detach(), spec, tp)
        for key, value in optimizer.state.get(p, {}).items():
            value = torch.as_tensor(value)
            if value.shape != p.shape and value.numel() > 1:
                raise ValueError(
                    f"save_checkpoint: the optimizer's {key} of {name} is neither a number nor shaped as the parameter"
                )
            state[f"optimizer.{name}.{key}"] = _whole(value, spec, tp) if value.shape == p.shape else value
    return state


def _groups(entries: Entries, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The optimizer's groups as JSON has them, parameters by name."""
    names = {id(p): name for name, (p, *_) in entries.items()}
    missing = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if missing:
        raise ValueError(
            f"checkpoint: the optimizer holds a parameter of shape {tuple(missing[0].shape)} that is not the model's"
        )
    plain = lambda v: v.item() if isinstance(v, Tensor) else v
    return [
        {k: [names[id(p)] for p in v] if k == "params" else plain(v) for k, v in group.items()}
        for group in optimizer.param_groups
    ]


def _meta(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, extra: Any) -> dict[str, Any]:
    rng = dict(seed=getattr(model, "seed", 0), model_step=int(getattr(model, "step", 0)))
    return dict(version=VERSION, step=step, extra=extra, param_groups=_groups(_entries(model), optimizer), **rng)


def _check_model(path: Path, wanted: dict[str, tuple[int, ...]], stored: dict[str, Any]) -> None:
    for name, shape in wanted.items():
        got = tuple(stored[name].size) if name in stored else "none"
        if got != shape:
            raise ValueError(f"load_checkpoint: {name} must be {shape} for this model, {path} has {got}")
    extra = [name for name in stored if name.startswith("model.") and name not in wanted]
    if extra:
        raise ValueError(f"load_checkpoint: {path} holds {extra[0]}, which this model has no place for")


def _check_groups(path: Path, groups: list[dict[str, Any]], stored: list[dict[str, Any]]) -> None:
    if len(groups) != len(stored):
        raise ValueError(f"load_checkpoint: the optimizer has {len(groups)} parameter groups, {path} has {len(stored)}")
    for i, (ours, theirs) in enumerate(zip(groups, stored, strict=True)):
        if ours["params"] != theirs["params"]:
            differing = sorted(set(ours["params"]) ^ set(theirs["params"])) or ours["params"]
            raise ValueError(
                f"load_checkpoint: group {i} of the optimizer has other parameters than {path}:"
                f" {', '.join(differing[:4])}"
            )


def _empty_optimizer_state(entries: Entries, stored: dict[str, Any]) -> dict[str, Tensor]:
    state = {}
    for name, (p, spec, tp) in entries.items():
        prefix = f"optimizer.{name}."
        for key in (key for key in stored if key.startswith(prefix) and "." not in key.removeprefix(prefix)):
            size, dtype = tuple(stored[key].size), stored[key].properties.dtype
            state[key] = (
                _whole(torch.zeros_like(p.detach(), dtype=dtype), spec, tp)
                if size == spec.spread
                else torch.zeros(size, dtype=dtype)
            )
    return state


def _fill_optimizer(
    entries: Entries, state: dict[str, Tensor], optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> None:
    for name, (p, _, _) in entries.items():
        prefix = f"optimizer.{name}."
        values = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if not isinstance(p, DTensor):
            values = {key: v.to_local() if isinstance(v, DTensor) else v for key, v in values.items()}
        optimizer.state.pop(p, None)
        if values:
            optimizer.state[p] = values
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for k, v in saved.items():
            if isinstance(group.get(k), Tensor):  # a learning rate that a compiled step holds on to
                group[k].fill_(v)
            elif k != "params":
                group[k] = tuple(v) if isinstance(v, list) else v


# ---- how it is written ----


def _new_name(directory: Path, step: int) -> str:
    """A directory that is not there yet: an existing checkpoint is never written over."""
    directory.mkdir(parents=True, exist_ok=True)
    name, again = f"step-{step:08d}", 0
    while (directory / name).exists():
        again += 1
        name = f"step-{step:08d}-{again}"
    return name


def _publish(path: Path, meta: dict[str, Any]) -> None:
    latest = path.parent / "latest"
    previous = latest.read_text().strip() if latest.is_file() else None
    _write(path / "meta.json", json.dumps(meta | dict(name=path.name), indent=1))
    fsync(path)
    _write(latest, path.name + "\n")
    fsync(path.parent)
    _clean(path, previous)


def _clean(newest: Path, previous: str | None) -> None:
    """Removes what the last two checkpoints superseded, and saves that never were finished.

    A copy under another name stays, and a later step's, which exists where somebody pointed ``latest`` back.
    """
    for folder in newest.parent.iterdir():
        if _NAME.fullmatch(folder.name) and folder.name not in (newest.name, previous):
            meta = folder / "meta.json"
            superseded = folder.name[:13] <= newest.name[:13]
            if not meta.is_file() or (superseded and json.loads(meta.read_text()).get("name") == folder.name):
                shutil.rmtree(folder, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    new = path.with_name(path.name + ".new")
    with open(new, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
