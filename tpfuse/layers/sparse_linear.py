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

import json
import os

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..collectives import _all_gather, _reduce_scatter, all_reduce, collect  # those with gradients compare integers
from ..kernels.runtime.errors import check
from ..kernels.runtime.op import acc_dtype
from ..kernels.runtime.rules import described, one_of
from ..kernels.sparse import SparseInt
from ..kernels.sparse.format import Vectors
from ..kernels.sparse.op import sparse_matmul_op
from ..parallel import TensorParallel
from ..ranks import messages
from .linear import Adaptable, ColumnParallelLinear, RowParallelLinear
from .module import ParallelModule, check_width

SPLITS = {"column": 0, "row": 1}  # the dimension of W that ranks divide
LARGEST = 127  # magnitude of x in int8
FORMAT = "tpfuse sparse linear 1"  # the one key of a file's metadata: several have no fixed order


class SparseLinear(ParallelModule):
    """x W' + b of a pruned, quantised W [N, K]: as ColumnParallelLinear does it, x [..., K] -> [M, N/R], or with
    ``split="row"`` as RowParallelLinear, x [..., K/R] -> [m, N].

    ``weight`` and ``bias`` [N] are whole, on every rank; it keeps its slices.  The dtype is x's.  There is no gradient,
    there are no parameters, and a state dictionary holds nothing of it: :meth:`save` and :meth:`load` do.  ValueError
    where ranks do not divide W.
    """

    shards_input = True
    repr_fields = "in_features", "out_features", "split", "bits", "density"
    values: Tensor
    column_index: Tensor
    offsets: Tensor
    scale_bits: Tensor  # so that a module that is cast to 16 bits keeps its scales
    bias: Tensor | None

    def __init__(
        self, weight: SparseInt, bias: Tensor | None = None, *, split: str = "column", tp: TensorParallel | None = None
    ):
        super().__init__(tp)
        check(split in SPLITS, f"SparseLinear: split must {one_of(SPLITS)(split)}, got {split!r}")
        self.split, self.bits, self.block = split, weight.vectors.bits, weight.block
        self.out_features, self.in_features = weight.shape
        self.density = round(weight.density, 4)
        good = bias is None or (bias.shape == (self.out_features,) and bias.is_floating_point())
        check(good, f"SparseLinear: bias must be floating [{self.out_features}] or None, got {described(bias)}")
        dim, scale = SPLITS[split], weight.scale
        n = self.tp.divide(weight.shape[dim], f"SparseLinear: {('out_features', 'in_features')[dim]}")
        mine = slice(self.tp.rank * n, (self.tp.rank + 1) * n)
        scale = torch.ones(weight.shape[0], device=weight.vectors.values.device) if scale is None else scale
        if dim == 0:
            scale, bias = scale[mine], None if bias is None else bias[mine]
        if self.tp.size > 1:
            weight = SparseInt.from_dense(weight.dense().narrow(dim, mine.start, n), 1.0, self.block, self.bits)
        self.rows, self.width = weight.shape
        buffers = dict(zip(Vectors._fields[:3], weight.vectors[:3]), scale_bits=scale.contiguous().view(torch.int32))
        for name, buffer in dict(buffers, bias=bias).items():
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
        """Makes one of a trained layer, pruned and quantised by :meth:`SparseInt.from_dense`.

        ``layer``: a ColumnParallelLinear or RowParallelLinear, whose split and ranks it takes, or a torch.nn.Linear,
        the same on every rank, for ``split`` and ``tp``.  Each rank holds the whole weight for a moment.  A collective
        call.  ValueError for another layer, one with an activation, and one with an adapter that is not merged.
        """
        kinds = ColumnParallelLinear, RowParallelLinear, nn.Linear
        names = " or ".join(kind.__name__ for kind in kinds)
        check(isinstance(layer, kinds), f"SparseLinear: layer must be a {names}, got a {type(layer).__name__}")
        bias: Tensor | None = layer.bias  # type: ignore[assignment]
        with torch.no_grad():
            if isinstance(layer, Adaptable):
                tp = layer.tp
                check(layer.adapter is None, "SparseLinear: layer has an adapter; merge it into the weight before")
            if isinstance(layer, ColumnParallelLinear):
                activation = layer.activation
                check(activation == "none", f"SparseLinear: layer must have no activation, got {activation!r}")
                split, (weight, bias) = "column", layer.flat()
                weight = collect(weight, layer.tp, size=layer.out_features)
                bias = None if bias is None else collect(bias, layer.tp, size=layer.out_features)
            elif isinstance(layer, RowParallelLinear):
                split, weight = "row", collect(layer.weight, layer.tp, 1, size=layer.in_features)
            else:
                weight = layer.weight  # type: ignore[assignment]
            return SparseLinear(SparseInt.from_dense(weight, density, block, bits), bias, split=split, tp=tp)

    @property
    def vectors(self) -> Vectors:
        """This rank's slice, as kernels read it."""
        return Vectors(self.values, self.column_index, self.offsets, rows=self.rows, bits=self.bits)

    @property
    def scale(self) -> Tensor:
        """Scale of each row of this rank's slice, fp32."""
        return self.scale_bits.view(torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K], or [..., K/R] where rows are split -> [M, N/R] or [m, N], in x's dtype.

        A row with NaN or an infinity gives NaN.  ValueError for another width, and where a gradient is needed.
        """
        check_width("SparseLinear", x, self.width)
        check(x.is_floating_point(), f"SparseLinear: x must be floating, got {described(x)}")
        check(
            not (torch.is_grad_enabled() and x.requires_grad),
            "SparseLinear: x must need no gradient, for there is none: it is for inference, under torch.no_grad()",
        )
        x, tp, by_rows = x.reshape(-1, self.width), self.tp, self.split == "row"
        largest = x.abs().amax(1).to(acc_dtype(x))
        if by_rows:
            largest = _all_gather(largest[None], tp, 0).amax(0)
        scale = torch.where(largest == 0, 1.0, largest / LARGEST)
        numbers = (x / scale[:, None]).round().clamp(-LARGEST, LARGEST).to(torch.int8)
        if tp.sequence_parallel and not by_rows:
            numbers, scale = _all_gather(numbers, tp, 0), _all_gather(scale, tp, 0)
        y = sparse_matmul_op(self.vectors, numbers.t().contiguous()).t().contiguous()
        if by_rows:
            y = _reduce_scatter(y, tp, 0) if tp.sequence_parallel else all_reduce(y, tp)
            scale = scale.tensor_split(tp.row_shards)[tp.row_rank]
        y = y.to(scale.dtype) * self.scale * scale[:, None]
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a safetensors file of the whole layer, the same bytes at every number of ranks.

        A collective call; the first rank writes, and its OSError is one on every rank.
        """
        mine = SparseInt(self.vectors, self.width).dense().to(torch.int16)  # which 16 bits fit
        parts = messages.gather([None if t is None else t.cpu() for t in (mine, self.scale, self.bias)], self.tp.group)
        dense, scale, bias = zip(*parts)
        dim = SPLITS[self.split]
        whole = SparseInt.from_dense(torch.cat(dense, dim), 1.0, self.block, self.bits)
        joined = lambda vectors: torch.cat(vectors) if dim == 0 else vectors[0]
        tensors: dict[str, Tensor] = dict(zip(Vectors._fields[:3], whole.vectors[:3]), scale=joined(scale))
        if bias[0] is not None:
            tensors["bias"] = joined(bias)
        kind = dict(split=self.split, rows=whole.shape[0], columns=whole.columns, bits=self.bits)

        def write() -> None:
            try:
                if self.tp.rank == 0:
                    save_file(tensors, path, {FORMAT: json.dumps(kind)})
            except SafetensorError as error:
                raise OSError(f"SparseLinear: {path} cannot be written: {error}") from error

        messages.together(write, [self.tp.group])

    @staticmethod
    def load(
        path: str | os.PathLike[str], *, tp: TensorParallel | None = None, device: torch.device | str = "cpu"
    ) -> "SparseLinear":
        """Reads a file of :meth:`save`, at any number of ranks; ValueError for any other file."""

        def read() -> tuple[SparseInt, Tensor | None, str]:
            try:
                with safe_open(path, framework="pt", device=str(device)) as file:
                    kind = json.loads((file.metadata() or {})[FORMAT])
                    tensors = {name: file.get_tensor(name) for name in file.keys()}
                values, index, offsets = (tensors[name] for name in Vectors._fields[:3])
                vectors = Vectors(values, index, offsets, rows=kind["rows"], bits=kind["bits"])
                return SparseInt(vectors, kind["columns"], tensors["scale"]), tensors.get("bias"), kind["split"]
            except (SafetensorError, LookupError, TypeError, ValueError) as error:
                raise ValueError(f"SparseLinear: {path} is no file of SparseLinear.save: {error}") from error

        weight, bias, split = messages.together(read, [None if tp is None else tp.group])
        return SparseLinear(weight, bias, split=split, tp=tp)
