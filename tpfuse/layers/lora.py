"""Low-rank adapters beside frozen weights (Hu et al. 2021, arXiv:2106.09685): y = x W' + s (x A') B', s = alpha / rank.

              x           A                       B                     u = x A'               y
    column    [m, K]      [r, P, K] replicated    [N/R, r]              [m, r P], gathered     [M, N/R]
    row       [M, K/R]    [r, K/R]                [N, r] replicated     [M, r], a part         [M, N], a part

Two thin GEMMs, not one with W + s B A: in 16 bits that sum would round a small update away, it would be a second copy
of the weights, and its gradient a full wgrad.  What travels beside the model's own messages is thin.  Column: A is
applied to this rank's rows before they are gathered, so u travels, r P numbers a row; under sequence parallelism A's
gradient is summed over the ranks' rows.  Row: the product joins the partial sum that is exchanged anyway; B's
gradient is summed over the ranks.  Both are complete after a bare backward.

A fused weight (q, k and v; gate and up) holds the rows of P projections, each with an A of its own.  Beside an
adapter the MLP's two GEMMs run one by one, and its activation is kept.  Those of experts: expert_lora.py.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..collectives import copy
from ..kernels.gemm.op import linear
from ..kernels.norm import Recompute
from ..kernels.runtime.errors import check
from ..kernels.runtime.leaves import cut
from ..kernels.runtime.main_grad import cast, derived
from ..kernels.runtime.op import acc_dtype
from ..kernels.runtime.rules import POSITIVE, SEED, check_number, integer, listed, quoted
from ..parallel import TensorParallel
from ..ranks.messages import together
from ..sequence_parallel import gather_linear
from .expert_lora import ExpertLoRA
from .linear import Adaptable, Adapter, Parts, RowParallelLinear
from .lora_targets import Chosen, adaptable_layers, base_of, chosen_layers
from .module import Origin, initialize, leaf_slices, local, on_pieces, on_rows, per_leaf, shards_of_replicas
from .moe import ParallelMoE
from .state import dtensors

_MAX_RANK = 1 << 16
TARGETS = "qkv", "out", "fc1", "fc2"
_ALONE = TensorParallel()


class ColumnLoRA(Adapter):
    """The adapter of a column-parallel layer: ``A`` [r, P, K], and a ``B`` [*shape, r] for each weight [*shape, K].

    ``adapted`` names the P projections; a weight's other projections (``parts``) have no rows in B, and no adapter.
    """

    A: nn.Parameter

    def _make(self, layer: Adaptable, add: Callable[..., None]) -> None:
        rank, parts, adapted = self.rank, self.parts, self.adapted
        width = next(iter(layer.specs[leaf].shape[-1] for leaf in parts))
        add("A", (rank, len(adapted), width), None, self.std_of(width))
        # weight -> this rank's shape, the name of its B, how many leaves share a slice
        self.leaves: dict[str, tuple[list[int], str | None, int]] = {}
        for leaf, projections in parts.items():
            spec, name = layer.specs[leaf], "B" if leaf == "weight" else f"B_{leaf}"
            width = sum(n for n, module in projections if module in adapted)
            shape = (spec.shape[0], width, *spec.shape[2:-1]) if len(projections) > 1 else spec.shape[:-1]
            origin = None if spec.origin is None else _of_whole(spec.origin, layer, parts, adapted, rank=rank)
            if width:
                add(name, (*shape, rank), 0, "zeros", copies=spec.leaf_copies, origin=origin)
            shape_here = [s.stop - s.start for s in spec.local(layer.tp)]
            self.leaves[leaf] = shape_here, name if width else None, spec.leaf_copies

    def block(self, leaf: str, b: Tensor | None = None) -> Tensor:
        """Returns B of one weight, or ``b`` in its place, as [N/R, r P]: a row has its own projection's columns, and
        zeros in the others'."""
        (*shape, _), name, _ = self.leaves[leaf]
        parts, rank = self.parts[leaf], len(self.A)
        ones = torch.eye(len(self.adapted), dtype=self.A.dtype, device=self.A.device)
        if name is None:
            return ones.new_zeros(math.prod(shape), rank * len(ones))
        b = local(getattr(self, name)) if b is None else b
        widths = [n for n, module in parts if module in self.adapted]
        pieces = iter(b.split(widths, 1) if len(parts) > 1 else (b,))
        blocks = [
            next(pieces)[..., None] * ones[self.adapted.index(module)]
            if module in self.adapted
            else b.new_zeros(shape[0], n, *shape[2:], rank, len(ones))
            for n, module in parts
        ]
        return (torch.cat(blocks, 1) if len(blocks) > 1 else blocks[0]).flatten(0, -3).flatten(1)

    def forward(self, n: Tensor, recompute: Recompute | None = None) -> Tensor:
        """n [m, K] or expanded [R, m, K] -> s (n A') B' [M, N/R]"""
        rows = n[0] if n.dim() == 3 else n
        u = self._thin(rows, recompute)
        names = [name for _, name, _ in self.leaves.values() if name is not None]
        b = derived(self._joined, *(local(getattr(self, name)) for name in names), dtype=u.dtype)
        return gather_linear(u, b, tp=self.tp)

    def _thin(self, rows: Tensor, recompute: Recompute | None) -> Tensor:
        """rows [m, K] -> u [m, r P], with ``tp.bitwise`` by leaves of the rows."""
        if self.tp.bitwise is None:
            a = derived(lambda a: on_rows(a, self.tp).flatten(0, 1), local(self.A), dtype=rows.dtype)
            return gather_linear(rows, a, tp=_ALONE, recompute=recompute)
        leaves = self.tp.row_leaves
        pieces = cut("ColumnLoRA", rows, 0, leaves)
        recipes = [None] * leaves if recompute is None else recompute.split(len(pieces[0]))
        weights = per_leaf(on_rows(local(self.A), self.tp).flatten(0, 1), leaves)  # their gradients are added in fp32
        of_leaves = zip(pieces, weights, recipes, strict=True)
        return torch.cat([gather_linear(x, a.to(x.dtype), tp=_ALONE, recompute=recipe) for x, a, recipe in of_leaves])

    def _joined(self, *weights: Tensor) -> Tensor:
        """Takes the B of each weight that has one -> [N/R, r P] of all weights, leaf by leaf, times s."""
        remaining, blocks = iter(weights), []
        for leaf, ((n, *_), name, copies) in self.leaves.items():
            block = self.block(leaf, None if name is None else next(remaining))
            blocks.append(leaf_slices(on_pieces(block, self.tp).unflatten(0, (n, -1)), self.tp, copies))
        return torch.cat([piece.flatten(0, 1) for leaf in zip(*blocks, strict=True) for piece in leaf]) * self.scale

    def deltas(self) -> dict[str, Tensor]:
        a = local(self.A).flatten(0, 1)
        return {leaf: self.scale * (self.block(leaf) @ a).view(shape) for leaf, (shape, *_) in self.leaves.items()}


def _of_whole(part: Origin, layer: Adaptable, parts: Parts, adapted: list[str], *, rank: int) -> Origin:
    """Returns where B of a part of a weight lies in the B of the whole weight, which has the adapted rows alone."""
    rows: dict[int, int] = {}  # that B has of a group, by where the part of the weight begins
    for leaf, projections in parts.items():
        spec = layer.specs[leaf]
        assert spec.origin is not None
        if len(projections) > 1:
            rows[spec.origin.start] = sum(n for n, module in projections if module in adapted)
        else:
            rows[spec.origin.start] = spec.origin.rows(spec.shape) if projections[0][1] in adapted else 0
    start = sum(n for first, n in rows.items() if first < part.start)
    groups, _, *inner, _ = part.whole
    return Origin("B", (groups, sum(rows.values()), *inner, rank), start)


class RowLoRA(Adapter):
    """The adapter of a row-parallel layer: ``A`` [r, K], split as the weight is, and ``B`` [N, r]."""

    A: nn.Parameter
    B: nn.Parameter

    def _make(self, layer: RowParallelLinear, add: Callable[..., None]) -> None:
        add("A", (self.rank, layer.in_features), 1, self.std_of(layer.in_features))
        add("B", (layer.out_features, self.rank), None, "zeros")

    def forward(self, x: Tensor) -> Tensor:
        """x [M, K/R] -> this rank's part of s (x A') B' [M, N]"""
        u = linear(x, cast(on_pieces(self.A, self.tp), x.dtype))
        whole = lambda b: copy(on_pieces(b, self.tp), self.tp) * self.scale
        return linear(u, derived(whole, local(self.B), dtype=u.dtype))

    def of_leaves(self, xs: Sequence[Tensor]) -> list[Tensor]:
        a = cut("RowLoRA", local(self.A), 1, len(xs))
        b = per_leaf(copy(local(self.B), self.tp) * self.scale, len(xs))
        return [linear(linear(x, a_v.to(x.dtype)), b_v.to(x.dtype)) for x, a_v, b_v in zip(xs, a, b, strict=True)]

    def deltas(self) -> dict[str, Tensor]:
        return {"weight": self.scale * (local(self.B) @ local(self.A))}


# ---- a model's ----


def add_lora(
    model: nn.Module, *, rank: int, alpha: float, dropout: float = 0.0, targets: Sequence[str] = TARGETS, seed: int = 0
) -> nn.Module:
    """Freezes ``model`` and adds adapters of ``rank`` to the linear layers that ``targets`` name, in place.

    Returns the model.  A classification head is left to be trained, as PEFT leaves it.  A target is a layer's name here
    ("qkv", "out", "fc1", "fc2"; in another module its attribute's name) or that of a module of the Hugging Face model
    ("q_proj", "attn.c_proj", or all of its path), and of experts that of a parameter ("experts.gate_up_proj").  The
    names of an expert's projections ("gate_proj" and "up_proj", both or none) are that parameter's too, whose rank then
    is twice as large, as in PEFT.  A is N(0, 1 / 3K), by Philox of (``seed``, name, global index), the same bits at
    every split; B is 0, so nothing changes until it is trained.  Adapters are fp32 beside 16-bit weights.  Call it
    before the optimizer is made and before DDP and ``as_dtensor``.
    ValueError, on every rank if on one, for a target that does not exist, or is a router or a shared expert, whose
    adapters are not built, a second call, a model of DTensors, or ``dropout``, which is not built.  ``state_dict()``
    has A and B, not ``alpha`` nor whether they are merged, which ``load_checkpoint`` compares.
    """
    base, layers = base_of(model), list(adaptable_layers(model))

    def choose() -> list[Chosen]:
        check(dropout == 0, f"add_lora: dropout on an adapter's input is not built, got dropout={dropout}")
        check_number("add_lora: alpha", alpha, POSITIVE)
        check_number("add_lora: seed", seed, SEED)
        check_number("add_lora: rank", rank, integer(1, _MAX_RANK))
        listed_names = isinstance(targets, list | tuple | set | frozenset) and all(isinstance(t, str) for t in targets)
        check(listed_names, f"add_lora: targets must be names of layers, got {quoted(targets)}")
        check(bool(layers), f"add_lora: {type(model).__name__} has no tensor-parallel linear layer")
        check(
            all(layer.tp.batch_invariant is None for _, layer in layers),
            "add_lora: adapters are not built for batch_invariant, whose GEMMs are in tiles of rows",
        )
        check(all(layer.lora is None for _, layer in layers), "add_lora: the model has adapters already")
        names = dtensors(model.named_parameters())
        check(not names, f"add_lora: {listed(names)} is a DTensor; call add_lora before as_dtensor and fully_shard")
        return chosen_layers("add_lora", base, targets)

    chosen = together(choose, _groups(layer for _, layer in layers))
    chosen[0].layer.tp.agree("add_lora", dict(rank=rank, alpha=alpha, targets=tuple(sorted(targets)), seed=seed))
    model.requires_grad_(False)
    for module in trained_modules(base).values():
        module.requires_grad_(True)
    for path, layer, parts, adapted, apart in chosen:
        weight = local(layer.get_parameter(next(iter(parts))))
        dtype, device = torch.promote_types(weight.dtype, torch.float32), weight.device
        expert, row = isinstance(layer, ParallelMoE), isinstance(layer, RowParallelLinear)
        kind = ExpertLoRA if expert else RowLoRA if row else ColumnLoRA
        layer.lora = kind(layer, parts, adapted, rank=rank, alpha=alpha, apart=apart, dtype=dtype, device=device)
        if not weight.is_meta:
            initialize(layer.lora, seed, prefix=f"{path}.lora.")
    return model


def merge_lora(model: nn.Module) -> nn.Module:
    """Adds s B A to the weights, in place, in fp32 and rounded once; adapters are idle until :func:`unmerge_lora`.

    ValueError, on every rank if on one, for a model without adapters, merged ones, and one that ``fully_shard`` has
    sharded.
    """
    return _merge(model, 1)


def unmerge_lora(model: nn.Module) -> nn.Module:
    """Subtracts s B A from the weights again, to rounding."""
    return _merge(model, -1)


@torch.no_grad()
def _merge(model: nn.Module, sign: int) -> nn.Module:
    layers = [(layer, lora) for _, layer, lora in adapted_layers(model)]
    name = "merge_lora" if sign > 0 else "unmerge_lora"

    def check_state() -> None:
        check(bool(layers), f"{name}: the model has no adapters")
        check(
            all(lora.merged == (sign < 0) for _, lora in layers),
            f"{name}: the adapters are {'' if sign > 0 else 'not '}merged already",
        )
        for shard in (shard for pair in layers for module in pair for shard in shards_of_replicas(module)):
            raise ValueError(f"{name}: {shard}; save_adapter, and merge it in a model that is not sharded")

    together(check_state, _groups(layer for _, layer in adaptable_layers(model)))
    for layer, lora in layers:
        for leaf, delta in lora.deltas().items():
            w = local(layer.get_parameter(leaf))
            w.copy_(w.to(acc_dtype(w)) + sign * delta)
        lora.merged = sign > 0
    return model


def _groups(layers: Iterable[Adaptable]) -> list[dist.ProcessGroup]:
    """Returns the groups whose ranks call a function of adapters together."""
    return [*dict.fromkeys(group for layer in layers if (group := layer.tp.call_group) is not None)]


def trained_modules(base: Any) -> dict[str, nn.Module]:
    """Returns what is trained beside adapters, and kept in their files, by its name in a Hugging Face file."""
    return base.files.beside_adapters() if hasattr(base, "files") else {}


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Adaptable, Adapter]]:
    """Yields (path, layer, its adapter) of every layer that has one."""
    return ((path, layer, layer.lora) for path, layer in adaptable_layers(model) if layer.lora is not None)
