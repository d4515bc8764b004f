"""Launch parameters of what the report shows farthest from its roofline, by bench.tune; winners are kept as found."""

import json

from bench import tune
from bench.gpu_day import cases
from bench.gpu_day.part import Context
from tpfuse.kernels.runtime import tuning as _tuning

SECONDS = 0.05  # for each candidate


def farthest(rows: list[dict]) -> list[str]:
    """Cases by the time that their roofline would save, the most first: (1 - share) of it, forward and backward."""
    lost: dict[str, float] = {}
    for row in rows:
        if row.get("provider") == "tpfuse" and row["mode"] != "step" and row["roofline"] is not None:
            name = f"{row['op']} {row['shape']}"
            lost[name] = max(lost.get(name, 0.0), 1 - row["roofline"])
    return sorted(lost, key=lambda name: -lost[name])


def jobs(context: Context) -> list[str]:
    rows = context.rows("rows of worth") + context.rows("other rows")
    return farthest(rows)[: 2 if context.tiny else None]


def run(job: str, context: Context) -> None:
    """Goes on behind the questions that an earlier try of this job has answered."""
    bench, shape = cases.case(job)
    table = json.loads(_tuning.TABLE.read_text())
    for row in context.rows("tuning"):
        if "entry" in row:
            table.setdefault(row["arch"], {}).setdefault(row["kernel"], {})[row["bucket"]] = row["entry"]

    earlier = [row for row in context.rows("tuning") if row["case"] == job]
    answered = {(row["p"], row["kernel"], row["bucket"]) for row in earlier}
    for row in earlier:
        context.emit(row)
    for form in tune.with_and_without_dropout(bench):

        def keep(ask: tune.Ask, new: dict, p: float | None = form.p) -> None:
            entry = new.get(ask.arch, {}).get(ask.kernel, {}).get(ask.bucket)
            context.emit(dict(case=job, p=p, arch=ask.arch, kernel=ask.kernel, bucket=ask.bucket, entry=entry or {}))

        skip = lambda ask, p=form.p: (p, ask.kernel, ask.bucket) in answered
        seconds = 0.0 if context.tiny else SECONDS
        table = tune.tune(form, shape, "bf16", table, context.device, seconds, print, keep=keep, skip=skip)


def headline(rows: list[dict]) -> str:
    won = [f"{row['kernel']} {row['bucket']}" for row in rows if row.get("entry")]
    return f"{len(rows)} questions, {len(won)} winners over the defaults: {', '.join(won)}"
