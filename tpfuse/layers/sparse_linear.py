"""A linear layer whose weight is pruned and quantised, for inference alone.

    y = (int8(x / t) int(W / s)') t s + b          the product in integers, exactly

    s_n  scale of a row of W, which is pruned in vectors (kernels/sparse)
    t_m  scale of a row of x, which is rounded when it comes: its largest magnitude / 127

             x         W         out       messages
    column   [m, K]    [N/R, K]  [M, N/R]  rows of int8 and their t are gathered
    row      [M, K/R]  [N, K/R]  [m, N]    largest magnitudes; parts int32, exchanged and added

What is chosen, pruned and rounded is of whole rows of W and x, and integers are added exactly: every number of ranks
gives the same bits.
"""

import pathlib
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..collectives import collect, gather, reduce, scatter_sum
from ..kernels.runtime.errors import check
from ..kernels.runtime.op import acc_dtype
from ..kernels.runtime.rules import described
from ..kernels.sparse import Pattern, SparseInt
from ..kernels.sparse.format import Vectors
from ..kernels.sparse.op import sparse_matmul_op
from ..parallel import TensorParallel
from ..ranks import messages
from .linear import Adaptable, ColumnParallelLinear, RowParallelLinear
from .module import ParallelModule, check_width

SPLITS = {"column": 0, "row": 1}  # the dimension of W that ranks divide
LARGEST = 127  # magnitude of x in int8
FORMAT = "tpfuse sparse linear 1"
NUMBERS = "rows", "columns", "block", "bits"  # of a file's metadata, beside the format and the split


class SparseLinear(ParallelModule):
    """x W' + b of a pruned, quantised W [N, K]: as ColumnParallelLinear does it, x [..., K] -> [M, N/R], or with
    ``split="row"`` as RowParallelLinear, x [..., K/R] -> [m, N].

    ``weight`` and ``bias`` [N] are whole, on every rank; it keeps its slices.  The dtype is x's.  There is no gradient,
    there are no parameters, and a state dictionary holds nothing of it: :meth:`save` and :meth:`load` do.  ValueError
    where ranks do not divide W, by columns in whole strips.
    """

    shards_input = True
    repr_fields = "in_features", "out_features", "split", "bits", "density"

    def __init__(
        self, weight: SparseInt, bias: Tensor | None = None, *, split: str = "column", tp: TensorParallel | None = None
    ):
        super().__init__(tp)
        check(split in SPLITS, f"SparseLinear: split must be column or row, got {split!r}")
        self.split, self.bits, self.block = split, weight.bits, weight.pattern.block
        self.out_features, self.in_features = weight.shape
        self.density = round(weight.pattern.density, 4)
        check(
            bias is None or (bias.shape == (self.out_features,) and bias.is_floating_point()),
            f"SparseLinear: bias must be floating [{self.out_features}] or None, got {described(bias)}",
        )
        dim, scale = SPLITS[split], weight.scale
        n = self.tp.divide(weight.shape[dim], f"SparseLinear: {('out_features', 'in_features')[dim]}")
        first = self.tp.rank * n
        check(
            dim == 1 or self.tp.size == 1 or n % self.block == 0,
            f"SparseLinear: out_features={self.out_features} gives each of {self.tp.size} ranks {n} rows, which strips"
            f" of {self.block} do not divide; use a smaller block, or split='row'",
        )
        mine = weight.narrow(dim, first, first + n)
        if scale is None:
            scale = torch.ones(weight.shape[0], device=weight.values.device)
        if dim == 0:
            scale, bias = scale[first : first + n], None if bias is None else bias[first : first + n]
        self.rows, self.width = mine.shape
        buffers = dict(values=mine.values, index=mine.pattern.index, offsets=mine.pattern.offsets)
        # bits of the scales, so that a module that is cast to 16 bits keeps them
        buffers |= dict(scale_bits=scale.contiguous().view(torch.int32), bias=bias)
        for name, buffer in buffers.items():
            self.register_buffer(name, None if buffer is None else buffer.detach().clone(), persistent=False)
        self.compare_alone()

    @staticmethod
    def from_layer(
        layer: nn.Module,
        density: float,
        *,
        block: int = 8,
        bits: int = 8,
        split: str = "column",
        tp: TensorParallel | None = None,
    ) -> "SparseLinear":
        """Makes one of a trained layer, as :meth:`SparseInt.from_dense` prunes.

        ``layer``: a ColumnParallelLinear or RowParallelLinear, whose split and ranks it takes, or a torch.nn.Linear,
        the same on every rank, for ``split`` and ``tp``.  Each rank holds the whole weight for a moment.  A collective
        call.  ValueError for another layer, one with an activation, and one with an adapter that is not merged.
        """
        with torch.no_grad():
            if isinstance(layer, Adaptable):
                check(layer.adapter is None, "SparseLinear: layer has an adapter; merge it into the weight before")
                tp = layer.tp
            bias: Any = getattr(layer, "bias", None)
            if isinstance(layer, ColumnParallelLinear):
                check(
                    layer.activation == "none",
                    f"SparseLinear: layer must have no activation, got {layer.activation!r}: apply it after",
                )
                split, (weight, bias) = "column", layer.flat()
                weight = collect(weight, layer.tp, size=layer.out_features)
                bias = None if bias is None else collect(bias, layer.tp, size=layer.out_features)
            elif isinstance(layer, RowParallelLinear):
                split, weight = "row", collect(layer.weight, layer.tp, 1, size=layer.in_features)
            else:
                check(
                    isinstance(layer, nn.Linear),
                    "SparseLinear: layer must be a ColumnParallelLinear, a RowParallelLinear or a torch.nn.Linear,"
                    f" got a {type(layer).__name__}",
                )
                weight = layer.weight
            sparse = SparseInt.from_dense(weight, density, block, bits)
        return SparseLinear(sparse, bias, split=split, tp=tp)

    @property
    def vectors(self) -> Vectors:
        """This rank's slice, as kernels read it."""
        return Vectors(self.values, self.index, self.offsets, self.rows, self.bits)

    @property
    def scale(self) -> Tensor:
        """Scale of each row, fp32."""
        return self.scale_bits.view(torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K], or [..., K/R] split by rows -> [M, N/R] or [m, N], in x's dtype.

        A row with NaN or an infinity gives NaN.  ValueError for another width, and where a gradient of x would be
        needed.
        """
        check_width("SparseLinear", x, self.width)
        check(
            not (torch.is_grad_enabled() and x.requires_grad),
            "SparseLinear: x must need no gradient, for there is none: it is for inference, under torch.no_grad()",
        )
        x = x.reshape(-1, self.width)
        largest = x.abs().amax(1).to(acc_dtype(x))
        tp, gathered = self.tp, self.split == "column" and self.tp.sequence_parallel
        if self.split == "row":
            largest = gather(largest[None], tp).amax(0)
        scale = torch.where(largest == 0, 1.0, largest / LARGEST)
        numbers = (x / scale[:, None]).round().clamp(-LARGEST, LARGEST).to(torch.int8)
        if gathered:
            numbers, scale = gather(numbers, tp), gather(scale, tp)
        y = sparse_matmul_op(self.vectors, numbers.t().contiguous()).t()
        if self.split == "row":
            y = scatter_sum(y, tp) if tp.sequence_parallel else reduce(y.contiguous(), tp)
            scale = scale.tensor_split(tp.row_shards)[tp.row_rank]
        y = y.to(scale.dtype) * self.scale * scale[:, None]
        return (y if self.bias is None else y + self.bias).to(x.dtype).contiguous()

    def whole(self) -> tuple[SparseInt, Tensor | None]:
        """Returns weight and bias as they are on one rank, on the CPU.  A collective call."""
        pattern = Pattern(self.index, self.offsets, (self.rows, self.width), self.block)
        mine = SparseInt(pattern, self.values, self.bits, self.scale).to("cpu")
        parts = messages.gather((mine, None if self.bias is None else self.bias.cpu()), self.tp.group)
        weight = SparseInt.join([part for part, _ in parts], SPLITS[self.split])
        biases = [bias for _, bias in parts if bias is not None]
        return weight, (torch.cat(biases) if self.split == "column" else biases[0]) if biases else None

    def save(self, path: str | pathlib.Path) -> None:
        """Writes a safetensors file of the whole layer, on the first rank.  A collective call; an error there is an
        error on every rank."""
        weight, bias = self.whole()
        pattern = weight.pattern
        tensors = dict(
            values=weight.values, index=pattern.index, offsets=pattern.offsets, scale=weight.scale, bias=bias
        )
        numbers = dict(zip(NUMBERS, (*weight.shape, self.block, self.bits)))
        metadata = dict(format=FORMAT, split=self.split) | {name: str(n) for name, n in numbers.items()}

        def write() -> None:
            if self.tp.rank == 0:
                try:
                    save_file({name: t for name, t in tensors.items() if t is not None}, path, metadata)
                except SafetensorError as error:
                    raise OSError(f"SparseLinear: {path} cannot be written: {error}") from error

        messages.together(write, [self.tp.group])

    @staticmethod
    def load(
        path: str | pathlib.Path, *, tp: TensorParallel | None = None, device: torch.device | str = "cpu"
    ) -> "SparseLinear":
        """Reads a file of :meth:`save`, for any number of ranks.  ValueError for any other file."""

        def read() -> tuple[SparseInt, Tensor | None, str]:
            try:
                with safe_open(path, framework="pt", device=str(device)) as file:
                    metadata = file.metadata() or {}
                    tensors = {name: file.get_tensor(name) for name in file.keys()}
                check(metadata.get("format") == FORMAT, f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
                rows, columns, block, bits = (int(metadata[name]) for name in NUMBERS)
                pattern = Pattern(tensors["index"], tensors["offsets"], (rows, columns), block)
                weight = SparseInt(pattern, tensors["values"], bits, tensors["scale"])
                return weight, tensors.get("bias"), metadata["split"]
            except (SafetensorError, KeyError, ValueError) as error:
                raise ValueError(f"SparseLinear: {path} is no file of a SparseLinear: {error}") from error

        weight, bias, split = messages.together(read, [None if tp is None else tp.group])
        return SparseLinear(weight, bias, split=split, tp=tp)
