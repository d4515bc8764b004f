"""A byte-level GPT trained from scratch on real text, under tensor x sequence x data parallelism.

    torchrun --nproc-per-node 2 examples/train_gpt.py                 # two processes, tp=2; without --data, Python's own sources
    torchrun --nproc-per-node 4 examples/train_gpt.py --tp 2 --dp 2 --size 50m --data my/texts
    torchrun --nproc-per-node 2 examples/train_gpt.py --dp 2 --pack   # paragraphs, packed, and balanced over the replicas
    torchrun --nproc-per-node 2 examples/train_gpt.py --resume        # goes on from the last checkpoint, bit for bit

What is learnt does not depend on the split: sample i of step s is a function of (seed, s), its dropout masks of (seed, s, i), the initial
weights of the seed.  So a run may be stopped (Ctrl-C, SIGTERM, a crash) and resumed, on other numbers of processes too.  With --pack the
documents of a step are a function of (seed, s), and of --dp and --micro-batches where they stand: their dropout masks depend on that.

Writes to --out: log.jsonl, loss.png, checkpoints/, and at the end hf/, a directory that transformers loads.
Runs on CPUs (gloo) and, unchanged, on GPUs (nccl, bf16 by autocast).
"""

import gzip
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import _common as common
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import tpfuse
from tpfuse import TensorParallel
from tpfuse.ledger import ThroughputMeter
from tpfuse.models import GPT, GPTConfig
from tpfuse.packing import Balance, balance, document_cost, pack, packed_batch

SIZES = {  # parameters, about 12 layers * width^2
    "3m": dict(hidden_size=256, num_layers=4, num_heads=8),
    "10m": dict(hidden_size=384, num_layers=6, num_heads=12),
    "50m": dict(hidden_size=768, num_layers=7, num_heads=12),
}
END = 0  # the byte between two files, which text does not hold
HELD_OUT = 1 << 16  # bytes to validate on, at most


def parse():
    parser = common.Parser("Train a byte-level GPT on real text, under tensor x sequence x data parallelism.")
    add = parser.add_argument_group("model and text").add_argument
    add("--size", choices=SIZES, default="3m", help="parameters")
    add("--data", type=Path, metavar="PATH", help="a file, or a folder of files (default: the Python standard library's sources)")
    add("--max-mb", type=float, default=8, metavar="MB", help="read this much of it at most")
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=common.positive, default=500, metavar="N", help="optimizer steps")
    add("--batch", type=common.positive, default=8, metavar="N", help="sequences a step, over all processes")
    add("--seq", type=common.positive, default=128, metavar="N", help="bytes a sequence")
    add("--pack", action="store_true", help="train on paragraphs, packed into rows; none sees another (a step has about as many bytes)")
    add("--lr", type=float, default=2e-3, metavar="X", help="highest learning rate; warms up over a tenth of the steps, then a cosine")
    add("--dropout", type=float, default=0.1, metavar="P", help="dropout everywhere: embedding, attention, residual")
    add("--seed", type=int, default=0, metavar="N", help="decides weights, samples and dropout masks")
    add = parser.add_argument_group("how it is split and run (none of it changes what is learnt, but for rounding)").add_argument
    add("--tp", type=common.positive, metavar="N", help="tensor-parallel processes (default: all that --dp leaves)")
    add("--dp", type=common.positive, default=1, metavar="N", help="data-parallel replicas; tp x dp processes in all")
    add("--micro-batches", type=common.positive, default=1, metavar="N", help="parts that a replica's batch is computed in, to save memory")
    add("--no-sequence-parallel", action="store_true", help="every tensor-parallel rank holds all rows between GEMMs")
    add("--saving", choices=("fastest", "smallest"), default="fastest", help="for backward, keep what is fastest or what is smallest")
    add("--bf16", action="store_true", help="autocast to bfloat16 (on a GPU it is the default)")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default=Path("out/train_gpt"), metavar="DIR", help="everything is written here")
    add("--checkpoint-every", type=common.positive, default=200, metavar="N", help="steps between checkpoints")
    add("--validate-every", type=common.positive, default=100, metavar="N", help="steps between validations")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out, where there is one")
    add("--restart", action="store_true", help="start anew although --out holds a run, and replace it")
    add("--prompt", default="class Error(", metavar="TEXT", help="what the trained model continues at the end")
    args = parser.parse_args()

    args.tp = args.tp or max(1, common.WORLD // args.dp)
    if args.tp * args.dp != common.WORLD:
        parser.error(
            f"--tp {args.tp} x --dp {args.dp} needs {args.tp * args.dp} processes, and there are {common.WORLD}:"
            f" torchrun --nproc-per-node {args.tp * args.dp} {sys.argv[0]} ..."
        )
    for name, value in (("--max-mb", args.max_mb), ("--lr", args.lr)):
        if not 0 < value < math.inf:
            parser.error(f"{name} must be a positive number, got {value}")
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout must be in [0, 1), got {args.dropout}")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed must be in [0, 2^63), got {args.seed}")
    if args.seq < 2:
        parser.error("--seq must be at least 2: a byte to read and one to guess")
    if args.batch % (args.dp * args.micro_batches):
        parser.error(f"--batch {args.batch} is not divisible by --dp {args.dp} x --micro-batches {args.micro_batches}")
    if args.resume and args.restart:
        parser.error("--resume and --restart exclude each other")
    if not 0 < len(args.prompt.encode()) < args.seq:
        parser.error(f"--prompt must have 1 to {args.seq - 1} bytes (--seq {args.seq})")
    return args


# ---- text


class Text(NamedTuple):
    train: np.ndarray  # uint8
    held_out: bytes  # whole windows of it, see windows()
    fingerprint: str


def standard_library() -> list[Path]:
    """The sources of the Python that runs this; no tests, no installed packages, no tables of character sets."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}
    return sorted(path for path in root.rglob("*.py") if not skipped.intersection(path.relative_to(root).parts))


def read_text(data: Path | None, max_mb: float, seq: int) -> Text:
    """Every 16th file is held out, or of fewer files the last 16th."""
    if data is None:
        files = standard_library()
    elif data.is_dir():
        files = sorted(path for path in data.rglob("*") if path.is_file())
    elif data.is_file():
        files = [data]
    else:
        raise ValueError(f"--data {data} is neither a file nor a folder")
    texts, room = [], int(max_mb * 1e6)
    for path in files:
        if room > 0:
            texts.append(path.read_bytes()[:room])
            room -= len(texts[-1])
    if len(texts) < 16:  # cut the whole at 15/16
        whole = bytes([END]).join(texts)
        train, held_out = whole[: len(whole) * 15 // 16], whole[len(whole) * 15 // 16 :]
    else:
        train, held_out = (bytes([END]).join(t for i, t in enumerate(texts) if (i % 16 == 8) == out) for out in (False, True))
    count = min(HELD_OUT, len(held_out) - 1) // (seq - 1)
    if len(train) < seq or count < 1:
        raise ValueError(f"--data {data}: {len(train)} bytes to train on and {len(held_out)} held out are too few for --seq {seq}")
    held_out = held_out[: count * (seq - 1) + 1]
    return Text(np.frombuffer(train, np.uint8), held_out, hashlib.sha256(train + held_out).hexdigest()[:16])


def sample(text: Text, seq: int, batch: int, seed: int, step: int, samples: range) -> Tensor:
    """Some of the ``batch`` samples of a step, int64 [len(samples), seq]: a function of seed, step and the sample's number alone."""
    draws = np.random.Philox(key=seed, counter=[0, 0, 0, step]).random_raw(batch)
    starts = (draws % np.uint64(len(text.train) - seq + 1)).astype(np.int64)
    return torch.from_numpy(np.stack([text.train[starts[i] : starts[i] + seq] for i in samples])).long()


def paragraphs(text: Text, longest: int) -> np.ndarray:
    """int64 [N, 2]: where each document of the training text begins and ends.  It is a paragraph with the blank line after it, of two bytes
    at least (one to read and one to guess), and cut where it is too long."""
    found = [match.span() for match in re.finditer(rb"[^\0]+?(?:\n\s*\n|\0|\Z)", text.train.tobytes())]
    cut = [(at, min(at + longest, end)) for start, end in found for at in range(start, end, longest)]
    return np.array([(start, end) for start, end in cut if end - start >= 2], dtype=np.int64)


def documents(spans: np.ndarray, room: int, seed: int, step: int) -> np.ndarray:
    """Spans of the documents of a step, as many as ``room`` bytes hold: a function of seed and step alone."""
    draws = np.random.Philox(key=seed, counter=[0, 0, 0, step]).random_raw(room // 2)  # none is shorter than two bytes
    drawn = spans[(draws % np.uint64(len(spans))).astype(np.int64)]
    return drawn[: np.searchsorted((drawn[:, 1] - drawn[:, 0]).cumsum(), room, side="right")]


def windows(text: Text, seq: int, batch: int) -> Iterator[Tensor]:
    """The held-out text, int64 [batch or fewer, seq]: windows that overlap by one byte, so that all but the first are guessed once."""
    held_out = np.frombuffer(text.held_out, np.uint8)
    every = np.lib.stride_tricks.sliding_window_view(held_out, seq)[:: seq - 1]
    for i in range(0, len(every), batch):
        yield torch.from_numpy(every[i : i + batch].copy()).long()


# ---- one step


class Setup(NamedTuple):
    """What a step needs: the model, as it is and as DDP wraps it, and where it runs."""

    args: object
    text: Text
    device: torch.device
    bf16: bool
    dp_rank: int
    model: GPT
    replica: torch.nn.Module
    optimizer: torch.optim.Optimizer
    spans: np.ndarray | None  # of the documents, with --pack

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)


class Micro(NamedTuple):
    """One forward and backward: the model's arguments, and what its loss is divided by."""

    call: dict
    normalizer: float


def micro_batches(on: Setup, step: int) -> list[Micro]:
    """This replica's part of a step."""
    args = on.args
    if args.pack:
        return packed_micro_batches(on, step)
    local = args.batch // args.dp
    size = local // args.micro_batches
    normalizer = args.batch * (args.seq - 1) / args.dp  # DDP averages over dp
    micro = []
    for first in range(on.dp_rank * local, (on.dp_rank + 1) * local, size):
        ids = sample(on.text, args.seq, args.batch, args.seed, step, range(first, first + size)).to(on.device)
        micro.append(Micro(dict(input_ids=ids, labels=ids, first_sample=first), normalizer))
    return micro


def packed_micro_batches(on: Setup, step: int) -> list[Micro]:
    """A row of documents each; replicas may have unequal numbers of them, since gradients meet in the last only."""
    args = on.args
    spans, shared = balanced(on, step)
    mine = [on.text.train[start:end] for start, end in spans[shared.shares[on.dp_rank]]]
    normalizer = int((spans[:, 1] - spans[:, 0] - 1).sum()) / args.dp
    rows = pack([len(document) for document in mine], args.batch * args.seq // (args.dp * args.micro_batches))
    micro = []
    for i, row in enumerate(rows):
        batch = packed_batch([torch.from_numpy(mine[d].astype(np.int64)).to(on.device) for d in row])
        micro.append(Micro(batch._asdict() | dict(first_sample=i * args.dp + on.dp_rank), normalizer))
    return micro


def balanced(on: Setup, step: int) -> tuple[np.ndarray, Balance]:
    """The documents of a step, and which replica has which: by cost, so that none waits for another."""
    args = on.args
    spans = documents(on.spans, args.batch * args.seq, args.seed, step)
    return spans, balance([document_cost(int(end - start), on.model.config) for start, end in spans], args.dp)


def forward_backward(on: Setup, step: int) -> float:
    """Gradients of the mean loss over the step's global batch -> this replica's share of that mean, times dp."""
    total, parts = 0.0, micro_batches(on, step)
    for i, (call, normalizer) in enumerate(parts):
        wait = on.args.dp > 1 and i < len(parts) - 1
        with on.replica.no_sync() if wait else nullcontext():
            with on.autocast():
                loss = on.replica(**call, loss_normalizer=normalizer, step=step).loss
            loss.backward()
        total += loss.item()
    return total


def learning_rate(args, step: int) -> float:
    warmup = max(1, args.steps // 10)
    if step < warmup:
        return args.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, args.steps - warmup)
    return args.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)


@torch.no_grad()
def validate(on: Setup) -> float:
    """Bits per byte of the held-out text; each replica reads a part."""
    args = on.args
    size = args.batch // args.dp // args.micro_batches
    on.model.eval()
    nats = torch.zeros((), dtype=torch.float64, device=on.device)
    for i, ids in enumerate(windows(on.text, args.seq, size)):
        if i % args.dp == on.dp_rank:
            ids = ids.to(on.device)
            with on.autocast():
                nats += on.model(ids, labels=ids, loss_normalizer=1.0).loss
    on.model.train()
    dist.all_reduce(nats)  # tp ranks hold the same sum
    return nats.item() / args.tp / math.log(2) / (len(on.text.held_out) - 1)


def gzip_bits(text: Text) -> float:
    """Bits per byte of gzip -9 on the same bytes."""
    return 8 * len(gzip.compress(text.held_out, 9)) / len(text.held_out)


# ---- the run


class StopSignal:
    """Inside, Ctrl-C and SIGTERM are noted rather than obeyed; a second one is obeyed."""

    def __enter__(self):
        self.signum = 0
        self.before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number, frame):
        self.signum = number
        signal.signal(number, self.before[number])


class Log:
    """log.jsonl, one object a line; lines beyond the step that a run resumes at (or torn by a crash) are dropped."""

    def __init__(self, path: Path, step: int):
        self.records = [r for r in self._read(path) if r["step"] <= step]
        fresh = path.with_suffix(".tmp")
        fresh.write_text("".join(json.dumps(r) + "\n" for r in self.records))
        os.replace(fresh, path)
        self.file = open(path, "a", buffering=1)

    @staticmethod
    def _read(path: Path) -> Iterator[dict]:
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return

    def __call__(self, **record) -> None:
        self.records.append(record)
        self.file.write(json.dumps(record) + "\n")

    def draw(self, path: Path, gzip_bits: float) -> None:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        fig, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
        loss = [(r["step"], r["loss"] / math.log(2)) for r in self.records if "loss" in r]
        held_out = [(r["step"], r["held_out_bits"]) for r in self.records if "held_out_bits" in r]
        ax.plot(*zip(*loss), lw=0.8, label="training")
        if held_out:
            ax.plot(*zip(*held_out), marker="o", label="held out")
        ax.axhline(gzip_bits, ls="--", color="gray", label=f"gzip -9, held out: {gzip_bits:.2f}")
        ax.set(xlabel="step", ylabel="bits per byte", ylim=(0, 8))
        ax.legend()
        fig.savefig(path, dpi=120)
        plt.close(fig)


# What a run must share with the checkpoint it goes on from, for the rest of it to be the same run.
FIXED = "size", "seq", "batch", "pack", "seed", "steps", "lr", "dropout"


def resume(on: Setup, checkpoints: Path) -> int:
    """Loads the last checkpoint -> the step to go on at."""
    found = tpfuse.load_checkpoint(checkpoints, on.model, on.optimizer)
    if found is None:
        common.say(f"no checkpoint in {checkpoints}: starting at step 0")
        return 0
    step, extra = found
    for key, now in settings(on).items():
        if extra.get(key) != now:
            raise ValueError(f"--{key} is {now} and was {extra.get(key)} in {checkpoints}: resume with the same, or --restart")
    common.say(f"resumed at step {step} of {on.args.steps}")
    return step


def settings(on: Setup) -> dict:
    return {key: getattr(on.args, key) for key in FIXED} | {"data": on.text.fingerprint}


def agree(loss: float, signum: int, device: torch.device) -> tuple[float, int]:
    """The mean loss, and the largest signal that any process got: the same everywhere, so all stop at the same step."""
    mine = torch.tensor([loss, signum], dtype=torch.float64, device=device)
    every = [torch.empty_like(mine) for _ in range(common.WORLD)]
    dist.all_gather(every, mine)
    losses, signals = torch.stack(every, 1).tolist()
    return sum(losses) / common.WORLD, int(max(signals))


def train(on: Setup, first: int, log: "Log | None", checkpoints: Path) -> int:
    """Steps ``first`` .. args.steps; -> 0, or the signal that stopped it, with a checkpoint written."""
    args = on.args
    if args.dp > 2 and first < args.steps:  # DDP fixes its order of summation in the first backward: for a bitwise resume, not in a step
        forward_backward(on, first)
        on.optimizer.zero_grad()
    name = torch.cuda.get_device_name(on.device) if on.device.type == "cuda" else ""
    meter = ThroughputMeter(on.model.config, seq=args.seq, batch=args.batch, devices=common.WORLD, device_name=name)
    quiet = dict(mininterval=0.5 if sys.stderr.isatty() else 10, disable=common.RANK != 0)
    with StopSignal() as stop, tqdm(total=args.steps, initial=first, unit="step", dynamic_ncols=True, **quiet) as bar:
        for step in range(first, args.steps):
            meter.start()
            lr = learning_rate(args, step)
            for group in on.optimizer.param_groups:
                group["lr"] = lr
            loss = forward_backward(on, step)
            norm = tpfuse.clip_grad_norm_(on.model, 1.0)
            on.optimizer.step()
            on.optimizer.zero_grad()
            loss, stopped_by = agree(loss, stop.signum, on.device)
            tokens, packed = None, {}
            if args.pack:
                spans, shared = balanced(on, step)
                tokens, packed = int((spans[:, 1] - spans[:, 0]).sum()), dict(imbalance=[shared.before, shared.after])
            meter.stop(tokens)

            done = step + 1
            if log:
                speed = dict(tokens_per_s=round(meter.last_tokens_per_s), model_tflops=meter.flops_per_s / 1e12, mfu=meter.mfu)
                log(step=done, loss=loss, lr=lr, grad_norm=float(norm), **speed, **packed)
                bar.set_postfix_str(f"loss {loss:.3f}, {meter}", refresh=False)
                bar.update()
            if done % args.validate_every == 0 or done == args.steps:
                bits = validate(on)
                if log:
                    log(step=done, held_out_bits=bits)
                    bar.write(f"step {done}: held out {bits:.3f} bits per byte")
            if done % args.checkpoint_every == 0 or done == args.steps or stopped_by:
                tpfuse.save_checkpoint(checkpoints, on.model, on.optimizer, step=done, extra=settings(on))
            if stopped_by:
                return stopped_by
    return 0


@torch.no_grad()
def continue_prompt(hf: Path, prompt: str, length: int, device: torch.device) -> str:
    """The saved model, whole on this process, goes on from a prompt up to ``length`` bytes, always with the likeliest byte."""
    model = GPT.from_pretrained(hf, device=device)
    ids = torch.tensor([list(prompt.encode())], device=device)
    tokens = model.generate(ids, max_new_tokens=length - ids.shape[1], eos_token_id=END)[0].tolist()
    return bytes(tokens).rstrip(bytes([END])).decode(errors="replace").rstrip()


def main() -> None:
    args = parse()
    checkpoints, hf, log_path = args.out / "checkpoints", args.out / "hf", args.out / "log.jsonl"
    with common.one_line_errors():
        for path in checkpoints, hf:
            if path.exists() and not log_path.exists():
                raise ValueError(f"{path} was not written by a run of this script: choose another --out")
        if (checkpoints / "latest").exists() and not args.resume and not args.restart:
            raise ValueError(f"{args.out} holds a run: --resume goes on with it, --restart throws it away")
        text = read_text(args.data, args.max_mb, args.seq)

    device = common.start()
    mesh = init_device_mesh(device.type, (args.dp, args.tp), mesh_dim_names=("dp", "tp"))
    tp = TensorParallel(mesh["tp"], sequence_parallel=not args.no_sequence_parallel)
    with common.one_line_errors():
        prints = [""] * common.WORLD
        dist.all_gather_object(prints, text.fingerprint)
        if len(set(prints)) > 1:
            raise ValueError("--data is not the same on all machines")
        rates = dict.fromkeys(("dropout", "attention_dropout", "embedding_dropout"), args.dropout)
        width = SIZES[args.size]["hidden_size"]  # at this width and length, 1/sqrt(width) learns faster than GPT-2's 0.02
        config = GPTConfig(vocab_size=256, max_positions=args.seq, init_std=width**-0.5, **SIZES[args.size], **rates)
        with device:
            model = GPT(config, tp=tp, dp=mesh["dp"], seed=args.seed, saving=args.saving)
        replica = DistributedDataParallel(model, process_group=mesh["dp"].get_group()) if args.dp > 1 else model
        optimizer = torch.optim.AdamW(tpfuse.param_groups(model, weight_decay=0.1), lr=args.lr, betas=(0.9, 0.95))
        bf16, spans = args.bf16 or device.type == "cuda", paragraphs(text, args.seq) if args.pack else None
        on = Setup(args, text, device, bf16, mesh["dp"].get_local_rank(), model, replica, optimizer, spans)
        first = resume(on, checkpoints) if args.resume else 0

    log = None
    if common.RANK == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        if not args.resume:
            for old in checkpoints, hf:
                shutil.rmtree(old, ignore_errors=True)
        log = Log(log_path, first)
    dist.barrier()
    gzipped = gzip_bits(text)
    common.say(
        f"{parameters(config):,} parameters, {len(text.train):,} bytes of text, tp={args.tp} x dp={args.dp} on {device.type},"
        f" {'bf16' if on.bf16 else 'fp32'}; gzip -9 takes {gzipped:.3f} bits per byte of the held-out {len(text.held_out):,}"
    )
    began = time.perf_counter()
    stopped_by = train(on, first, log, checkpoints)
    minutes = (time.perf_counter() - began) / 60
    if log:
        log.draw(args.out / "loss.png", gzipped)
    if stopped_by:
        again = [a for a in sys.argv[1:] if a not in ("--resume", "--restart")] + ["--resume"]
        common.say(f"stopped by {signal.Signals(stopped_by).name}, checkpoint written; to go on:\n    {common.launch(shlex.join(again))}")
        common.stop()
        sys.exit(128 + stopped_by)

    model.save_pretrained(hf)
    if log:
        bits = [r["held_out_bits"] for r in log.records if "held_out_bits" in r][-1]
        if args.pack:
            before, after = np.mean([r["imbalance"] for r in log.records if "imbalance" in r], 0)
            print(
                f"largest share of a step over the mean, dp={args.dp}: {before:.3f} dealt in turn, {after:.3f} balanced (mean of the steps)"
            )
        speeds = sorted(r["tokens_per_s"] for r in log.records if "tokens_per_s" in r)
        print(f"{args.steps - first} steps in {minutes:.1f} minutes, {speeds[len(speeds) // 2]:,} tokens/s (median)")
        print(f"held out: {bits:.3f} bits per byte; gzip -9: {gzipped:.3f}")
        print(f"written to {args.out}: log.jsonl, loss.png, checkpoints/, hf/ (transformers loads it)")
        print(f"\nhf/ at TP=1 continues {args.prompt!r}:\n{continue_prompt(hf, args.prompt, args.seq, device)}", flush=True)
    common.stop()


def parameters(c: GPTConfig) -> int:
    return c.num_layers * (12 * c.hidden_size**2 + 13 * c.hidden_size) + (c.vocab_size + c.max_positions + 2) * c.hidden_size


if __name__ == "__main__":
    main()
