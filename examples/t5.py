"""An encoder and decoder of one's own, T5 v1.1 (Raffel et al. 2020, arXiv:1910.10683), against transformers' numbers.

    torchrun --nproc-per-node 2 examples/t5.py    # or python examples/t5.py: the same logits and gradients

It shows parallel layers in a block of one's own: self-attention with a learned bias by distance, cross-attention and a
gated MLP.  Both models get the same random weights; it prints how far logits and gradients are apart in fp64.
"""

import math

import _common as common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _against import T5_NAMES, differences, moved
from torch import Tensor, nn

from tpfuse import TensorParallel, layers

VOCAB, WIDTH, LAYERS, HEADS, HEAD_WIDTH, FFN = 96, 48, 2, 4, 16, 80
BUCKETS, FAR = 32, 128  # of distances between tokens, up to so far


class SelfAttention(nn.Module):
    """Scores without a scale and with a learned bias: torch's attention between two projections split by heads."""

    def __init__(self, tp: TensorParallel):
        super().__init__()
        self.qkv = layers.ColumnParallelLinear(WIDTH, (HEADS, 3, HEAD_WIDTH), bias=False, tp=tp)
        self.out = layers.RowParallelLinear(HEADS * HEAD_WIDTH, WIDTH, bias=False, tp=tp)

    def forward(self, x: Tensor, bias: Tensor, batch: int) -> Tensor:
        """x [m, D], this rank's rows s * batch + b; bias [1 or B, H / R, S, S] of this rank's heads -> [m, D]"""
        qkv = self.qkv(x).unflatten(0, (-1, batch)).unflatten(-1, (-1, 3, HEAD_WIDTH))  # all rows: [S, B, H / R, 3, E]
        q, k, v = qkv.permute(3, 1, 2, 0, 4)  # [B, H / R, S, E]
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return self.out(o.permute(2, 0, 1, 3).flatten(2).flatten(0, 1))


class Block(nn.Module):
    """Self-attention, in a decoder cross-attention, and an MLP, each behind a norm and beside a residual."""

    def __init__(self, tp: TensorParallel, decoder: bool):
        super().__init__()
        self.attention, options = SelfAttention(tp), dict(bias=False, tp=tp)
        self.cross = layers.CrossAttention(WIDTH, HEADS, head_width=HEAD_WIDTH, **options) if decoder else None
        self.mlp = layers.ParallelMLP(WIDTH, FFN, activation="gelu_tanh", gated=True, **options)
        self.norms = nn.ModuleList(layers.RMSNorm(WIDTH, tp=tp) for _ in range(3 if decoder else 2))

    def forward(self, h: Tensor, bias: Tensor, visible: Tensor, memory: Tensor | None) -> Tensor:
        h = h + self.attention(self.norms[0](h), bias, len(visible))
        if self.cross is not None:  # it divides scores by the root of the head width, and T5 does not
            h = h + self.cross(self.norms[1](h) * HEAD_WIDTH**0.5, memory, batch=len(visible), attention_mask=visible)
        return h + self.mlp(self.norms[-1](h))


class Stack(nn.Module):
    """Blocks that share one table of biases; ``seen`` bool [B, T]: which of the encoder's tokens are text."""

    def __init__(self, tp: TensorParallel, decoder: bool):
        super().__init__()
        self.tp, self.decoder = tp, decoder
        self.bias = nn.Embedding(BUCKETS, HEADS)  # every rank has the whole table, and uses its heads' columns
        self.blocks = nn.ModuleList(Block(tp, decoder) for _ in range(LAYERS))
        self.norm = layers.RMSNorm(WIDTH, tp=tp)

    def forward(self, h: Tensor, visible: Tensor, memory: Tensor | None = None) -> Tensor:
        seq = len(h) * self.tp.row_shards // len(visible)
        ahead = torch.arange(seq, device=h.device) - torch.arange(seq, device=h.device)[:, None]
        table = layers.copy(self.bias.weight, self.tp)  # whose gradients are summed over the ranks
        bias = F.embedding(self.bucket(ahead), table.chunk(self.tp.size, 1)[self.tp.rank]).permute(2, 0, 1)
        bias = bias[None].masked_fill(ahead > 0 if self.decoder else ~visible[:, None, None], -torch.inf)
        for block in self.blocks:
            h = block(h, bias, visible, memory)
        return self.norm(h)

    def bucket(self, ahead: Tensor) -> Tensor:
        """Half of the buckets are of one distance each, half of ranges that grow; an encoder looks ahead in others."""
        count = BUCKETS if self.decoder else BUCKETS // 2
        distance, exact = (-ahead).clamp(min=0) if self.decoder else ahead.abs(), count // 2
        ranges = torch.log(distance.clamp(min=1).float() / exact) / math.log(FAR / exact) * (count - exact)
        bucket = torch.where(distance < exact, distance, (exact + ranges.long()).clamp(max=count - 1))
        return bucket if self.decoder else bucket + count * (ahead > 0)


class T5(nn.Module):
    """ids int64 [T, B], written int64 [S, B], T B and S B divisible by R -> logits [S B, V / R], row s * B + b."""

    def __init__(self, tp: TensorParallel):
        super().__init__()
        self.embedding = layers.VocabParallelEmbedding(VOCAB, WIDTH, tp=tp)
        self.encoder, self.decoder = Stack(tp, decoder=False), Stack(tp, decoder=True)
        self.head = layers.VocabParallelHead(WIDTH, VOCAB, tp=tp)

    def forward(self, ids: Tensor, visible: Tensor, written: Tensor) -> Tensor:
        return self.head(self.decoder(self.embedding(written), visible, self.encoder(self.embedding(ids), visible)))


def main() -> None:
    common.Parser("Compare a T5 of tpfuse's layers with that of transformers.").parse_args()
    from transformers import T5Config, T5ForConditionalGeneration

    device = common.start()
    tp = TensorParallel(dist.group.WORLD, sequence_parallel=True)
    torch.manual_seed(0)  # the same weights and texts on every rank
    sizes = dict(vocab_size=VOCAB, d_model=WIDTH, d_kv=HEAD_WIDTH, d_ff=FFN, num_layers=LAYERS, num_heads=HEADS)
    config = T5Config(**sizes, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    reference, ours = moved(T5ForConditionalGeneration(config), device), T5(tp).to(device, torch.float64)
    ids, written, labels = (torch.randint(VOCAB, shape, device=device) for shape in ((40, 2), (24, 2), (48,)))
    visible = torch.arange(len(ids), device=device) < torch.tensor([[40], [29]], device=device)  # one text is shorter
    logits = lambda: layers.collect(ours(ids, visible, written), tp, -1)
    expected = lambda: reference(ids.t(), visible, decoder_input_ids=written.t()).logits.transpose(0, 1).flatten(0, 1)
    apart = differences(ours, reference, T5_NAMES, logits=logits, expected=expected, labels=labels)
    common.say(f"{tp.size} ranks; {apart}")
    common.stop()


if __name__ == "__main__":
    main()
