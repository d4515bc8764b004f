"""An encoder or decoder layer as one writes it in plain torch, nothing fused: what the ledger compares with."""

import torch
from torch import Tensor, nn

from ...layers.wiring import WIRINGS, Branch, Join, Norm, norm_names, run


class Dropout(nn.Dropout):
    """One op and a mask of one byte an element on every device; nn.Dropout does so on a GPU only."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.p, self.training)[0]


class PlainLayer(nn.Module):
    """x [B, S, D] -> [B, S, D]; ``wiring`` is an entry of WIRINGS, ``activation`` a class of nn.Module.

    ``dropout`` after attention, after the MLP and on the probabilities, ``activation_dropout`` as
    nn.TransformerEncoderLayer has it.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        ffn: int,
        dropout: float = 0.1,
        *,
        wiring: str = "pre",
        activation: type[nn.Module] = nn.GELU,
        activation_dropout: float = 0.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.heads, self.steps = heads, WIRINGS[wiring]
        linear = lambda n, m: nn.Linear(n, m, dtype=dtype, device=device)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.fc1, self.fc2 = linear(width, ffn), linear(ffn, width)
        self.norms = nn.ModuleDict(
            {name: nn.LayerNorm(width, dtype=dtype, device=device) for name in norm_names(self.steps)}
        )
        self.activation = (
            nn.Sequential(activation(), Dropout(activation_dropout)) if activation_dropout else activation()
        )
        self.probabilities_dropout = Dropout(dropout)
        self.dropouts = nn.ModuleDict({name: Dropout(dropout) for name in ("attention", "mlp")})

    def attention(self, x: Tensor) -> Tensor:
        """x [B, S, D] -> [B, S, D]"""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, S, E]
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        return self.out((self.probabilities_dropout(torch.softmax(scores, -1)) @ v).transpose(1, 2).flatten(2))

    def mlp(self, x: Tensor) -> Tensor:
        """x [B, S, D] -> [B, S, D]"""
        return self.fc2(self.activation(self.fc1(x)))

    def norm(self, step: Norm, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, self.norms[step.norm](h)

    def branch(self, step: Branch, n: Tensor) -> Tensor:
        return self.attention(n) if step.name == "attention" else self.mlp(n)

    def join(self, step: Join, parts: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        x = parts if step.branch_norm is None else self.norms[step.branch_norm](parts)
        h = h + self.dropouts[step.branch](x)
        n = h if step.norm is None else self.norms[step.norm](h)
        return n if step.stream else h, n

    def forward(self, x: Tensor) -> Tensor:
        return run(self.steps, self, x, x)[0]
