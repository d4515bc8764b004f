"""Tools that broadcast, average or scatter parameters over a group: refused where ranks of the group hold different
slices of one, before anything is sent or changed.

A table says what each tool is given and which ranks it would use; the rule is one.  Each rank decides by itself: the
ranks of a group see the same.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...kernels.runtime.main_grad import DDP, PLACES
from ...kernels.runtime.rules import listed
from ...layers.shards import SplitParameter, wholes
from ...layers.state import dtensors
from .known import any_split, keep, wholes_of

Arguments = Mapping[str, Any]
Named = Iterable[tuple[str, Tensor]]


class Tool(NamedTuple):
    """A tool: from its arguments the parameters that it would send, and the ranks between which (None: it is wrong at
    any)."""

    name: str
    parameters: Callable[[Arguments], Named]
    ranks: Callable[[Arguments], list[int] | None]
    cure: str
    advice: str = ""  # the cure of parameters that are no DTensors yet
    main_grad: str = ""  # the error of parameters whose gradients a MainGrad holds
    dtensors: bool = True  # whether it takes them
    composable: bool = False  # torch notes the call on the modules before it makes it
    ignores: bool = False  # it has ``ignored_params``: those of experts that are divided among replicas are


_signature = functools.cache(inspect.signature)


def refusing(tool: Tool) -> Callable[..., Any]:
    """Returns the replacement of a tool: a ValueError where :func:`error_of` has one, else the tool."""

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not any_split() and not (tool.main_grad and PLACES):
            return original(*args, **kwargs)
        try:
            bound = _signature(original).bind(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)  # which raises its own
        bound.arguments.update({k: list(v) for k, v in bound.arguments.items() if isinstance(v, Iterator)})
        experts = _experts(bound.arguments) if tool.ignores else set()
        if experts:
            bound.arguments["ignored_params"] = experts | set(bound.arguments.get("ignored_params") or ())
        arguments = bound.arguments | bound.arguments.get("kwargs", {})
        error = error_of(tool, arguments)
        if error is not None:
            if tool.composable:
                _unmark(original, arguments)
            raise ValueError(error)
        result = original(*bound.args, **bound.kwargs)
        keep()
        return result

    return around


def _experts(arguments: Arguments) -> set[nn.Parameter]:
    """Returns the parameters of experts that are divided among replicas, whose gradients are complete."""
    placements = wholes()
    parameters = (p for module in _modules(arguments) for p in module.parameters())
    return {p for p in parameters if p in placements and placements[p].tp.replicas > 1}


def _mixed(arguments: Arguments) -> str | None:
    """Returns the error of a policy that would change the dtype of all parameters but those of experts."""
    wanted = getattr(arguments.get("mp_policy"), "param_dtype", None)
    other = next((p.dtype for p in _experts(arguments) if wanted not in (None, p.dtype)), None)
    if other is None:
        return None
    return (
        f"fully_shard: param_dtype={wanted} of mp_policy does not reach experts that are divided among replicas, which"
        f" are of {other}; leave it off, and use torch.autocast"
    )


def _unmark(original: Callable[..., Any], arguments: Arguments) -> None:
    """Removes what torch has noted on the modules of a composable tool before the tool itself is called."""
    for module in _modules(arguments):
        vars(module).get(STATE_KEY, {}).pop(original, None)
        vars(module).get(REGISTRY_KEY, {}).pop(original.__name__, None)


def error_of(tool: Tool, arguments: Arguments) -> str | None:
    named = list(tool.parameters(arguments))
    if tool.main_grad and PLACES and any(p in PLACES for _, p in named):
        return tool.main_grad
    if tool.ignores and (mixed := _mixed(arguments)) is not None:
        return mixed
    placements = wholes_of([p for _, p in named])
    slices = [
        (name or f"a parameter of shape {placement.spec.shape}", p, placement)
        for (name, p), placement in zip(named, placements, strict=True)
        if placement is not None
    ]
    if not slices:
        return None
    if not tool.dtensors and (error := dtensor_error(tool.name, ((name, p) for name, p, _ in slices))) is not None:
        return error
    ranks = tool.ranks(arguments)
    wrong = [(name, p) for name, p, placement in slices if ranks is None or _differ(placement, ranks)]
    if not wrong:
        return None
    group = (
        "" if ranks is None else f", and its group ({listed([f'rank {rank}' for rank in ranks])}) holds several of them"
    )
    advice = "" if all(isinstance(p, DTensor) for _, p in wrong) else tool.advice
    cure = tool.cure
    if any(placement.tp.replicas > 1 for *_, placement in slices):
        advice, cure = "", _EXPERTS
    return (
        f"{tool.name}: tensor-parallel ranks hold different slices of {listed([name for name, _ in wrong])}{group};"
        f" {advice}{cure}"
    )


def dtensor_error(name: str, named: Named) -> str | None:
    """Returns the error of what takes no DTensors, where one of the parameters is one."""
    names = dtensors(named)
    return f"{name}: {listed(names)} is a DTensor, which FSDP2 takes; leave tpfuse.as_dtensor off" if names else None


def _differ(placement: SplitParameter, ranks: list[int]) -> bool:
    """Returns whether two of the ranks hold different slices."""
    members = dist.get_process_group_ranks(placement.tp.group)
    return len({i // placement.spec.copies for i, rank in enumerate(members) if rank in ranks}) > 1


# ---- parameters and ranks, from a tool's arguments ----


def _modules(arguments: Arguments) -> list[nn.Module]:
    module = arguments["module"]
    return [module] if isinstance(module, nn.Module) else list(module)


def _ddp_parameters(arguments: Arguments) -> Named:
    """DDP broadcasts frozen parameters too, and averages those that it delays by itself."""
    module = arguments["module"]
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    yield from ((name, p) for name, p in module.named_parameters() if name not in ignored)
    yield from arguments.get("delay_all_reduce_named_params") or ()


def _unmanaged(arguments: Arguments) -> Named:
    """Parameters that no FSDP2 module inside has taken, without those to be ignored."""
    from torch.distributed.fsdp import FSDPModule  # slow to import

    ignored, taken = set(arguments.get("ignored_modules") or ()), set(arguments.get("ignored_params") or ())
    for module in (inner for outer in _modules(arguments) for inner in outer.modules()):
        if module in ignored or isinstance(module, FSDPModule):
            taken.update(module.parameters())
    yield from ((n, p) for module in _modules(arguments) for n, p in module.named_parameters() if p not in taken)


def _flattened(arguments: Arguments) -> Named:
    states = list(arguments.get("ignored_states") or ())
    modules = [*(arguments.get("ignored_modules") or ()), *(x for x in states if isinstance(x, nn.Module))]
    ignored = {p for m in modules for p in m.parameters()} | {x for x in states if isinstance(x, Tensor)}
    yield from ((name, p) for name, p in arguments["module"].named_parameters() if p not in ignored)


def _tensor(arguments: Arguments) -> Named:
    yield "", arguments["tensor"]


def _group_ranks(arguments: Arguments) -> list[int]:
    mesh = arguments.get("device_mesh")
    return dist.get_process_group_ranks(arguments.get("process_group")) if mesh is None else _mesh_ranks(mesh)


def _sharded_ranks(arguments: Arguments) -> list[int]:
    """The ranks of FSDP2's mesh, or of those of its dimensions that ``dp_mesh_dims`` names."""
    mesh, dims = arguments.get("mesh"), arguments.get("dp_mesh_dims")
    if mesh is None:
        return dist.get_process_group_ranks(None)
    if dims is not None:
        dimensions = [
            name
            for names in (dims.replicate, dims.shard)
            for name in ([names] if isinstance(names, str) else names or ())
        ]
        mesh = mesh[tuple(name for name in mesh.mesh_dim_names or () if name in dimensions)]
    return _mesh_ranks(mesh)


def _one_dim_ranks(arguments: Arguments) -> list[int]:
    return dist.get_process_group_ranks(arguments["mesh"].get_group(arguments["mesh_dim"]))


def _mesh_ranks(mesh: DeviceMesh) -> list[int]:
    return mesh.mesh.flatten().tolist()


# ---- the tools ----

_EXPERTS = "experts are divided among the replicas; use tpfuse.data_parallel(model, mesh['dp']), which leaves them out"
_SAME = "the ranks that hold the same slices"
_DDP = 'pass process_group=mesh["dp"].get_group(), ' + _SAME
_REPLICATE = 'pass device_mesh=mesh["dp"], ' + _SAME
_FLAT = (
    "flattened, they would be slices of nothing that a norm or a checkpoint knows; use tpfuse.as_dtensor(model, mesh)"
    ' and fully_shard(..., mesh=mesh["dp"]), or DistributedDataParallel(model, process_group=mesh["dp"].get_group())'
)
WRAPPED = Tool("DistributedDataParallel", _ddp_parameters, _group_ranks, _DDP, main_grad=DDP, dtensors=False)
FSDP1 = Tool("FullyShardedDataParallel", _flattened, lambda arguments: None, _FLAT)
FSDP2 = Tool(
    "fully_shard",
    _unmanaged,
    _sharded_ranks,
    cure=f'pass mesh=mesh["dp"], {_SAME}',
    advice="call tpfuse.as_dtensor(model, mesh) first, and ",
    composable=True,
    ignores=True,
)
REPLICATE = WRAPPED._replace(name="replicate", parameters=_unmanaged, cure=_REPLICATE, composable=True)
REPLICATE_FSDP = FSDP2._replace(name="replicate")
DISTRIBUTE = Tool("distribute_tensor", _tensor, _one_dim_ranks, "tpfuse.as_dtensor(model, mesh) makes DTensors of them")
