"""Microseconds of the host for one forward of the fused norm, launches included, the device not waited for."""

import time

import torch

from bench.gpu_day.part import Context
from tpfuse.tools.bench.definition import DTYPES, Random, load


def jobs(context: Context) -> list[str]:
    return ["tpfuse", "torch"]


def run(job: str, context: Context) -> None:
    bench = load("reduce_bias_dropout_add_norm")
    rows, width, rounds, turns = (8, 32, 2, 2) if context.tiny else (64, 1024, 10, 100)
    inputs = bench.inputs(Random(DTYPES["bf16"], context.device, 0), 1, rows, width)
    best, fn = float("inf"), bench.providers[job]
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(turns):
            fn(*inputs, p=0.1)
        best = min(best, (time.perf_counter() - start) / turns)
        if context.device.type == "cuda":
            torch.cuda.synchronize()
    context.emit(dict(provider=job, us=best * 1e6))


def headline(rows: list[dict]) -> str:
    return ", ".join(f"{row['provider']} {row['us']:.0f} us" for row in rows)
