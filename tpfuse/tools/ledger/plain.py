"""An encoder or decoder layer as one writes it in plain torch, nothing fused: what the ledger compares with."""

from typing import Any

import torch
from torch import Tensor, nn


class Dropout(nn.Dropout):
    """One op and a mask of one byte an element on every device; nn.Dropout does so on a GPU only."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.p, self.training)[0]


class PlainLayer(nn.Module):
    """x [B, S, D] -> [B, S, D], pre-norm, or ``post_norm`` as in BERT; ``activation`` is a class of nn.Module.

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
        post_norm: bool = False,
        activation: type[nn.Module] = nn.GELU,
        activation_dropout: float = 0.0,
        **factory: Any,
    ):
        super().__init__()
        self.heads, self.post_norm = heads, post_norm
        self.qkv, self.out = nn.Linear(width, 3 * width, **factory), nn.Linear(width, width, **factory)
        self.fc1, self.fc2 = nn.Linear(width, ffn, **factory), nn.Linear(ffn, width, **factory)
        self.norm1, self.norm2 = nn.LayerNorm(width, **factory), nn.LayerNorm(width, **factory)
        self.activation = (
            nn.Sequential(activation(), Dropout(activation_dropout)) if activation_dropout else activation()
        )
        self.dropout_p, self.dropout1, self.dropout2 = (Dropout(dropout) for _ in range(3))

    def attention(self, x: Tensor) -> Tensor:
        """x [B, S, D] -> [B, S, D]"""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, S, E]
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        return self.out((self.dropout_p(torch.softmax(scores, -1)) @ v).transpose(1, 2).flatten(2))

    def mlp(self, x: Tensor) -> Tensor:
        """x [B, S, D] -> [B, S, D]"""
        return self.fc2(self.activation(self.fc1(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.post_norm:
            x = self.norm1(x + self.dropout1(self.attention(x)))
            return self.norm2(x + self.dropout2(self.mlp(x)))
        x = x + self.dropout1(self.attention(self.norm1(x)))
        return x + self.dropout2(self.mlp(self.norm2(x)))
