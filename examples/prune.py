"""An MLP of a trained model, pruned and quantised: the loss of the model against the density of the MLP's weights.

    python examples/prune.py                                  # what make demo-train trained
    torchrun --nproc-per-node 2 examples/prune.py             # the MLP split over two processes
    python examples/prune.py --layer 0 --block 32 --bits 4

Both weights of one block's MLP are pruned to a share of their vectors of 8 rows, those with the largest sums of
squares, and rounded to integers; nothing is trained after it.  A hook of torch puts the sparse MLP in the place of the
trained one.  The loss is of the held-out text of examples/train_gpt.py, in bits per byte; density 0 leaves the MLP out.
"""

import functools
import math
from pathlib import Path

import _common as common
import torch
import torch.distributed as dist
from _text import read_text, windows
from torch import Tensor, nn

from tpfuse import TensorParallel
from tpfuse.kernels import swiglu
from tpfuse.layers import ParallelMLP, SparseLinear
from tpfuse.models import GPT

DENSITIES = 1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.0


class SparseMLP(nn.Module):
    """down(silu(gate) up) with sparse weights, as ParallelMLP: x [m, D] -> [m, D]."""

    def __init__(self, mlp: ParallelMLP, density: float, block: int, bits: int):
        super().__init__()
        self.gate_up = SparseLinear.from_layer(mlp.fc1, density, block=block, bits=bits)
        self.down = SparseLinear.from_layer(mlp.fc2, density, block=block, bits=bits)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up(x)  # [M, 2 F / R], gate and up side by side
        return self.down(swiglu(gate_up.unflatten(1, (-1, 2)))).view(x.shape)


def replaced(sparse: SparseMLP, mlp: ParallelMLP, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """A forward hook: what it returns is taken for the output."""
    return sparse(inputs[0])


def parse():
    parser = common.Parser("Prune and quantise an MLP of a trained model, and print the loss against the density.")
    add = parser.add_argument
    add("--model", type=Path, default=Path("out/demo/hf"), metavar="DIR", help="a Hugging Face directory, over bytes")
    add("--data", type=Path, metavar="PATH", help="a file or folder of text (default: Python's own sources)")
    add("--layer", type=int, default=1, metavar="N", help="the block whose MLP is pruned")
    add("--block", type=int, default=8, metavar="V", help="rows of a vector: 8, 16, 32 or 64")
    add("--bits", type=int, default=8, metavar="N", help="of an integer: 4, 8 or 16")
    return parser.parse_args()


@torch.no_grad()
def held_out_bits(model: GPT, rows: list[Tensor]) -> float:
    """Returns bits per byte of the held-out text."""
    nats = sum(float(model(ids, labels=ids).loss) * ids[:, 1:].numel() for ids in rows)
    return nats / sum(ids[:, 1:].numel() for ids in rows) / math.log(2)


def prune(args, device: torch.device) -> None:
    if not (args.model / "config.json").is_file():
        raise ValueError(f"--model {args.model} is no Hugging Face directory: make demo-train makes it")
    tp = TensorParallel(dist.group.WORLD)
    model = GPT.from_pretrained(args.model, tp=tp, device=device).eval()
    config = model.config
    if config.vocab_size != 256 or not 0 <= args.layer < len(model.blocks):
        raise ValueError(
            f"--model must be over 256 bytes and --layer one of its {len(model.blocks)} blocks, got a vocabulary of"
            f" {config.vocab_size} and {args.layer}"
        )
    mlp = model.blocks[args.layer].mlp
    if mlp.activation != "swiglu":
        raise ValueError(f"--model must have MLPs of swiglu, got {mlp.activation}")
    seq = min(256, config.max_positions)
    rows = [ids.to(device) for ids in windows(read_text(args.data, 8, seq), seq, 16)]
    dense = held_out_bits(model, rows)
    common.say(
        f"{sum(ids[:, 1:].numel() for ids in rows)} bytes held out; dense, {next(mlp.parameters()).dtype}: {dense:.4f}"
    )
    common.say(f"MLP {args.layer} of {len(model.blocks)}, {args.bits} bits, vectors of {args.block} rows")
    common.say("density  bits per byte  over dense")
    for density in DENSITIES:
        sparse = SparseMLP(mlp, density, args.block, args.bits)
        hook = mlp.register_forward_hook(functools.partial(replaced, sparse))
        bits = held_out_bits(model, rows)
        hook.remove()
        common.say(f"{density:7.2f}  {bits:13.4f}  {bits - dense:+10.4f}")


def main() -> None:
    args = parse()
    device = common.start()
    with common.one_line_errors():
        prune(args, device)
    common.stop()


if __name__ == "__main__":
    main()
