"""Low-rank adapters beside frozen weights (Hu et al. 2021, arXiv:2106.09685): y = x W' + s (x A') B', s = alpha / rank.

              x           A                       B                     u = x A'               y
    column    [m, K]      [r, P, K] replicated    [N/R, r]              [m, r P], gathered     [M, N/R]
    row       [M, K/R]    [r, K/R]                [N, r] replicated     [M, r], a part         [M, N], a part

Two thin GEMMs, not one with W + s B A: in 16 bits that sum would round a small update away, it would be a second copy of the weights, and
its gradient a full wgrad.  What travels beside the model's own messages is thin.  Column: A is applied to this rank's rows before they are
gathered, so u travels, r P numbers a row; under sequence parallelism A's gradient is summed over the ranks' rows.  Row: the product joins
the partial sum that is exchanged anyway; B's gradient is summed over the ranks.  Both are complete after a bare backward.

A fused weight (q, k and v; gate and up) holds the rows of P projections, each with an A of its own.  Beside an adapter the MLP's two GEMMs
run one by one, and its activation is kept.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ..collectives import copy, copy_within
from ..kernels._op import acc_dtype, check
from ..kernels.linear import linear
from ..kernels.norm import Remake
from ..parallel import TensorParallel
from ..sequence_parallel import gather_linear
from ._module import ParallelModule, initialize, local, on_rows
from .linear import Adaptable, RowParallelLinear

TARGETS = "qkv", "out", "fc1", "fc2"
_ALONE = TensorParallel()

Parts = dict[str, list[tuple[int, str]]]  # of a layer: weight -> (indices of its dimension 1, name) of each projection that it holds


class ColumnLoRA(ParallelModule):
    """The adapter of a column-parallel layer: ``A`` [r, P, K], and for each of its weights [*shape, K] a ``B`` [*shape, r].

    ``modules`` names the P projections; a weight's other projections (``parts``) have no rows in B, and no adapter.
    """

    merged = False

    def __init__(self, layer: Adaptable, parts: Parts, modules: list[str], rank: int, alpha: float, **factory):
        super().__init__(layer.tp)
        self.parts, self.modules, self.scale = parts, modules, alpha / rank
        width = next(iter(layer.specs[leaf].shape[-1] for leaf in parts))
        self.add_parameter("A", (rank, len(modules), width), None, _std(width), **factory)
        self.leaves = {}  # weight -> this rank's shape, and the name of its B
        for leaf, projections in parts.items():
            spec, name = layer.specs[leaf], "B" if leaf == "weight" else f"B_{leaf}"
            adapted = sum(n for n, module in projections if module in modules)
            shape = (spec.shape[0], adapted, *spec.shape[2:-1]) if len(projections) > 1 else spec.shape[:-1]
            if adapted:
                self.add_parameter(name, (*shape, rank), 0, "zeros", copies=spec.copies, **factory)
            self.leaves[leaf] = [s.stop - s.start for s in spec.local(layer.tp)], name if adapted else None

    def block(self, leaf: str) -> Tensor:
        """B of one weight as [N/R, r P]: a row has the columns of its own projection, and zeros in the others'."""
        (*shape, _), name = self.leaves[leaf]
        parts, rank, ones = self.parts[leaf], len(self.A), torch.eye(len(self.modules), dtype=self.A.dtype, device=self.A.device)
        if name is None:
            return ones.new_zeros(math.prod(shape), rank * len(ones))
        b = copy_within(local(getattr(self, name)), self.tp, self.specs[name].copies)
        widths = [n for n, module in parts if module in self.modules]
        pieces = iter(b.split(widths, 1) if len(parts) > 1 else (b,))
        blocks = [
            next(pieces)[..., None] * ones[self.modules.index(module)]
            if module in self.modules
            else b.new_zeros(shape[0], n, *shape[2:], rank, len(ones))
            for n, module in parts
        ]
        return (torch.cat(blocks, 1) if len(blocks) > 1 else blocks[0]).flatten(0, -3).flatten(1)

    def forward(self, n: Tensor, remake: Remake | None = None) -> Tensor:
        """n [m, K] or expanded [R, m, K] -> s (n A') B' [M, N/R]"""
        rows = n[0] if n.dim() == 3 else n
        a = on_rows(local(self.A), self.tp).flatten(0, 1).to(rows.dtype)
        u = gather_linear(rows, a, tp=_ALONE, remake=remake)
        b = torch.cat([self.block(leaf) for leaf in self.parts]) * self.scale
        return gather_linear(u, b.to(u.dtype), tp=self.tp)

    def deltas(self) -> dict[str, Tensor]:
        """s B A of each weight, this rank's slice"""
        a = local(self.A).flatten(0, 1)
        return {leaf: self.scale * (self.block(leaf) @ a).view(shape) for leaf, (shape, _) in self.leaves.items()}


class RowLoRA(ParallelModule):
    """The adapter of a row-parallel layer: ``A`` [r, K], split as the weight is, and ``B`` [N, r]."""

    merged = False

    def __init__(self, layer: RowParallelLinear, parts: Parts, modules: list[str], rank: int, alpha: float, **factory):
        super().__init__(layer.tp)
        self.parts, self.modules, self.scale = parts, modules, alpha / rank
        self.add_parameter("A", (rank, layer.in_features), 1, _std(layer.in_features), **factory)
        self.add_parameter("B", (layer.out_features, rank), None, "zeros", **factory)

    def forward(self, x: Tensor) -> Tensor:
        """x [M, K/R] -> this rank's part of s (x A') B' [M, N]"""
        u = linear(x, local(self.A).to(x.dtype))
        return linear(u, (copy(local(self.B), self.tp) * self.scale).to(u.dtype))

    def deltas(self) -> dict[str, Tensor]:
        return {"weight": self.scale * (local(self.B) @ local(self.A))}


def _std(width: int) -> float:
    """That of PEFT's uniform A in (-1, 1) / sqrt(K)."""
    return (3 * width) ** -0.5


# ---- a model's ----


def add_lora(
    model: nn.Module, *, rank: int, alpha: float, dropout: float = 0.0, targets: Sequence[str] = TARGETS, seed: int = 0
) -> nn.Module:
    """Freezes ``model`` and adds adapters of ``rank`` to the linear layers that ``targets`` name, in place; returns the model.

    A target is a layer's name here ("qkv", "out", "fc1", "fc2"; in somebody else's module what its attribute is called) or that of a
    module of the Hugging Face model ("q_proj", "attn.c_proj", or all of its path).  A is N(0, 1 / 3K), by Philox of (``seed``, name,
    global index), the same bits at every split; B is 0, so nothing changes until it is trained.  Adapters are fp32 beside 16-bit weights.
    Call it before the optimizer is made and before DDP.  ValueError for a target that is not there, a second call, or ``dropout``, which
    is not built.
    """
    check(dropout == 0, f"add_lora: dropout on an adapter's input is not built, got dropout={dropout}")
    check(isinstance(rank, int) and rank >= 1, f"add_lora: rank must be a positive integer, got {rank!r}")
    base, layers = base_of(model), list(_linears(model))
    check(bool(layers), f"add_lora: {type(model).__name__} has no tensor-parallel linear layer")
    check(all(layer.lora is None for _, layer in layers), "add_lora: the model has adapters already")
    chosen, found = [], set()
    for path, layer in layers:
        parts = _parts(base, path, layer)
        names = list(dict.fromkeys(name for projections in parts.values() for _, name in projections))
        here = {t for t in targets if t == path.rpartition(".")[2]}
        hits = {name: here | {t for t in targets if f".{name}".endswith(f".{t}")} for name in names}
        found.update(*hits.values())
        if any(hits.values()):
            chosen.append((path, layer, parts, [name for name in names if hits[name]]))
    missing = [t for t in targets if t not in found]
    check(
        bool(chosen) and not missing, f"add_lora: no layer is called {', '.join(missing) or 'anything'}; there are {_known(base, layers)}"
    )
    chosen[0][1].tp.agree("add_lora: rank, alpha, targets, seed", (rank, alpha, tuple(targets), seed))
    model.requires_grad_(False)
    for path, layer, parts, modules in chosen:
        weight = local(getattr(layer, next(iter(parts))))
        factory = dict(dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
        kind = RowLoRA if isinstance(layer, RowParallelLinear) else ColumnLoRA
        layer.lora = kind(layer, parts, modules, rank, alpha, **factory)
        if not weight.is_meta:
            initialize(layer.lora, seed, prefix=f"{path}.lora.")
    return model


def merge_lora(model: nn.Module) -> nn.Module:
    """Adds s B A to the weights, in place, in fp32 and rounded once; the adapters rest until :func:`unmerge_lora`."""
    return _merge(model, 1)


def unmerge_lora(model: nn.Module) -> nn.Module:
    """Takes s B A from the weights again, to rounding."""
    return _merge(model, -1)


@torch.no_grad()
def _merge(model: nn.Module, sign: int) -> nn.Module:
    adapted = [layer for _, layer in adapted_layers(model)]
    name = "merge_lora" if sign > 0 else "unmerge_lora"
    check(bool(adapted), f"{name}: the model has no adapters")
    check(all(layer.lora.merged == (sign < 0) for layer in adapted), f"{name}: the adapters are {'' if sign > 0 else 'not '}merged already")
    for layer in adapted:
        for leaf, delta in layer.lora.deltas().items():
            w = local(getattr(layer, leaf))
            w.copy_(w.to(acc_dtype(w)) + sign * delta)
        layer.lora.merged = sign > 0
    return model


def base_of(model: nn.Module) -> nn.Module:
    """The model of ours inside a wrapper, which knows names of Hugging Face; else the module itself."""
    return next((m for m in model.modules() if hasattr(m, "sources")), model)


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Adaptable]]:
    return ((path, layer) for path, layer in _linears(model) if layer.lora is not None)


def _linears(model: nn.Module) -> Iterator[tuple[str, Adaptable]]:
    return ((path, m) for path, m in base_of(model).named_modules() if isinstance(m, Adaptable))


def _parts(base: nn.Module, path: str, layer: Adaptable) -> Parts:
    """By the Hugging Face tensors that each weight is made of; without them a weight is one projection."""
    leaves = [leaf for leaf, spec in layer.specs.items() if "bias" not in leaf]
    sources = base.sources() if hasattr(base, "sources") else {}
    if f"{path}.{leaves[0]}" not in sources:
        return {leaf: [(1, path)] for leaf in leaves}
    found = {leaf: sources[f"{path}.{leaf}"] for leaf in leaves}
    named = lambda s: [base.hf_name(name).removesuffix(".weight") for name in s.names]  # noqa: E731
    return {leaf: list(zip(s.widths, named(s), strict=True)) for leaf, s in found.items()}


def _known(base: nn.Module, layers: list[tuple[str, Adaptable]]) -> str:
    ours = {path.rpartition(".")[2] for path, _ in layers}
    theirs = {name.rpartition(".")[2] for path, layer in layers for ps in _parts(base, path, layer).values() for _, name in ps}
    return ", ".join(sorted(ours | theirs))
