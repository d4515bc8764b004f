"""A model's and its optimizer's state as pieces of whole tensors by name, and back."""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from ...kernels.runtime.rules import NOT_NEGATIVE, Rule, check_number, described, number
from ...layers.module import Spec, as_parameter, local
from ...layers.shards import WRAPPERS, named_buffers, named_specs
from ...models.model import Model
from ...parallel import TensorParallel
from ..main_grad import stepped
from ..micro_batches import REPLICAS
from ..originals import original_of
from .pieces import BUFFER, Index, Piece, full_piece, piece
from .shards import NAMES

MODEL = "model."  # before the names of parameters
STATE = _TENSOR, NUMBER = "optimizer.", "number."  # before the names of the optimizer's state; of Python's numbers
MAIN = "main_weight"  # among the optimizer's state of a parameter: its fp32 weight in a MainGrad
Entries = dict[str, tuple[nn.Parameter, Spec, TensorParallel]]  # parameters by name
Stock = Mapping[str, tuple[torch.dtype, Index]]  # what a checkpoint holds: dtype and whole shape by name
Values = Mapping[str, Piece]  # tensors that were read
StateValues = dict[str, Tensor | float]  # what an optimizer has of a parameter: tensors, and Python's numbers
OptimizerState = Mapping[nn.Parameter, StateValues]
Optimizers = Optimizer | Sequence[Optimizer]  # as a caller gives them
Group = dict[str, Any]  # of an optimizer, as JSON has it: parameters by name
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("lr", "initial_lr", "eps", "weight_decay", "momentum"), NOT_NEGATIVE),
    "betas": number(0, 1, "[)"),
}


def unwrap(model: nn.Module) -> nn.Module:
    """Returns the model inside torch's wrappers or data_parallel's, its parameters as FSDP2 keeps them between steps.

    After a forward without a backward FSDP2 leaves the root's parameters gathered: others than the optimizer's.
    """
    from torch.distributed.fsdp import FSDPModule  # slow to import

    while len(model._modules) == 1 and (isinstance(model, REPLICAS) or model._modules.keys() <= WRAPPERS):
        (model,) = model.children()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


def numbered(model: nn.Module) -> Model | None:
    """Returns the model whose seed and counter of steps are saved: this one, or that of a parallelized module."""
    inner = getattr(model, "parallel", None)
    return model if isinstance(model, Model) else inner if isinstance(inner, Model) else None


def entries_of(model: nn.Module) -> Entries:
    return {name: (p, spec, tp) for name, p, spec, tp in named_specs(model)}


class Owner(NamedTuple):
    """The optimizer of a parameter, and what it steps on in the parameter's place: the parameter itself, its weight in
    a MainGrad, or the whole matrix of either (:class:`tpfuse.WholeMatrices`)."""

    optimizer: Optimizer
    weight: nn.Parameter

    def keeps_whole(self, key: str) -> bool:
        """Returns whether every rank has all of the optimizer's ``key``, which is then of any shape."""
        return key != MAIN and original_of(self.weight) is not self.weight

    def dtype_of(self, key: str, stored: torch.dtype, stepped_on: torch.dtype) -> torch.dtype:
        """Returns the dtype of the optimizer's ``key``, which was ``stored`` beside a weight of the dtype
        ``stepped_on``: where that was the weight's, the present one's, as in torch's ``load_state_dict``."""
        keeps_fp32 = getattr(self.optimizer, "local_state", False)  # a KFAC's is fp32 of 16-bit weights
        dtypes = stepped_on, self.weight.dtype
        former, present = (torch.promote_types(x, torch.float32) if keeps_fp32 else x for x in dtypes)
        return present if stored == former and key not in (MAIN, "step") else stored


Owners = Mapping[nn.Parameter, Owner]  # by what is stepped on, or by the parameter that a matrix is of


def as_tuple(optimizers: Optimizers | None) -> tuple[Optimizer, ...]:
    """Returns the optimizers that a caller gave.  ValueError for what is none."""
    several = () if optimizers is None else (optimizers,) if isinstance(optimizers, Optimizer) else optimizers
    if not isinstance(several, Sequence) or not all(isinstance(x, Optimizer) for x in several):
        raise ValueError(f"optimizer must be one of torch, or a list of them, got {described(optimizers)}")
    return tuple(several)


def owners_of(optimizers: Iterable[Optimizer]) -> Owners:
    """Returns what steps each parameter.  ValueError for one that is stepped twice."""
    owners: dict[nn.Parameter, Owner] = {}
    for optimizer in optimizers:
        for weight in itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups):
            p = original_of(weight)
            if p in owners:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} is stepped twice, by"
                    f" {kinds_of((owners[p].optimizer, optimizer))}"
                )
            owners[p] = Owner(optimizer, weight)
    return owners


# ---- out ----


def stored_name(name: str, spec: Spec) -> str:
    """Returns the name that a checkpoint has for a parameter: of a part of another one, the other's."""
    return name if spec.origin is None else f"{name.rpartition('.')[0]}.{spec.origin.leaf}".removeprefix(".")


def stored_names(entries: Entries) -> dict[str, str]:
    """Returns the names that a checkpoint has for parameters, by their own."""
    return {name: stored_name(name, spec) for name, (_, spec, _) in entries.items()}


def plain_names(entries: Entries) -> set[str]:
    """Returns the names of parameters of plain modules, which are no parallel layer's."""
    return {stored_name(name, spec) for name, (_, spec, _) in entries.items() if spec.init is None}


def parameter_of(stored: str) -> str:
    """Returns the name of the parameter that a tensor of a checkpoint is of."""
    kind, _, name = stored.partition(".")
    return name if kind in ("model", "gradient") else name.rpartition(".")[0]


def pieces_of(entries: Entries, owners: Owners) -> list[Piece]:
    """Returns what is here of every tensor, sharing its memory."""
    pieces = []
    for own_name, (p, spec, tp) in entries.items():
        name = stored_name(own_name, spec)
        pieces.append(piece(f"model.{name}", p, spec, tp))
        weight = stepped(p)
        main = {} if weight.dtype == p.dtype else {MAIN: weight.detach()}
        owner = owners.get(weight)
        held = {} if owner is None else owner.optimizer.state.get(owner.weight, {})
        for key, value in (held | main if owners else {}).items():
            if value is not None:
                kind = NUMBER if isinstance(value, int | float) else _TENSOR
                value, stored = _as_tensor(own_name, key, value), f"{kind}{name}.{key}"
                if owner is not None and owner.keeps_whole(key):
                    pieces.append(full_piece(stored, value))
                    continue
                shaped = value.shape == p.shape
                pieces.append(piece(stored, value, spec, tp) if shaped else full_piece(stored, value))
                if not shaped and value.numel() > 1:
                    raise ValueError(
                        f"the optimizer's {key} of {own_name} is neither a number nor shaped as the parameter"
                    )
    return pieces


def check_dtypes(pieces: Iterable[Piece]) -> None:
    """ValueError for a tensor of a dtype that the files cannot hold."""
    for part in pieces:
        if part.local.dtype not in NAMES:
            raise ValueError(f"{part.name} is of {part.local.dtype}, which safetensors does not hold")


def buffer_pieces(model: nn.Module) -> dict[str, Piece]:
    """Returns what is here of every persistent buffer, by its own name.  ValueError for a tensor of another class."""
    pieces = {}
    for name, x in named_buffers(model).items():
        if type(x) not in (Tensor, DTensor):
            raise ValueError(
                f"the buffer {name} is a {type(x).__name__}, which a checkpoint does not hold; register it with"
                " persistent=False, or keep the model's state_dict() by torch.save"
            )
        part = full_piece(f"{BUFFER}{name}", x)
        pieces[name] = _as_real(part) if part.local.is_complex() else part
    return pieces


def _as_real(part: Piece) -> Piece:
    """Returns a piece of complex numbers as one of their real and imaginary parts, in a last dimension."""
    real = torch.view_as_real(part.local.resolve_conj())
    return Piece(part.name, real, (*part.offset, 0), (*part.shape, 2))


def _as_tensor(name: str, key: str, value: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"the optimizer's {key} of {name} is neither a number nor shaped as the parameter") from None
    if type(tensor) not in (Tensor, nn.Parameter, DTensor):
        raise ValueError(
            f"the optimizer's {key} of {name} is a {type(tensor).__name__}, which has no slices for other splits; keep"
            " such an optimizer's state_dict() by torch.save on every rank"
        )
    return tensor


def groups_of(entries: Entries, optimizers: Iterable[Optimizer]) -> list[Group]:
    """Returns the optimizers' groups as JSON has them, parameters by name, one optimizer after the other."""
    names = {id(stepped(p)): stored_name(name, spec) for name, (p, spec, _) in entries.items()}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    missing = [p for group in groups for p in group["params"] if id(original_of(p)) not in names]
    if missing:
        raise ValueError(f"the optimizer holds a parameter of shape {tuple(missing[0].shape)} that is not the model's")
    return [
        {
            k: [*dict.fromkeys(names[id(original_of(p))] for p in v)] if k == "params" else _numbers(v)
            for k, v in group.items()
        }
        for group in groups
    ]


def _numbers(value: Any) -> Any:
    """Returns a group's value without tensors."""
    if isinstance(value, list | tuple):
        return [_numbers(v) for v in value]
    return value.item() if isinstance(value, Tensor) else value


def kinds_of(optimizers: Iterable[Optimizer]) -> str:
    """Returns the names of the optimizers' classes, as meta.json has them."""
    return ", ".join(type(optimizer).__qualname__ for optimizer in optimizers)


# ---- checks ----


def check_model(path: Path, model: nn.Module, stored: Stock, elsewhere: Collection[str]) -> None:
    """ValueError where a checkpoint is not of this model, of which other ranks hold the tensors ``elsewhere``.

    One without any buffer is older than their place in it.
    """
    pieces = [*_model_pieces(entries_of(model)).values()] + has_buffers(stored) * [*buffer_pieces(model).values()]
    wanted = {part.name: part.shape for part in pieces}
    for name, shape in wanted.items():
        got = stored[name][1] if name in stored else "none"
        if got != shape:
            raise ValueError(f"{name} must be {shape} for this model, {path} has {got}")
    expected = wanted.keys() | elsewhere
    extra = [name for name in stored if name.startswith((MODEL, BUFFER)) and name not in expected]
    if extra:
        raise ValueError(f"{path} holds {extra[0]}, which this model has no place for")


def has_buffers(stored: Iterable[str]) -> bool:
    return any(name.startswith(BUFFER) for name in stored)


def _model_pieces(entries: Entries) -> dict[str, Piece]:
    return {name: piece(f"model.{stored_name(name, spec)}", p, spec, tp) for name, (p, spec, tp) in entries.items()}


def check_groups(path: Path, groups: list[Group], stored: list[Group], elsewhere: Collection[str]) -> None:
    """ValueError where the optimizer's groups are not those of a checkpoint, in any order of their parameters."""
    if len(groups) != len(stored):
        raise ValueError(f"the optimizer has {len(groups)} parameter groups, {path} has {len(stored)}")
    for i, (current, saved) in enumerate(zip(groups, stored, strict=True)):
        differing = sorted(set(current["params"]) ^ {name for name in saved["params"] if MODEL + name not in elsewhere})
        if differing:
            raise ValueError(f"group {i} of the optimizer has other parameters than {path}: {', '.join(differing[:4])}")
        for key in (current.keys() & saved.keys()) - {"params"}:
            if _kind(current[key]) != _kind(saved[key]):
                raise ValueError(
                    f"{key} of group {i} of the optimizer is {current[key]!r}, {path} has {str(saved[key])[:60]!r}"
                )


def check_numbers(place: object, groups: list[Group], optimizers: Iterable[Optimizer]) -> None:
    """ValueError where the groups of optimizers, or of a file, have a number by which nothing can be trained.

    An optimizer may have rules of its own, by the numbers' names, in an attribute ``rules``.
    """
    rules = [_RULES | getattr(optimizer, "rules", {}) for optimizer in optimizers for _ in optimizer.param_groups]
    for i, group in enumerate(groups):
        for key, rule in (rules[i] if i < len(rules) else _RULES).items():
            values = group.get(key)
            for value in values if isinstance(values, list | tuple) else [values]:
                if isinstance(value, int | float):
                    check_number(f"{key} of group {i} of {place}", value, rule)


def _kind(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return list, len(value), [_kind(v) for v in value][: 1 if value and isinstance(value[0], str) else None]
    if isinstance(value, bool) or value is None:
        return bool
    return float if isinstance(value, int | float) else type(value)


# ---- in ----


def fresh(path: Path, entries: Entries, stored: Stock, owners: Owners) -> dict[str, Piece]:
    """Returns new tensors on the CPU, for what this rank needs of a checkpoint, by its own names."""
    pieces = {}
    keys: dict[str, list[str]] = {}  # of the optimizer's state, by the parameter's name in the checkpoint
    for stored_key in stored if owners else ():
        if stored_key.startswith(STATE):
            keys.setdefault(parameter_of(stored_key), []).append(stored_key)
    for name, template in _model_pieces(entries).items():
        pieces[f"model.{name}"] = _empty(template, template.name, entries[name][0].dtype)
        owner, parameter = owners.get(stepped(entries[name][0])), template.name.removeprefix(MODEL)
        for stored_key in keys.get(parameter, ()):
            key = stored_key.rpartition(".")[2]
            dtype, shape = stored[stored_key]
            if owner is not None and not stored_key.startswith(NUMBER):
                weight = stored.get(f"{_TENSOR}{parameter}.{MAIN}", stored[template.name])
                dtype = owner.dtype_of(key, dtype, weight[0])
            if owner is not None and owner.keeps_whole(key):
                pieces[f"optimizer.{name}.{key}"] = full_piece(stored_key, torch.empty(shape, dtype=dtype))
            elif shape == template.shape:
                pieces[f"optimizer.{name}.{key}"] = _empty(template, stored_key, dtype)
            elif shape in ((), (1,)):
                pieces[f"optimizer.{name}.{key}"] = full_piece(stored_key, torch.empty(shape, dtype=dtype))
            else:
                raise ValueError(
                    f"{stored_key} of {path} is neither a number nor shaped as the parameter, it is {shape}"
                )
    return pieces


def fresh_buffers(model: nn.Module, stored: Stock) -> dict[str, Piece]:
    """Returns new tensors on the CPU, for the buffers that a checkpoint has, by their own names."""
    return {
        part.name: _empty(part, part.name, part.local.dtype)
        for part in buffer_pieces(model).values()
        if part.name in stored
    }


def _empty(template: Piece, name: str, dtype: torch.dtype) -> Piece:
    return template._replace(name=name, local=torch.empty(template.local.shape, dtype=dtype, device="cpu"))


def _keys(names: Iterable[str], prefix: str) -> list[str]:
    return [key for key in names if key.startswith(prefix) and "." not in key.removeprefix(prefix)]


def optimizer_state(entries: Entries, values_read: Values, owners: Owners) -> OptimizerState:
    """Returns the optimizers' state by parameter, of what was read, on the devices where an optimizer has it."""
    if not owners:
        return {}
    groups = [group for optimizer in {o.optimizer: None for o in owners.values()} for group in optimizer.param_groups]
    on_device = {p for g in groups if g.get("capturable") or g.get("fused") for p in g["params"]}
    state: dict[nn.Parameter, StateValues] = {}
    for name, (p, spec, _) in entries.items():
        prefix, owner = f"optimizer.{name}.", owners.get(stepped(p))
        values: StateValues = {}
        for key in _keys(values_read, prefix):
            if values_read[key].name.startswith(NUMBER):
                values[key.removeprefix(prefix)] = values_read[key].local.item()
                continue
            if owner is not None and owner.keeps_whole(key.removeprefix(prefix)):
                values[key.removeprefix(prefix)] = _of_matrix(values_read[key].local, owner)
                continue
            shaped = values_read[key].shape == values_read[f"model.{name}"].shape
            value = as_slice(values_read[key], spec) if shaped else values_read[key].local
            value = value.to(p.device if shaped or stepped(p) in on_device else "cpu")
            values[key.removeprefix(prefix)] = as_parameter(value, p) if shaped else value
        state[p] = values
    return state


def _of_matrix(x: Tensor, owner: Owner) -> Tensor:
    """Returns what was read of a whole matrix's state as its optimizer keeps it."""
    matrix = owner.weight
    if x.dim() == 0:
        return x
    if isinstance(matrix, DTensor) and not getattr(owner.optimizer, "local_state", False):
        return DTensor.from_local(x.to(matrix.device), matrix.device_mesh, [Replicate()], run_check=False)
    return x.to(matrix.device)


def as_slice(part: Piece, spec: Spec) -> Tensor:
    """Returns a piece shaped as a slice of the parameter: of a part that is joined with its groups without those."""
    joined = spec.origin is not None and len(spec.shape) < len(spec.origin.whole)
    return part.local.flatten(0, 1) if joined else part.local


def put_model(model: nn.Module, values_read: Values) -> None:
    for name, x in named_buffers(model).items():
        if f"{BUFFER}{name}" in values_read:
            value, x = values_read[f"{BUFFER}{name}"].local, local(x.detach())
            x.copy_(torch.view_as_complex(value) if x.is_complex() else value)
    for name, (p, spec, _) in entries_of(model).items():
        x = p.detach()
        local(x).copy_(as_slice(values_read[f"model.{name}"], spec))


def put_optimizers(optimizers: Sequence[Optimizer], state: OptimizerState, groups: list[Group]) -> None:
    owners = owners_of(optimizers)
    for p, values in state.items():
        weight, main = stepped(p), values.pop(MAIN, None)
        if (
            isinstance(main, Tensor) and weight is not p
        ):  # else it was written for training with a MainGrad, and this is not
            weight.detach().copy_(main)
        owner = owners.get(weight)
        if owner is not None:
            owner.optimizer.state.pop(owner.weight, None)
            if values:
                owner.optimizer.state[owner.weight] = values
    for group, saved in zip([g for optimizer in optimizers for g in optimizer.param_groups], groups, strict=True):
        for k, v in saved.items():
            if k != "params":
                group[k] = _placed(v, group.get(k))


def _placed(value: Any, current: Any) -> Any:
    """Returns a group's value as JSON had it, in the tensors of the current one: a compiled step holds on to them."""
    if isinstance(current, Tensor):
        return current.fill_(value)
    if not isinstance(value, list):
        return value
    alike = isinstance(current, list | tuple) and len(current) == len(value)
    return tuple(_placed(v, current[i] if alike else None) for i, v in enumerate(value))
