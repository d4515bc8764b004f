"""A language model of one's own, written with tpfuse.layers and trained under tensor x data parallelism.

    python examples/own_model.py                                            # one process
    torchrun --nproc-per-node 2 examples/own_model.py                       # TP = 2: the same losses
    torchrun --nproc-per-node 4 examples/own_model.py --tp 2 --data my/texts    # and data parallelism over the rest

It shows what a model's author decides: rows between layers, which modules are split, a plain torch module between them
(tpfuse.replicated), and a loss over a split vocabulary.  Without --data it reads Python's own sources, byte by byte.
"""

import math
from pathlib import Path

import _common as common
import torch
import torch.distributed as dist
from _text import Text, read_text, sample
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import tpfuse
from tpfuse import TensorParallel
from tpfuse.kernels import rope_table
from tpfuse.layers import LayerNorm, Rope, TransformerBlock, VocabParallelEmbedding, VocabParallelHead, cross_entropy

VOCAB = 256


class ByteModel(nn.Module):
    """Causal blocks with rotary positions between an embedding and a head over bytes."""

    def __init__(self, width: int, layers: int, heads: int, tp: TensorParallel, dropout: float):
        super().__init__()
        self.tp, self.head_width = tp, width // heads
        self.embedding = VocabParallelEmbedding(VOCAB, width, tp=tp)
        self.mix = tpfuse.replicated(nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)), tp)
        self.blocks = nn.ModuleList(
            TransformerBlock(width, heads, tp=tp, causal=True, layer=i, dropout=dropout) for i in range(layers)
        )
        self.norm = LayerNorm(width, tp=tp)
        self.head = VocabParallelHead(width, VOCAB, tp=tp)

    def forward(self, ids: Tensor, rng: Tensor) -> Tensor:
        """ids int64 [S + 1, B], the same on every tensor-parallel rank -> the mean loss of bytes 1 to S."""
        inputs, labels = ids[:-1], ids[1:].flatten()
        h = self.embedding(inputs)  # [S * B / R, width]: this rank's share of the rows s * B + b
        h = h + self.mix(h)
        rope = Rope(*rope_table(self.head_width, len(inputs), theta=1e4, device=ids.device))
        for block in self.blocks:
            h = block(h, batch=inputs.shape[1], rope=rope, rng=rng)
        logits = self.head(self.norm(h))  # [S * B, 256 / R]: all rows, this rank's share of the vocabulary
        return cross_entropy(logits, labels, tp=self.tp, vocab_size=VOCAB)


def parse():
    parser = common.Parser("Train a small language model of one's own, of tpfuse's layers, on bytes.")
    add = parser.add_argument_group("what is trained").add_argument
    add("--data", type=Path, metavar="PATH", help="a file or folder of text (default: Python's own sources)")
    add("--width", type=common.positive, default=64, metavar="N", help="of the model")
    add("--layers", type=common.positive, default=2, metavar="N", help="blocks")
    add("--heads", type=common.positive, default=4, metavar="N", help="attention heads of a block")
    add("--seq", type=common.positive, default=128, metavar="N", help="bytes of a sample")
    add("--batch", type=common.positive, default=8, metavar="N", help="samples of a step, over all replicas")
    add("--steps", type=common.positive, default=50, metavar="N", help="optimizer steps")
    add("--lr", type=float, default=3e-3, metavar="X", help="learning rate of AdamW")
    add("--dropout", type=float, default=0.1, metavar="P", help="after attention and MLP")
    add("--seed", type=int, default=0, metavar="N", help="of weights, samples and dropout masks")
    option = parser.add_argument_group("how").add_argument
    option(
        "--tp", type=common.positive, default=None, metavar="N", help="tensor-parallel size (default: all processes)"
    )
    args = parser.parse_args()
    args.tp = args.tp or common.WORLD
    if common.WORLD % args.tp:
        parser.error(f"--tp {args.tp} does not divide the {common.WORLD} processes")
    if args.batch % (common.WORLD // args.tp):
        parser.error(f"--batch {args.batch} is not divisible by the {common.WORLD // args.tp} replicas")
    return args


def train(args, text: Text, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (common.WORLD // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    tp, dp = TensorParallel(mesh["tp"], sequence_parallel=True), mesh["dp"]
    torch.manual_seed(args.seed)  # decides the initial weights, the same at every split
    with device:
        model = ByteModel(args.width, args.layers, args.heads, tp, args.dropout)
    replica = tpfuse.data_parallel(model, dp) if dp.size() > 1 else model
    optimizer = torch.optim.AdamW(tpfuse.param_groups(model, weight_decay=0.1), lr=args.lr)
    mine = args.batch // dp.size()
    offset = dp.get_local_rank() * mine
    for step in range(args.steps):
        ids = sample(text, args.seq + 1, args.batch, args.seed, step, range(offset, offset + mine)).t().to(device)
        rng = tpfuse.make_rng(args.seed, step, offset, device)  # masks by sample: no two replicas share one
        loss = replica(ids, rng)
        loss.backward()
        tpfuse.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9 or step in (0, args.steps - 1):
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=dp.get_group())
            bits = float(mean) / dp.size() / math.log(2)
            common.say(f"step {step + 1:4d}: {bits:.4f} bits per byte")


def main() -> None:
    args = parse()
    with common.one_line_errors():
        text = read_text(args.data, 2.0, args.seq + 1)
    device = common.start()
    with common.one_line_errors():
        train(args, text, device)
    common.stop()


if __name__ == "__main__":
    main()
