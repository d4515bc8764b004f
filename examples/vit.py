"""A vision transformer of one's own (Dosovitskiy et al. 2020, arXiv:2010.11929), against transformers' numbers.

    python examples/vit.py                                           # one process
    torchrun --nproc-per-node 2 examples/vit.py                      # TP = 2: the same logits and gradients
    torchrun --nproc-per-node 2 examples/vit.py --no-sequence-parallel

It shows what stands around the blocks of an encoder: plain torch modules on rows that every rank has, a number of rows
that the ranks do not divide (patches and one class token), and a head on collected rows.  Both models get the same
random weights, here by name; the example prints how far logits and gradients are apart in fp64.
"""

import _common as common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _against import VIT_NAMES, differences, moved
from torch import Tensor, nn

from tpfuse import TensorParallel
from tpfuse.layers import LayerNorm, TransformerBlock, collect, split

IMAGE, PATCH, CHANNELS, CLASSES = 32, 8, 3, 10
WIDTH, LAYERS, HEADS = 64, 2, 4
EPS = 1e-12


class ViT(nn.Module):
    """Patches and a class token through pre-norm blocks; what becomes of the class token is classified."""

    def __init__(self, tp: TensorParallel):
        super().__init__()
        self.tp, self.seq = tp, (IMAGE // PATCH) ** 2 + 1
        self.patches = nn.Linear(CHANNELS * PATCH**2, WIDTH)  # a convolution whose stride is its width
        self.class_token = nn.Parameter(torch.zeros(WIDTH))
        self.positions = nn.Parameter(torch.zeros(self.seq, 1, WIDTH))
        self.blocks = nn.ModuleList(
            TransformerBlock(WIDTH, HEADS, tp=tp, layer=i, causal=False, activation="gelu", eps=EPS)
            for i in range(LAYERS)
        )
        self.norm = LayerNorm(WIDTH, EPS, tp=tp)
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels [B, C, H, W], the same on every tensor-parallel rank -> logits [B, classes]."""
        batch, seq = len(pixels), self.seq
        patches = self.patches(F.unfold(pixels, PATCH, stride=PATCH).permute(2, 0, 1))  # [S - 1, B, D]
        tokens = torch.cat([self.class_token.expand(1, batch, -1), patches]) + self.positions
        h = self.mine(tokens.flatten(0, 1))  # rows s * B + b
        for block in self.blocks:
            h = block(h, batch=batch, seq=seq)  # rows beyond seq * batch are padding
        rows = self.together(self.norm(h))
        return self.classifier(rows[:batch])  # s = 0: the class tokens

    def mine(self, rows: Tensor) -> Tensor:
        """Rows that every rank has -> this rank's, of which there must be equally many: the last are padding.

        Whatever made the rows has whole gradients on every rank, since backward gathers them.
        """
        if self.tp.row_shards == 1:
            return rows
        return split(F.pad(rows, (0, 0, 0, -len(rows) % self.tp.row_shards)), self.tp)

    def together(self, rows: Tensor) -> Tensor:
        """This rank's rows -> all of them, which every rank goes on to use in the same way."""
        return rows if self.tp.row_shards == 1 else collect(rows, self.tp)


def main() -> None:
    parser = common.Parser("Compare a ViT of tpfuse's layers with that of transformers.")
    parser.add_argument("--no-sequence-parallel", action="store_true", help="every rank holds all rows between GEMMs")
    args = parser.parse_args()
    from transformers import ViTConfig, ViTForImageClassification

    device = common.start()
    tp = TensorParallel(dist.group.WORLD, sequence_parallel=not args.no_sequence_parallel)
    torch.manual_seed(0)  # the same weights and images on every rank
    shape = dict(image_size=IMAGE, patch_size=PATCH, num_channels=CHANNELS, num_labels=CLASSES, layer_norm_eps=EPS)
    shape |= dict(hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=4 * WIDTH)
    reference = moved(ViTForImageClassification(ViTConfig(**shape, attn_implementation="sdpa")), device)
    ours = ViT(tp).to(device, torch.float64)
    images = torch.randn(3, CHANNELS, IMAGE, IMAGE, dtype=torch.float64, device=device)
    labels = torch.randint(CLASSES, (3,), device=device)

    apart = differences(
        ours,
        reference,
        VIT_NAMES,
        logits=lambda: ours(images),
        expected=lambda: reference(images).logits,
        labels=labels,
    )
    common.say(f"{len(images) * ours.seq} rows on {tp.size} ranks; {apart}")
    common.stop()


if __name__ == "__main__":
    main()
