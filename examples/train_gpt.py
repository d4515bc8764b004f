"""A byte-level GPT trained from scratch on real text, under tensor, sequence, data and pipeline parallelism.

    torchrun --nproc-per-node 2 examples/train_gpt.py                 # tp=2; without --data, Python's own sources
    torchrun --nproc-per-node 4 examples/train_gpt.py --tp 2 --dp 2 --size 50m --data my/texts
    torchrun --nproc-per-node 2 examples/train_gpt.py --family gpt2 --width 256 --heads 8 --dropout 0.1
    torchrun --nproc-per-node 2 examples/train_gpt.py --dp 2 --pack   # paragraphs, packed, balanced over the replicas
    torchrun --nproc-per-node 4 examples/train_gpt.py --dp 4 --ok-topk 0.01   # a hundredth of the gradients is sent
    torchrun --nproc-per-node 4 examples/train_gpt.py --pp 2 --schedule zbv --batch 8 --micro-batches 8 --layers 8
    torchrun --nproc-per-node 4 examples/train_gpt.py --pp 4 --schedule 2bw --batch 8 --micro-batches 8 --layers 4
    torchrun --nproc-per-node 4 examples/train_gpt.py --plan plan.json --batch 8   # of python -m tpfuse plan --json
    torchrun --nproc-per-node 2 examples/train_gpt.py --cp 2 --seq 1024   # half of each sequence on each process
    torchrun --nproc-per-node 2 examples/train_gpt.py --bitwise 4     # the same bits at --tp 1, 2 and 4
    torchrun --nproc-per-node 2 examples/train_gpt.py --resume        # goes on from the last checkpoint, bit for bit

What is learnt does not depend on the split: sample i of step s is a function of (seed, s), its dropout masks of
(seed, s, i), the initial weights of the seed.  So a run may be stopped (Ctrl-C, SIGTERM, a crash) and resumed, on
other numbers of processes too.  With --pack the documents of a step are a function of (seed, s), and of --dp and
--micro-batches where they stand: their dropout masks depend on that.

Writes to --out: log.jsonl, loss.png, checkpoints/, best/step-.../, the model with the fewest held-out bits so far, and
at the end hf/, the last one; transformers loads both, and training.json in them says which step they are of.
Runs on CPUs (gloo) and, unchanged, on GPUs (nccl, bf16 by autocast).
"""

import math
import shlex
import shutil
import signal
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import _common as common
import numpy as np
import torch
import torch.distributed as dist
from _batches import Batches
from _options import SIZES, config_of, parse, stage_of
from _run import Best, Log, StopSignal, save_trained, weights_digest
from _text import END, Text, gzip_bits, paragraphs, read_text
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import tpfuse
from tpfuse import TensorParallel
from tpfuse.ledger import ThroughputMeter, parameter_count
from tpfuse.models import GPT
from tpfuse.training.checkpoint.job import take

# ---- one step


class Setup(NamedTuple):
    """A run: the model, as it is and as DDP wraps it or a pipeline runs its stages, its text, and where it runs."""

    args: object
    text: Text
    device: torch.device
    bf16: bool
    batches: Batches
    model: GPT
    replica: torch.nn.Module
    pipeline: tpfuse.pipeline.Pipeline | None  # with --pp
    main: tpfuse.MainGrad | None  # with --main-grad, in DDP's place
    hook: tpfuse.OkTopk | None  # with --ok-topk, of DDP
    delayed: tpfuse.DelayedGradients | None  # with --delayed, but where the pipeline delays them
    optimizer: torch.optim.Optimizer

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)


def forward_backward(setup: Setup, step: int) -> float | None:
    """Gradients of the mean loss over the step's global batch -> a number whose mean over processes is that loss.

    Under --schedule 2bw both are of the batch before; None in the first step.
    """
    labels = setup.batches.labels(step)
    if setup.pipeline is None:
        loss = micro_batches(
            setup, step, labels / (setup.args.tree_of or setup.args.dp)
        )  # over which gradients are averaged
    else:
        with setup.autocast():
            late = setup.pipeline.step(**setup.batches.merged(step), loss_normalizer=labels, step=step)
            loss = None if late is None else late.item()
    if setup.main is not None:
        setup.main.reduce()
    return loss


def gradients(setup: Setup, step: int) -> float | None:
    """What :func:`forward_backward` does; with --delayed of the step before, None in the first one."""
    loss = forward_backward(setup, step)
    if setup.delayed is None:
        return loss
    late = setup.delayed.swap(torch.tensor(loss, dtype=torch.float64))
    return None if late is None else late.item()


def update(setup: Setup) -> torch.Tensor:
    """Updates the weights by the gradients, whose norm before clipping it returns."""
    norm = tpfuse.clip_grad_norm_(setup.model, 1.0)
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    return norm


def micro_batches(setup: Setup, step: int, normalizer: float) -> float:
    """Forward and backward over one micro-batch after another -> the sum of their losses."""
    total, calls = 0.0, setup.batches.micro_batches(step)
    for i, call in enumerate(calls):
        wait = isinstance(setup.replica, DistributedDataParallel) and i < len(calls) - 1
        with setup.replica.no_sync() if wait else nullcontext():
            with setup.autocast():
                loss = setup.replica(**call, loss_normalizer=normalizer, step=step).loss
            loss.backward()
        total += loss.item()
    return total / len(calls) if setup.args.tree_of else total


def learning_rate(args, step: int) -> float:
    warmup = max(1, args.steps // 10)
    if step < warmup:
        return args.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, args.steps - warmup)
    return args.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)


def betas_of(args) -> tuple[float, float]:
    """AdamW's.  A sparse gradient of a parameter is not zero once in 1 / density steps, which its mean square must
    outlast to be one."""
    return 0.9, 0.95 if args.ok_topk is None else max(0.95, 1 - args.ok_topk / 10)


@torch.no_grad()
def validate(setup: Setup) -> float:
    """Returns the bits per byte of the held-out text; each replica reads a part."""
    evaluate = setup.pipeline.evaluate if setup.pipeline else lambda **call: setup.model(**call).loss
    setup.model.eval()
    nats = torch.zeros((), dtype=torch.float64, device=setup.device)
    for call in setup.batches.held_out():
        with setup.autocast():
            nats += evaluate(**call, loss_normalizer=1.0)
    setup.model.train()
    if setup.pipeline is None:  # whose loss is that of all replicas
        dist.all_reduce(nats)
        nats /= setup.args.tp * setup.args.cp  # whose ranks hold the same sum
    return nats.item() / math.log(2) / (len(setup.text.held_out) - 1)


# ---- the run

# What a run must share with the checkpoint it goes on from, for the rest of it to be the same run.
FIXED = "family", "width", "layers", "heads", "seq", "batch", "pack", "seed", "steps", "lr", "dropout"
FIXED += "ok_topk", "ok_topk_warmup", "bitwise", "tree_of", "delayed"


def resume(setup: Setup, checkpoints: Path) -> int:
    """Loads the last checkpoint -> the step to go on at."""
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            loaded = tpfuse.load_checkpoint(checkpoints, setup.model, setup.optimizer, hook=setup.hook)
        for warning in warned:
            warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
    except ValueError as error:
        flags = "--family, --size, --width, --layers, --heads, --untied, --seq and --delayed"
        raise ValueError(f"{error}; a run goes on with its own {flags}") from None
    if loaded is None:
        common.say(f"no checkpoint in {checkpoints}: starting at step 0")
        return 0
    step, extra = loaded
    if "size" in extra:  # of a run before there were families
        extra |= dict(zip(("family", "width", "layers", "heads"), ("gpt2", *SIZES[extra["size"]].values())))
    for key, now in settings(setup).items():
        if extra.get(key) != now:
            flag, was = "dp x --micro-batches" if key == "tree_of" else key.replace("_", "-"), extra.get(key)
            raise ValueError(f"--{flag} is {now} and was {was} in {checkpoints}: resume with the same, or --restart")
    same = not any("not bit for bit" in str(warning.message) for warning in warned)
    common.say(f"resumed at step {step} of {setup.args.steps}{', bit for bit' if same else ''}")
    return step


def settings(setup: Setup) -> dict:
    return {key: getattr(setup.args, key) for key in FIXED} | {"data": setup.text.fingerprint}


def agree(loss: float, signum: int, device: torch.device) -> tuple[float, int]:
    """Returns the mean loss and the largest signal of any process: the same everywhere, so all stop at one step."""
    mine = torch.tensor([loss, signum], dtype=torch.float64, device=device)
    parts = [torch.empty_like(mine) for _ in range(common.WORLD)]
    dist.all_gather(parts, mine)
    losses, signals = torch.stack(parts, 1).tolist()
    return sum(losses) / common.WORLD, int(max(signals))


def train(setup: Setup, start: int, log: Log | None, best: Best) -> int:
    """Steps ``start`` .. args.steps; -> 0, or the signal that stopped it, with a checkpoint written."""
    args = setup.args
    if (args.dp > 2 or setup.hook) and isinstance(setup.replica, DistributedDataParallel) and start < args.steps:
        # DDP fixes its buckets and order of summation in the first backward: for a bitwise resume, not in a step
        forward_backward(setup, start)
        setup.optimizer.zero_grad()
    if setup.hook:  # only now: a residual keeps what it was given
        setup.replica.register_comm_hook(setup.hook, tpfuse.ok_topk_hook)
    name = torch.cuda.get_device_name(setup.device) if setup.device.type == "cuda" else ""
    meter = ThroughputMeter(setup.model.config, seq=args.seq, batch=args.batch, devices=common.WORLD, device_name=name)
    quiet = dict(mininterval=0.5 if sys.stderr.isatty() else 10, disable=common.RANK != 0)
    with (
        StopSignal(common.UNDER_TORCHRUN) as stop,
        tqdm(total=args.steps, initial=start, unit="step", dynamic_ncols=True, **quiet) as bar,
    ):
        for step in range(start, args.steps):
            meter.start()
            lr = learning_rate(args, step)
            for group in setup.optimizer.param_groups:
                group["lr"] = lr
            late = gradients(setup, step)
            norm = update(setup)
            if args.delayed and step + 1 == args.steps:  # no batch comes whose step would bring these
                (setup.delayed or setup.pipeline).drain()
                update(setup)
            loss, stopped_by = agree(late or 0.0, stop.number, setup.device)
            tokens, extras = None, {} if late is None else dict(loss=loss)
            if args.pack:
                shared = setup.batches.balanced(step)
                tokens = int(setup.batches.lengths(step).sum())
                extras["imbalance"] = [shared.before, shared.after]
            if setup.hook:
                extras["bytes_sent"] = setup.hook.sent
            if args.bitwise is not None:
                extras["weights_sha256"] = weights_digest(setup.model)
            meter.stop(tokens)

            reached = step + 1
            if log:
                speed = dict(
                    tokens_per_s=round(meter.last_tokens_per_s), model_tflops=meter.flops_per_s / 1e12, mfu=meter.mfu
                )
                log(step=reached, lr=lr, grad_norm=float(norm), **speed, **extras)
                bar.set_postfix_str(f"{'' if late is None else f'loss {loss:.3f}, '}{meter}", refresh=False)
                bar.update()
            if reached % args.validate_every == 0 or reached == args.steps:
                bits = validate(setup)
                best.offer(setup.model, reached, bits)
                if log:
                    log(step=reached, held_out_bits=bits)
                    digest = f", weights sha256 {extras['weights_sha256']}" if args.bitwise is not None else ""
                    bar.write(f"step {reached}: held out {bits:.3f} bits per byte{digest}")
            if reached % args.checkpoint_every == 0 or reached == args.steps or stopped_by:
                saved = dict(step=reached, extra=settings(setup), hook=setup.hook)
                tpfuse.save_checkpoint(args.out / "checkpoints", setup.model, setup.optimizer, **saved)
            if stopped_by:
                return stopped_by
    return 0


def continued(hf: Path, args, device: torch.device) -> str:
    """Continues the prompt up to the length of a sample with the saved model, whole on this process."""
    model = GPT.from_pretrained(hf, device=device)
    ids = torch.tensor([list(args.prompt.encode())], device=device)
    tokens = model.generate(
        ids,
        max_new_tokens=args.seq - ids.shape[1],
        eos_token_id=END,
        do_sample=True,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
    )
    return bytes(tokens[0].tolist()).rstrip(bytes([END])).decode(errors="replace").rstrip()


def main() -> None:
    args = parse()
    checkpoints, hf, log_path = args.out / "checkpoints", args.out / "hf", args.out / "log.jsonl"
    written = [checkpoints, hf, args.out / "best", args.out / "tensorboard"]
    with common.one_line_errors():
        for path in written:
            if path.exists() and not log_path.exists():
                raise ValueError(f"{path} was not written by a run of this script: choose another --out")
        if (checkpoints / "latest").exists() and not args.resume and not args.restart:
            raise ValueError(f"{args.out} holds a run: --resume goes on with it, --restart throws it away")
        text = read_text(args.data, args.max_mb, args.seq)

    device = common.start(args.timeout)
    sizes = args.pp, args.dp, args.cp, args.tp
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "dp", "cp", "tp"))
    with common.one_line_errors():
        rows, pieces = not args.no_sequence_parallel, mesh["cp"] if args.cp > 1 else None
        tp = TensorParallel(mesh["tp"], sequence_parallel=rows, bitwise=args.bitwise, cp=pieces, cp_kind=args.cp_kind)
        prints = [""] * common.WORLD
        dist.all_gather_object(prints, text.fingerprint)
        if len(set(prints)) > 1:
            raise ValueError("--data is not the same on all machines")
        config = config_of(args)
        with device:
            stage = stage_of(args, mesh["pp"].get_local_rank())
            model = GPT(
                config, tp=tp, dp=mesh["dp"], stage=stage, seed=args.seed, saving=args.saving, recompute=args.recompute
            )
        if args.compile:
            for block in filter(None, model.blocks):  # None: of another stage
                block.compile()
        main, replica, pipeline, hook = None, model, None, None
        if stage is not None:
            trees = args.bitwise is not None
            pipeline = tpfuse.pipeline.schedule(model, mesh["pp"], args.schedule, args.micro_batches, bitwise=trees)
        if args.main_grad:
            main = tpfuse.MainGrad(model, mesh["dp"])
        elif args.tree_of is not None and stage is None:
            replica = tpfuse.data_parallel(model, mesh["dp"], bitwise_micro_batches=args.tree_of)
        elif args.dp > 1 and stage is None:
            replica = tpfuse.data_parallel(model, mesh["dp"])
        if args.ok_topk is not None:
            hook = tpfuse.OkTopk(args.ok_topk, warmup_steps=args.ok_topk_warmup or 0, group=mesh["dp"].get_group())
        optimizer = torch.optim.AdamW(tpfuse.param_groups(model, weight_decay=0.1), lr=args.lr, betas=betas_of(args))
        bf16, spans = args.bf16 or device.type == "cuda", paragraphs(text, args.seq) if args.pack else None
        setup = Setup(
            args=args,
            text=text,
            device=device,
            bf16=bf16,
            batches=Batches(args, text, spans, config, mesh["dp"].get_local_rank(), device),
            model=model,
            replica=replica,
            pipeline=pipeline,
            main=main,
            hook=hook,
            delayed=tpfuse.DelayedGradients(model) if args.delayed and args.schedule != "2bw" else None,
            optimizer=optimizer,
        )
        start = resume(setup, checkpoints) if args.resume else 0
        if common.RANK == 0:
            take(args.out)  # from here on no other run may write there

    log = None
    if common.RANK == 0:
        if not args.resume:
            for old in written:
                shutil.rmtree(old, ignore_errors=True)
        log = Log(log_path, start, args.out / "tensorboard" if args.tensorboard else None)
    dist.barrier()
    best = Best(args.out / "best")
    gzipped, stages = gzip_bits(text), f" pp={args.pp} ({args.schedule}) x" if args.pp > 1 else ""
    common.say(
        f"{args.family}, {parameter_count(config):,.0f} parameters, {len(text.train):,} bytes of text,"
        f"{stages} tp={args.tp}{f' x cp={args.cp}' * (args.cp > 1)} x dp={args.dp} on {device.type},"
        f" {'bf16' if setup.bf16 else 'fp32'};"
        f" gzip -9 takes {gzipped:.3f} bits per byte of the held-out {len(text.held_out):,}"
    )
    if common.WORLD > 1:
        common.say(f"a process that the others wait for longer than {args.timeout} s ends the run (--timeout)")
    began = time.perf_counter()
    stopped_by = train(setup, start, log, best)
    minutes = (time.perf_counter() - began) / 60
    if log:
        log.draw(args.out / "loss.png", gzipped)
        log.close()
    if stopped_by:
        command = [a for a in sys.argv[1:] if a not in ("--resume", "--restart")] + ["--resume"]
        common.say(
            f"stopped by {signal.Signals(stopped_by).name}, checkpoint written; to go on:\n"
            f"    {common.launch(shlex.join(command))}"
        )
        common.stop()
        sys.exit(128 + stopped_by)

    bits = [r["held_out_bits"] for r in log.records if "held_out_bits" in r][-1] if log else None
    best.offer(model, args.steps, bits)  # where a finished run is resumed that kept none
    save_trained(model, hf, step=args.steps, held_out_bits=bits, best_step=best.step)
    if log:
        if args.pack:
            dealt, balanced = np.mean([r["imbalance"] for r in log.records if "imbalance" in r], 0)
            print(
                f"largest share of a step over the mean, dp={args.dp}: {dealt:.3f} dealt in turn, {balanced:.3f}"
                " balanced (mean of the steps)"
            )
        speeds = sorted(r["tokens_per_s"] for r in log.records if "tokens_per_s" in r)
        print(f"{args.steps - start} steps in {minutes:.1f} minutes, {speeds[len(speeds) // 2]:,} tokens/s (median)")
        print(f"held out: {bits:.3f} bits per byte; gzip -9: {gzipped:.3f}; best: {best.bits:.3f} at step {best.step}")
        print(f"written to {args.out}: log.jsonl, loss.png, checkpoints/, {best.path.relative_to(args.out)}/, and")
        print(f"hf/, the model of step {args.steps} (transformers loads it)")
        print(
            f"\nhf/ at TP=1, sampled, continues {args.prompt!r}:\n{continued(hf, args, device)}",
            flush=True,
        )
    common.stop()


if __name__ == "__main__":
    main()
