"""A training curve: a byte-level GPT on this repository's documents, in bf16 by autocast and in fp32, same batches."""

import math
import time

import torch

import tpfuse
from bench.documents import DOCS
from bench.gpu_day.part import Context
from tpfuse.models import GPT, GPTConfig

POINTS = 30  # of the curve; each is the mean of as many steps


def text() -> torch.Tensor:
    return torch.frombuffer(bytearray(b"\n".join(p.read_bytes() for p in sorted(DOCS.glob("*.md")))), dtype=torch.uint8)


def jobs(context: Context) -> list[str]:
    return ["fp32", "bf16"]


def run(job: str, context: Context) -> None:
    steps, batch, seq, width, depth = (2, 1, 8, 32, 1) if context.tiny else (300, 16, 256, 256, 4)
    stride = max(steps // POINTS, 1)
    torch.backends.cuda.matmul.allow_tf32 = False
    sizes = dict(hidden_size=width, num_layers=depth, num_heads=width // 32, max_positions=seq)
    drop = dict.fromkeys(("dropout", "attention_dropout", "embedding_dropout"), 0.1)
    model = GPT(GPTConfig(vocab_size=256, init_std=width**-0.5, **sizes, **drop), seed=0).to(context.device)
    optimizer = torch.optim.AdamW(tpfuse.param_groups(model, weight_decay=0.1), lr=2e-3, betas=(0.9, 0.95))
    data, generator, losses, curve = text(), torch.Generator().manual_seed(0), [], []
    began = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / max(steps / 10, 1))
        starts = torch.randint(len(data) - seq, (batch,), generator=generator).tolist()
        ids = torch.stack([data[i : i + seq] for i in starts]).long().to(context.device)
        with torch.autocast(context.device.type, torch.bfloat16, enabled=job == "bf16"):
            loss = model(ids, labels=ids, first_sample=0).loss
        optimizer.zero_grad()
        loss.backward()
        tpfuse.clip_grad_norm_(model, 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if len(losses) == stride:
            curve.append(float(torch.stack(losses).mean()))
            losses = []
    seconds = time.perf_counter() - began
    context.emit(dict(dtype=job, steps=steps, every=stride, curve=curve, tokens_per_s=steps * batch * seq / seconds))
    falls = curve[-1] < 0.9 * curve[0] if not context.tiny else math.isfinite(sum(curve))  # a few bytes tell no more
    if not falls:
        raise AssertionError(f"{job}: the loss goes from {curve[0]:.3f} to {curve[-1]:.3f}")


def headline(rows: list[dict]) -> str:
    return ", ".join(f"{row['dtype']} {row['curve'][0]:.3f} to {row['curve'][-1]:.3f} nats a byte" for row in rows)
