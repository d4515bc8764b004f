"""Held-out loss of a small model whose gradients are on time or one step late, with AdamW and with Muon.

    python -m bench.pipeline_delay                        about ten minutes on a core
    python -m bench.pipeline_delay --steps 1100 --seeds 3

The demo's model, text, batches and learning rate (examples/train_gpt.py), in one process, which computes what stages
under 2bw do.  Muon steps on the blocks' matrices, AdamW on the rest.
"""

import math
import statistics
import sys
from argparse import Namespace
from pathlib import Path

import torch

from bench._parser import parser_of
from tpfuse import DelayedGradients, WholeMatrices, clip_grad_norm_, param_groups
from tpfuse.models import GPT
from tpfuse.tools.ledger.text import Progress

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from _options import SIZES, config_of
from _text import Text, read_text, sample, windows

SEQ, BATCH, CLIP, DECAY = 256, 4, 1.0, 0.1


def model_of(seed: int) -> GPT:
    shape = SIZES["0.6m"]
    args = Namespace(family="llama", width=shape["hidden_size"], layers=shape["num_layers"], heads=shape["num_heads"])
    vars(args).update(seq=SEQ, dropout=0.0, untied=False)
    return GPT(config_of(args), seed=seed).train()


def optimizers_of(model: GPT, muon: bool, lr: float) -> list[torch.optim.Optimizer]:
    if not muon:
        return [torch.optim.AdamW(param_groups(model, DECAY), lr=lr, betas=(0.9, 0.95))]
    matrices = WholeMatrices(model.blocks)
    steps = torch.optim.Muon(matrices.parameters(), lr=lr, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    steps.register_step_pre_hook(matrices.gather_gradients)
    return [steps, torch.optim.AdamW(matrices.others(model), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]


def trained(text: Text, args: Namespace, seed: int, muon: bool, late: bool) -> float:
    """Returns the bits per byte of the held-out text after training."""
    model = model_of(seed)
    optimizers = optimizers_of(model, muon, args.lr)
    delayed = DelayedGradients(model) if late else None
    for step in range(args.steps):
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = args.lr * rate(step, args.steps)
        ids = sample(text, SEQ, BATCH, seed, step, range(BATCH))
        loss = model(ids, labels=ids, step=step).loss
        loss.backward()
        if delayed is not None:
            delayed.swap(loss)
        clip_grad_norm_(model, CLIP)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    model.eval()
    with torch.no_grad():
        nats = sum(model(ids, labels=ids, loss_normalizer=1.0).loss.item() for ids in windows(text, SEQ, 16))
    return nats / math.log(2) / (len(text.held_out) - 1)


def rate(step: int, steps: int) -> float:
    """Returns the share of the learning rate: it warms up over a tenth of the steps, then falls by a cosine."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def main(argv: list[str] | None = None) -> None:
    parser = parser_of("bench.pipeline_delay", __doc__)
    parser.add_argument("--steps", type=int, default=400, help="of training (default 400)")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each (default 2)")
    parser.add_argument("--lr", type=float, default=4e-3, help="highest learning rate (default 4e-3)")
    parser.add_argument("--max-mb", type=float, default=8, help="of text (default 8)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    text, progress = read_text(None, args.max_mb, SEQ), Progress(long=True)
    print("| optimizer | bits per byte on time | one step late | difference |\n|---|---|---|---|")
    for muon in (False, True):
        columns: list[list[float]] = [[], []]
        for seed in range(args.seeds):
            for late in (False, True):
                progress.update(f"{'Muon' if muon else 'AdamW'}, seed {seed}, {'late' if late else 'on time'}")
                columns[late].append(trained(text, args, seed, muon, late))
        progress.clear()
        cells = (", ".join(f"{x:.3f}" for x in column) for column in columns)
        difference = statistics.mean(columns[1]) - statistics.mean(columns[0])
        print("| {} | {} | {} | {:+.3f} |".format("Muon" if muon else "AdamW", *cells, difference), flush=True)


if __name__ == "__main__":
    main()
