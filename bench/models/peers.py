"""The same pre-norm blocks written by others: plain torch, DTensor tensor + sequence parallel, megatron-core's layers.

Each takes the *full* weights of one layer (torch's [out, in], qkv in rows q, k, v) and x batch-first, [B, S, D]
(DTensor: [B, S/R, D]).
"""

import warnings

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


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, p: float):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.head_width, self.p = width // heads, p

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for f in (self.q, self.k, self.v))
        o = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0, is_causal=True)
        return self.out(o.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class Block(nn.Module):
    """A block as one writes it in plain torch."""

    def __init__(self, width: int, heads: int, dropout: float, attention_dropout: float):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp, self.dropout = (
            Attention(width, heads, attention_dropout),
            MLP(width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))

    def load(self, full: dict[str, Tensor]) -> None:
        qkv = zip(full["qkv.weight"].chunk(3), full["qkv.bias"].chunk(3), strict=True)
        for linear, (w, b) in zip((self.attention.q, self.attention.k, self.attention.v), qkv, strict=True):
            linear.weight.data.copy_(w)
            linear.bias.data.copy_(b)
        for name, module in (
            ("out", self.attention.out),
            ("fc1", self.mlp.fc1),
            ("fc2", self.mlp.fc2),
            ("norm1", self.norm1),
            ("norm2", self.norm2),
        ):
            module.weight.data.copy_(full[f"{name}.weight"])
            module.bias.data.copy_(full[f"{name}.bias"])


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
    plan = {
        "norm1": SequenceParallel(),
        "norm2": SequenceParallel(),
        "attention": gathered,
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "mlp": gathered,
        "mlp.fc1": ColwiseParallel(),
        "mlp.fc2": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(block, mesh, plan)


def megatron_block(
    width: int, heads: int, dropout: float, attention_dropout: float, rank: int, size: int, dtype: torch.dtype
) -> Block:
    """megatron-core's column- and row-parallel layers in the plain block; ImportError where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    config = ModelParallelConfig(tensor_model_parallel_size=size, use_cpu_initialization=True, params_dtype=dtype)
    config.perform_initialization = False

    class Drop(nn.Module):
        """megatron's layers return (output, bias)."""

        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)[0]

    def column(n: int, k: int) -> nn.Module:
        return Drop(
            ColumnParallelLinear(k, n, config=config, init_method=nn.init.zeros_, bias=True, gather_output=False)
        )

    def row(n: int, k: int) -> nn.Module:
        return Drop(
            RowParallelLinear(
                k, n, config=config, init_method=nn.init.zeros_, bias=True, input_is_parallel=True, skip_bias_add=False
            )
        )

    block = Block(width, heads, dropout, attention_dropout).to(dtype)
    a, m = block.attention, block.mlp
    a.q, a.k, a.v, a.out = (*(column(width, width) for _ in range(3)), row(width, width))
    m.fc1, m.fc2 = column(4 * width, width), row(width, 4 * width)

    def load(full: dict[str, Tensor]) -> None:
        mine = lambda t, dim: t.chunk(size, dim)[rank]
        qkv = zip(full["qkv.weight"].chunk(3), full["qkv.bias"].chunk(3), strict=True)
        for linear, (w, b) in zip((a.q, a.k, a.v), qkv, strict=True):
            linear.inner.weight.data.copy_(mine(w, 0))
            linear.inner.bias.data.copy_(mine(b, 0))
        m.fc1.inner.weight.data.copy_(mine(full["fc1.weight"], 0))
        m.fc1.inner.bias.data.copy_(mine(full["fc1.bias"], 0))
        for linear, name in ((a.out, "out"), (m.fc2, "fc2")):
            linear.inner.weight.data.copy_(mine(full[f"{name}.weight"], 1))
            linear.inner.bias.data.copy_(full[f"{name}.bias"])
        for norm, name in ((block.norm1, "norm1"), (block.norm2, "norm2")):
            norm.weight.data.copy_(full[f"{name}.weight"])
            norm.bias.data.copy_(full[f"{name}.bias"])

    block.load = load
    return block
