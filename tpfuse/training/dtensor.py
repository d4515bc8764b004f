"""Parameters as DTensors, zero-copy: for FSDP2 (``fully_shard``) and torch.distributed.checkpoint.

Layers hold plain local shards, because DDP, optimizers and torch.compile are at their best on those; where a tool
wants to know the whole, a shard's :class:`~tpfuse.layers.module.Spec` says it.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..kernels.runtime.errors import check
from ..kernels.runtime.main_grad import refuse
from ..kernels.runtime.rules import listed
from ..layers.shards import named_specs, owned
from ..layers.state import dtensors, is_split, to_dtensor
from .dropped import drop


def as_dtensor(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Replaces every parameter of ``model`` by a DTensor over the tensor-parallel mesh, in place and without a copy.

    Returns the model.  ``mesh`` is the tensor-parallel mesh, or one with a dimension named "tp".  Call it before
    ``fully_shard(..., mesh=mesh["dp"])`` and before the optimizer is made.  A parameter that modules share stays one.
    Experts that are divided among the replicas stay as they are, and ``fully_shard`` leaves them out.  FSDP2 adds over
    replicas in the order of its rings; beside ``bitwise`` :func:`tpfuse.data_parallel`, with bitwise_micro_batches,
    makes it a tree.  ValueError where the mesh is not of the model's tensor-parallel size, the model has a MainGrad or
    DTensors, no DTensor has its slices (of whole leaves), or modules share a tensor for slices of different wholes.
    """
    if mesh.ndim > 1:
        if "tp" not in (mesh.mesh_dim_names or ()):
            raise ValueError(f"as_dtensor: a mesh of {mesh.ndim} dimensions must have one named 'tp', got {mesh}")
        mesh = mesh["tp"]
    error = "as_dtensor: the model's gradients are in main_grad; make DTensors of a model without a MainGrad"
    refuse(model.parameters(), error)
    names = dtensors(model.named_parameters())
    check(not names, f"as_dtensor: {listed(names)} is a DTensor already; call as_dtensor once, before fully_shard")
    specs = list(named_specs(model))
    for name, *_, tp in specs:
        if tp.replicas > 1:
            continue
        if mesh.size() != tp.size:
            ranks = f"split over {tp.size} ranks" if tp.size > 1 else "of a module without tp (see tpfuse.replicated)"
            raise ValueError(f"as_dtensor: {name} is {ranks}, and the mesh has {mesh.size()}")
    aliases = _aliases(model)
    replaced = {
        p: nn.Parameter(to_dtensor(p.detach(), spec, tp, mesh), requires_grad=p.requires_grad)
        for _, p, spec, tp in specs
        if tp.replicas == 1
    }
    for p, parameter in replaced.items():
        for name in aliases[p]:
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path).register_parameter(leaf, parameter)
    drop(replaced, "as_dtensor")
    return model


def _aliases(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Returns the names of every parameter, in the order of named_parameters: several of one that modules share.

    ValueError where two of the modules take the tensor for slices of different wholes: no DTensor is both.
    """
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(p, []).append(name)
    placements = {
        f"{path}.{leaf}".lstrip("."): (spec.spread, spec.dim, spec.copies)
        for path, module in model.named_modules(remove_duplicate=False)
        for leaf, _, spec, tp in owned(module)
        if is_split(spec, tp)
    }
    for p, names in aliases.items():
        wholes = {placements.get(name, (tuple(p.shape), None, 1)): name for name in names}
        check(
            len(wholes) == 1,
            f"as_dtensor: {listed(names)} are one tensor, which is a slice of different wholes:"
            f" {listed([f'{name} of {shape} along {dim}' for (shape, dim, _), name in wholes.items()])}; untie them",
        )
    return aliases
