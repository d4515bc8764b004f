"""The same pre-norm blocks written by others: plain torch, DTensor tensor + sequence parallel, megatron-core's layers.

Each takes the *full* weights of one layer (torch's [out, in]; qkv in rows q, k, v and a gated fc1 in rows gate, up) and
x batch-first, [B, S, D] (DTensor: [B, S/R, D]).
"""

import functools
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class Kind(NamedTuple):
    """The parts that blocks of a family have in common."""

    norm: type[nn.Module]
    bias: bool
    rotary: bool
    gated: bool  # silu(gate) up; else gelu by tanh

    def ffn(self, width: int) -> int:
        """Returns the width between the MLP's maps: 4 D, gated the multiple of 256 from 8 D / 3 on, as Llama's."""
        return -(-8 * width // 768) * 256 if self.gated else 4 * width

    def modules(self) -> dict[str, tuple[str, ...]]:
        """Returns the modules that the rows of each full weight and bias belong to."""
        return {
            "qkv": ("attention.q", "attention.k", "attention.v"),
            "out": ("attention.out",),
            "fc1": ("mlp.gate", "mlp.up") if self.gated else ("mlp.fc1",),
            "fc2": ("mlp.fc2",),
            "norm1": ("norm1",),
            "norm2": ("norm2",),
        }

    def by_module(self, full: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns a layer's full weights by the names of a Block's."""
        modules, split = self.modules(), {}
        for name, tensor in full.items():
            key, leaf = name.split(".")
            pieces = zip(modules[key], tensor.chunk(len(modules[key])), strict=True)
            split |= {f"{module}.{leaf}": piece for module, piece in pieces}
        return split


KINDS = {
    "gpt2": Kind(nn.LayerNorm, bias=True, rotary=False, gated=False),
    "llama": Kind(nn.RMSNorm, bias=False, rotary=True, gated=True),
}
THETA = 10000.0  # of rotary positions
EPS = 1e-5


@functools.lru_cache(maxsize=4)
def _rotations(length: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    frequencies = THETA ** (-torch.arange(0, width, 2) / width)
    angles = (torch.arange(length)[:, None] * frequencies).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotated(x: Tensor) -> Tensor:
    """x [B, H, S, E] with rotary positions, as Llama is written in plain torch"""
    cos, sin = _rotations(*x.shape[-2:], x.dtype)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, p: float, kind: Kind = KINDS["gpt2"]):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, kind.bias) for _ in range(4))
        self.head_width, self.p, self.rotary = width // heads, p, kind.rotary

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.rotary:
            q, k = _rotated(q), _rotated(k)
        o = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0, is_causal=True)
        return self.out(o.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class GatedMLP(nn.Module):
    def __init__(self, width: int, ffn: int):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, ffn, bias=False) for _ in range(2))
        self.fc2 = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A block as one writes it in plain torch."""

    def __init__(self, width: int, heads: int, dropout: float, attention_dropout: float, kind: Kind = KINDS["gpt2"]):
        super().__init__()
        self.kind = kind
        self.norm1, self.norm2 = kind.norm(width, eps=EPS), kind.norm(width, eps=EPS)
        self.attention = Attention(width, heads, attention_dropout, kind)
        self.mlp = GatedMLP(width, kind.ffn(width)) if kind.gated else MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))

    def load(self, full: dict[str, Tensor]) -> None:
        self.load_state_dict(self.kind.by_module(full))


class Stack(nn.Module):
    """Blocks and a final norm."""

    def __init__(self, blocks: list[Block], norm: nn.Module):
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(blocks), norm

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def dtensor_norm(norm: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(norm, mesh, SequenceParallel(use_local_output=True))


def dtensor_block(block: Block, mesh: DeviceMesh) -> Block:
    """PyTorch's own recipe for tensor and sequence parallelism."""
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    modules = block.kind.modules()
    plan = {
        "norm1": SequenceParallel(),
        "norm2": SequenceParallel(),
        "attention": gathered,
        "mlp": gathered,
        **{name: ColwiseParallel() for name in (*modules["qkv"], *modules["fc1"])},
        **{name: RowwiseParallel(output_layouts=Shard(1)) for name in (*modules["out"], *modules["fc2"])},
    }
    return parallelize_module(block, mesh, plan)


def megatron_block(block: Block, rank: int, size: int, dtype: torch.dtype) -> Block:
    """The plain block with megatron-core's column- and row-parallel layers; ImportError where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    config = ModelParallelConfig(tensor_model_parallel_size=size, use_cpu_initialization=True, params_dtype=dtype)
    config.perform_initialization, kind = False, block.kind

    class Drop(nn.Module):
        """megatron's layers return (output, bias)."""

        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)[0]

    def column(n: int, k: int) -> nn.Module:
        return Drop(
            ColumnParallelLinear(k, n, config=config, init_method=nn.init.zeros_, bias=kind.bias, gather_output=False)
        )

    def row(n: int, k: int) -> nn.Module:
        return Drop(
            RowParallelLinear(
                k,
                n,
                config=config,
                init_method=nn.init.zeros_,
                bias=kind.bias,
                input_is_parallel=True,
                skip_bias_add=False,
            )  # fmt: skip
        )

    block, modules = block.to(dtype), kind.modules()
    dims: dict[str, int | None] = {}  # on which a map's weight is split
    for names, make, dim in (
        ((*modules["qkv"], *modules["fc1"]), column, 0), ((*modules["out"], *modules["fc2"]), row, 1),
    ):  # fmt: skip
        for name in names:
            block.set_submodule(name, make(*block.get_submodule(name).weight.shape))
            dims[name] = dim

    def load(full: dict[str, Tensor]) -> None:
        for name, tensor in kind.by_module(full).items():
            module, leaf = name.rsplit(".", 1)
            dim = dims.get(module) if leaf == "weight" or dims.get(module) == 0 else None
            target = block.get_submodule(f"{module}.inner" if module in dims else module)
            getattr(target, leaf).data.copy_(tensor if dim is None else tensor.chunk(size, dim)[rank])

    block.load = load
    return block
