"""The cost of one call of an op that is not tpfuse's: flops by torch's own formulas, bytes as if in one pass.

One pass means every input once and every output once, which is the lower bound; an op that really reads twice (a
two-pass norm) is counted too low, never too high.  Views move nothing, an op in place reads and writes what it
changes, a lookup reads the rows that it looks up.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ...kernels.runtime.op import ATTENTION, COMMUNICATION, ELEMENTWISE, GEMM, KINDS, NORM, Cost, moved

__all__ = ["ATTENTION", "COMMUNICATION", "ELEMENTWISE", "GEMM", "KINDS", "NORM", "cost", "kind"]

_UNTOUCHED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_UNTOUCHED |= {"_unsafe_view", "_reshape_alias", "alias", "lift_fresh"}
_WRITE_ONLY = {"copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_"}
_LOOKUPS = {"embedding", "index", "index_select", "gather"}
_NORMS = ("layer_norm", "rms_norm", "batch_norm", "group_norm", "softmax")


def kind(name: str, namespace: str) -> str:
    """Returns the kind of an op, one of KINDS."""
    if namespace in ("c10d", "_c10d_functional"):
        return COMMUNICATION
    if "scaled_dot_product" in name or "flash_attention" in name or "efficient_attention" in name:
        return ATTENTION
    if name in ("mm", "addmm", "bmm", "baddbmm") or "convolution" in name:
        return GEMM
    return NORM if any(norm in name for norm in _NORMS) else ELEMENTWISE


def cost(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: object) -> Cost:
    name, schema = func._schema.name.split("::")[1], func._schema
    if name in _UNTOUCHED or _is_view(schema):
        return Cost(0, 0)
    values = dict(zip((a.name for a in schema.arguments), args)) | kwargs
    changed = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    written = _tensors([outputs, [values.get(key) for key in changed]])
    read = {
        key: value for key, value in values.items() if key != "out" and not (key in changed and name in _WRITE_ONLY)
    }
    if name in _LOOKUPS:
        table = schema.arguments[0].name
        read = {key: value for key, value in read.items() if key != table} | {"looked up": outputs}
    flops = flop_registry.get(func._overloadpacket)
    return Cost(
        moved(*_tensors(read)), moved(*written), 0 if flops is None else int(flops(*args, **kwargs, out_val=outputs))
    )


def _is_view(schema: torch._C.FunctionSchema) -> bool:
    """Returns True where every output is a window on an input."""
    aliases = [r.alias_info for r in schema.returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


def _tensors(tree: object) -> list[Tensor]:
    """Returns the tensors in a tree, each once."""
    return list({id(t): t for t in tree_leaves(tree) if isinstance(t, Tensor)}.values())
