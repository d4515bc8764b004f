"""Compiles what later parts will run, in many processes: a forward and backward of every case, the layers too."""

import torch

from bench.gpu_day import cases
from bench.gpu_day.part import Context
from bench.gpu_day.parts import layers
from tpfuse.tools.bench.definition import DTYPES, Random, discover
from tpfuse.tools.bench.measure import side_stream
from tpfuse.tools.bench.run import calls


def jobs(context: Context) -> list[str]:
    """The layers first: torch.compile takes longest."""
    blocks = [f"{layer.name}: {name}" for layer in layers.of(context.tiny) for name in layers.PROVIDERS]
    return blocks + [cases.name_of(*case) for case in cases.in_turn(tuple(discover()), context.tiny)]


def run(job: str, context: Context) -> None:
    device = context.device
    with side_stream(device):
        if ": " in job:
            layer, provider = job.split(": ")
            layers.step_of(layers.named(layer, context.tiny), provider, device)(0)
        else:
            bench, shape = cases.case(job)
            sets = [bench.inputs(Random(DTYPES["bf16"], device, 0), *shape)]
            for p in {bench.p, bench.p and 0.0}:
                calls(bench.providers["tpfuse"], sets, p, bench.modes[-1], Random(torch.bfloat16, device, 1))(0)
    context.emit(dict(compiled=job))


def headline(rows: list[dict]) -> str:
    return f"{len(rows)} cases compiled and run"
