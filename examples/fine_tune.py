"""A pretrained language model is fine-tuned with low-rank adapters, split over tensor-parallel ranks.

    python examples/fine_tune.py --model path/to/llama --data my/texts
    torchrun --nproc-per-node 2 examples/fine_tune.py --model path/to/llama --data my/texts     # the same losses

--model is any local Hugging Face directory of a family that tpfuse.models.GPT knows, with a tokenizer.json; without
one, a vocabulary of 256 is taken for bytes (what `make demo-train` writes).  --out gets adapters in PEFT's format.
"""

from pathlib import Path

import _common as common
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import tpfuse
from tpfuse import TensorParallel
from tpfuse.models import GPT


def parse():
    parser = common.Parser("Fine-tune a pretrained language model with low-rank adapters.")
    add = parser.add_argument_group("what").add_argument
    add("--model", type=Path, default=Path("out/demo/hf"), metavar="DIR", help="a Hugging Face directory")
    add("--data", type=Path, required=True, metavar="PATH", help="a text file, or a folder of them")
    add("--out", type=Path, default=Path("out/adapter"), metavar="DIR", help="where the adapters are written")
    add("--rank", type=common.positive, default=8, metavar="N", help="of the adapters")
    add("--alpha", type=float, default=16.0, metavar="X", help="their scale times their rank")
    add = parser.add_argument_group("how").add_argument
    add("--seq", type=common.positive, default=128, metavar="N", help="tokens of a sample")
    add("--batch", type=common.positive, default=4, metavar="N", help="samples of a step")
    add("--steps", type=common.positive, default=20, metavar="N", help="optimizer steps")
    add("--lr", type=float, default=1e-3, metavar="X", help="learning rate of AdamW")
    add("--seed", type=int, default=0, metavar="N", help="of adapters, samples and dropout masks")
    return parser.parse_args()


def read(data: Path) -> str:
    files = sorted(path for path in data.rglob("*") if path.is_file()) if data.is_dir() else [data]
    return "\n\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)


def tokens_of(model: Path, text: str, vocabulary: int) -> Tensor:
    """-> token ids, int64 [N]"""
    path = model / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer

        return torch.tensor(Tokenizer.from_file(str(path)).encode(text).ids)
    if vocabulary != 256:
        raise ValueError(f"{model} has no tokenizer.json, and its vocabulary of {vocabulary} is not that of bytes")
    return torch.tensor(list(text.encode()))


def samples(tokens: Tensor, args, step: int) -> Tensor:
    """-> int64 [batch, seq], the same on every rank: a function of the seed and the step"""
    g = torch.Generator().manual_seed(1_000_003 * args.seed + step)
    starts = torch.randint(len(tokens) - args.seq + 1, (args.batch,), generator=g)
    return torch.stack([tokens[start : start + args.seq] for start in starts.tolist()])


@torch.no_grad()
def held_out_loss(model: GPT, tokens: Tensor, seq: int) -> float:
    windows = tokens[: len(tokens) // seq * seq].view(-1, seq)
    losses = [float(model(window[None], labels=window[None]).loss) for window in windows]
    return sum(losses) / len(losses)


def fine_tune(args, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (common.WORLD,), mesh_dim_names=("tp",))
    tp = TensorParallel(mesh["tp"], sequence_parallel=True)
    model = GPT.from_pretrained(args.model, tp=tp, device=device, seed=args.seed)  # a rank reads its slices only
    tokens = tokens_of(args.model, read(args.data), model.config.vocab_size).to(device)
    cut = len(tokens) * 15 // 16
    train, held_out = tokens[:cut], tokens[cut:]
    if min(len(train), len(held_out)) < args.seq or args.seq > model.config.max_positions:
        raise ValueError(
            f"--seq {args.seq} must be at most the model's {model.config.max_positions} positions and the"
            f" {min(len(train), len(held_out))} tokens held out of --data"
        )
    tpfuse.add_lora(model, rank=args.rank, alpha=args.alpha, seed=args.seed)  # the rest is frozen
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    common.say(f"before: held-out loss {held_out_loss(model.eval(), held_out, args.seq):.4f}")
    for step in range(args.steps):
        ids = samples(train, args, step)
        loss = model.train()(ids, labels=ids, step=step, first_sample=0).loss
        loss.backward()
        tpfuse.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9 or step in (0, args.steps - 1):
            common.say(f"step {step + 1:4d}: loss {float(loss.detach()):.4f}")
    common.say(f"after: held-out loss {held_out_loss(model.eval(), held_out, args.seq):.4f}")
    tpfuse.save_adapter(model, args.out)
    common.say(f"adapters written to {args.out} (peft.PeftModel.from_pretrained loads them)")


def main() -> None:
    args = parse()
    with common.one_line_errors():
        if not args.data.exists():
            raise ValueError(f"--data {args.data} is not there")
    device = common.start()
    with common.one_line_errors():
        fine_tune(args, device)
    common.stop()


if __name__ == "__main__":
    main()
