"""Parameters as DTensors, zero-copy: for FSDP2 (``fully_shard``) and torch.distributed.checkpoint.

Layers hold plain local shards, because DDP, optimizers and torch.compile are at their best on those; where a tool
wants to know the whole, a shard's :class:`~tpfuse.layers.module.Spec` says it.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..kernels.runtime.main_grad import refuse
from ..layers.shards import named_specs
from ..layers.state import to_dtensor


def as_dtensor(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Replaces every parameter of ``model`` by a DTensor over the tensor-parallel mesh, in place and without a copy.

    Returns the model.  ``mesh`` is the tensor-parallel mesh, or one with a dimension named "tp".  Call it before
    ``fully_shard(..., mesh=mesh["dp"])`` and before the optimizer is made.  Experts that are divided among the replicas
    stay as they are, and ``fully_shard`` leaves them out.  FSDP2 adds over replicas in the order of its rings; beside
    ``bitwise`` :func:`tpfuse.data_parallel`, with bitwise_micro_batches, makes it a tree.  ValueError where the mesh is
    not of the model's tensor-parallel size, the model has a MainGrad, or no DTensor has its slices (of whole leaves).
    """
    if mesh.ndim > 1:
        if "tp" not in (mesh.mesh_dim_names or ()):
            raise ValueError(f"as_dtensor: a mesh of {mesh.ndim} dimensions must have one named 'tp', got {mesh}")
        mesh = mesh["tp"]
    error = "as_dtensor: the model's gradients are in main_grad; make DTensors of a model without a MainGrad"
    refuse(model.parameters(), error)
    specs = list(named_specs(model))
    for name, _, tp in specs:
        if tp.replicas > 1:
            continue
        if mesh.size() != tp.size:
            raise ValueError(f"as_dtensor: {name} is split over {tp.size} ranks, and the mesh has {mesh.size()}")
    replaced = {
        name: nn.Parameter(to_dtensor(p.detach(), spec, tp, mesh), requires_grad=p.requires_grad)
        for (name, p), (_, spec, tp) in zip(model.named_parameters(), specs, strict=True)
        if tp.replicas == 1
    }
    for name, parameter in replaced.items():
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path).register_parameter(leaf, parameter)
    return model
