"""The parts of the day in order of worth, and the time that each may take."""

from dataclasses import replace
from typing import Any

from bench.gpu_day.part import Part

SETUP = "setup"  # of this machine and this run: done anew in every call, and nothing runs without it
WORTH = (  # what is predicted to be slow, from the one that matters most
    "reduce_bias_dropout_add_norm",
    "layer_norm",
    "rms_norm",
    "attention",
    "linear_gelu",
    "linear_cross_entropy",
)


def _part(name: str, module: str, seconds: float, job_seconds: float, **fields: Any) -> Part:
    return Part(name, f"bench.gpu_day.parts.{module}", seconds, job_seconds, **fields)


DAY = (
    _part(SETUP, "setup", 120, 90),
    _part("correctness", "check", 90, 85, parallel=13, stage="first"),
    _part("kernels compiled", "warm", 100, 80, parallel=12, stage="warm"),
    _part("memcheck", "sanitize", 120, 120, stage="warm", options=dict(tool="memcheck")),
    _part("racecheck", "sanitize", 120, 120, stage="warm", options=dict(tool="racecheck")),
    _part("rows of worth", "rows", 180, 40, options=dict(ops=WORTH)),
    _part("layers", "layers", 90, 60),
    _part("host time", "host", 25, 20),
    _part("other rows", "rows", 90, 30, options=dict(but=WORTH)),
    _part("gpu tests", "suite", 180, 170, parallel=12),
    _part("time of each kernel", "kernels", 60, 30),
    _part("counters", "counters", 150, 40),
    _part("rows of torch.compile", "rows", 150, 50, options=dict(ops=WORTH, compiled=True)),
    _part("candidates compiled", "candidates", 120, 60, parallel=12),
    _part("tuning", "tuning", 300, 120),
    _part("CUDA graphs", "graphs", 90, 45),
    _part("training curve", "training", 90, 45),
    _part("generation", "generation", 120, 60),
)


def parts(rehearse: bool) -> tuple[Part, ...]:
    """A rehearsal has the same parts, two processes at a time, and patience with a busy machine."""
    if not rehearse:
        return DAY
    return tuple(replace(part, parallel=min(part.parallel, 2), job_seconds=600.0, seconds=900.0) for part in DAY)


def stages(rehearse: bool) -> list[list[Part]]:
    stages: list[list[Part]] = []
    for part in parts(rehearse):
        if stages and part.stage and stages[-1][-1].stage == part.stage:
            stages[-1].append(part)
        else:
            stages.append([part])
    return stages
