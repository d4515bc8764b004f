"""The calls to compile, and their compilation in worker processes."""

import importlib
import multiprocessing
import pathlib
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

HERE = pathlib.Path(__file__).parent
ARCHS = "sm_90", "sm_80", "gfx942"
PART = 8  # calls that are compiled together
OPS = sorted(path.stem for path in HERE.glob("[a-z]*.py"))


def launches_of(op: str, labels: list[str], arch: str) -> list[tuple[str, Any]]:
    """(call, launch) of every kernel that the calls launch and that is to be compiled, in their order."""
    from bench.compile._compile import capture

    calls = importlib.import_module(f"bench.compile.{op}").CALLS
    launches = ((label, launch) for label in labels for launch in capture(calls[label].run, arch))
    return [(label, launch) for label, launch in launches if calls[label].only in (None, launch.kernel.fn.__name__)]


def compile_calls(op: str, labels: list[str], arch: str) -> list[dict]:
    """One entry for every kernel of the calls."""
    from bench.compile._compile import SHARED_BYTES, reports

    calls, launches = importlib.import_module(f"bench.compile.{op}").CALLS, launches_of(op, labels, arch)
    rows = []
    for (label, launch), report in zip(launches, reports([launch for _, launch in launches], arch), strict=True):
        call = calls[label]
        elements = call.elements.get(report.kernel)
        per_element = (
            None if elements is None else round(report.instructions * report.threads / elements(launch.config), 1)
        )
        limits = dict(
            uses=call.uses.get(report.kernel, ()) if arch == "sm_90" else (),
            spills_allowed=call.spills.get(report.kernel, 0),
            why=call.why,
            shared_limit=SHARED_BYTES[arch],
        )
        rows.append(dict(op=op, call=label, arch=arch, **asdict(report), instructions_an_element=per_element, **limits))
    return rows


def digests(op: str, arch: str) -> list[tuple[str, str, str]]:
    """(call, kernel, digest) of all that compile_calls would compile."""
    from bench.compile._compile import digest

    launches = launches_of(op, wanted(op, arch, default=False), arch)
    return [(label, launch.kernel.fn.__name__, digest(launch, arch)) for label, launch in launches]


def wanted(op: str, arch: str, default: bool) -> list[str]:
    """Returns the labels of an op's calls, or of its first alone, as far as they are for this arch."""
    calls = importlib.import_module(f"bench.compile.{op}").CALLS
    return [label for label, call in list(calls.items())[: 1 if default else None] if arch in call.archs]


def compile_all(ops: list[str], archs: list[str], default: bool, jobs: int) -> list[dict]:
    """Compiles in ``jobs`` processes; the order of the entries is the table's."""
    calls = {(op, arch): wanted(op, arch, default) for op in ops for arch in archs}
    parts = [
        (op, labels[i : i + PART], arch) for (op, arch), labels in calls.items() for i in range(0, len(labels), PART)
    ]
    rows: dict[tuple[str, str, str], list[dict]] = {}
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in tqdm(as_completed([pool.submit(compile_calls, *part) for part in parts]), total=len(parts)):
            for row in future.result():
                rows.setdefault((row["op"], row["call"], row["arch"]), []).append(row)
    order = dict.fromkeys((op, label) for (op, _), labels in calls.items() for label in labels)
    return [row for op, label in order for arch in archs for row in rows.get((op, label, arch), [])]
