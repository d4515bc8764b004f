"""Which calls to compile, and their compilation in worker processes."""

import importlib
import multiprocessing
import pathlib
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict

from tqdm import tqdm

HERE = pathlib.Path(__file__).parent
ARCHS = "sm_90", "sm_80", "gfx942"
PART = 8  # calls that are compiled together
OPS = sorted(path.stem for path in HERE.glob("[a-z]*.py"))


def compile_calls(op: str, labels: list[str], arch: str) -> list[dict]:
    """One entry for every kernel that the calls launch, in their order."""
    from bench.compile._compile import SHARED_BYTES, capture, reports

    calls = importlib.import_module(f"bench.compile.{op}").CALLS
    launches = [(label, launch) for label in labels for launch in capture(calls[label].run, arch)]
    rows = []
    for (label, launch), report in zip(launches, reports([launch for _, launch in launches], arch), strict=True):
        call = calls[label]
        elements = call.elements.get(report.kernel)
        each = None if elements is None else round(report.instructions * report.threads / elements(launch.config), 1)
        limits = dict(
            uses=call.uses.get(report.kernel, ()) if arch == "sm_90" else (),
            spills_allowed=call.spills.get(report.kernel, 0),
            why=call.why,
            shared_limit=SHARED_BYTES[arch],
        )
        rows.append(dict(op=op, call=label, arch=arch, **asdict(report), instructions_an_element=each, **limits))
    return rows


def digests(op: str, arch: str) -> list[tuple[str, str, str]]:
    """(call, kernel, digest) of every kernel that an op's calls launch: what compile_calls would compile."""
    from bench.compile._compile import capture, digest

    calls = importlib.import_module(f"bench.compile.{op}").CALLS
    launches = ((label, launch) for label, call in calls.items() for launch in capture(call.run, arch))
    return [(label, launch.kernel.fn.__name__, digest(launch, arch)) for label, launch in launches]


def wanted(op: str, default: bool) -> list[str]:
    """Returns the labels of an op's calls, or of its first alone."""
    labels = list(importlib.import_module(f"bench.compile.{op}").CALLS)
    return labels[:1] if default else labels


def compile_all(ops: list[str], archs: list[str], default: bool, jobs: int) -> list[dict]:
    """Compiles in ``jobs`` processes; the order of the entries is the table's."""
    requests = [(op, label, arch) for op in ops for label in wanted(op, default) for arch in archs]
    parts = [
        (op, labels[i : i + PART], arch)
        for op in ops
        for labels in [wanted(op, default)]
        for arch in archs
        for i in range(0, len(labels), PART)
    ]
    rows: dict[tuple[str, str, str], list[dict]] = {}
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in tqdm(as_completed([pool.submit(compile_calls, *part) for part in parts]), total=len(parts)):
            for row in future.result():
                rows.setdefault((row["op"], row["call"], row["arch"]), []).append(row)
    return [row for request in requests for row in rows[request]]
