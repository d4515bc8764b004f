"""Compiles in many processes what tuning will try first: its own process would do so one after another, and wait."""

import json
from unittest import mock

from bench import tune
from bench.gpu_day import cases
from bench.gpu_day.part import Context
from bench.gpu_day.parts import tuning
from tpfuse.kernels import replay
from tpfuse.kernels.runtime import tuning as _tuning
from tpfuse.tools.bench.definition import DTYPES, Random
from tpfuse.tools.bench.run import calls

CASES, SLICES = 8, 12  # the first of tuning's cases; each is dealt out to as many processes


def jobs(context: Context) -> list[str]:
    count = 2 if context.tiny else SLICES
    return [f"{case} {i} of {count}" for case in tuning.jobs(context)[:CASES] for i in range(1, count + 1)]


def run(job: str, context: Context) -> None:
    """Makes the call once under each of its candidates; what does not compile or fit is tuning's to say."""
    name, shape, number, _, count = job.split()
    replay.REPLAY = False
    bench, table, tried, failed = cases.case(f"{name} {shape}")[0], json.loads(_tuning.TABLE.read_text()), 0, 0
    random = Random(DTYPES["bf16"], context.device, 0)
    sets = [bench.inputs(random, *cases.case(f"{name} {shape}")[1])]
    for form in tune.with_and_without_dropout(bench):
        for mode in ("fwd", "bwd"):
            call = calls(form.providers["tpfuse"], sets, form.p, mode, random)
            with tune.questions() as asks:
                call(0)
            for ask in asks:
                for candidate in tune.neighbours(dict(ask.default))[int(number) - 1 :: int(count)]:
                    new = tune.put(table, ask, candidate)
                    tried += 1
                    with mock.patch.object(_tuning, "_table", lambda new=new: new):
                        try:
                            call(0)
                        except Exception:
                            failed += 1
    context.emit(dict(tried=tried, failed=failed))


def headline(rows: list[dict]) -> str:
    count = lambda key: sum(row[key] for row in rows)
    return f"{count('tried')} candidates, of which {count('failed')} did not run"
