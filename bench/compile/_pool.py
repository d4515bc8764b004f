"""Which calls to compile, and their compilation in worker processes."""

import importlib
import multiprocessing
import pathlib
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict

HERE = pathlib.Path(__file__).parent
ARCHS = "sm_90", "sm_80", "gfx942"
OPS = sorted(path.stem for path in HERE.glob("[a-z]*.py"))


def compile_call(op: str, label: str, arch: str) -> list[dict]:
    """One entry for every kernel that the call launches."""
    from bench.compile._compile import SHARED_BYTES, capture, compile_launch

    call = importlib.import_module(f"bench.compile.{op}").CALLS[label]
    rows = []
    for launch in capture(call.run, arch):
        if call.only not in (None, launch.kernel.fn.__name__):
            continue
        report = compile_launch(launch, arch)
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


def wanted(ops: list[str], archs: list[str], default: bool) -> list[tuple[str, str, str]]:
    calls = [(op, list(importlib.import_module(f"bench.compile.{op}").CALLS.items())) for op in ops]
    return [
        (op, label, arch)
        for op, entries in calls
        for label, call in (entries[:1] if default else entries)
        for arch in archs
        if arch in call.archs
    ]


def compile_all(requests: list[tuple[str, str, str]], jobs: int, progress: bool = True) -> list[dict]:
    rows: dict[tuple[str, str, str], list[dict]] = {}
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(compile_call, *request): request for request in requests}
        for done, future in enumerate(as_completed(futures), 1):
            rows[futures[future]] = future.result()
            if progress:
                print(
                    f"\r{done}/{len(futures)} {' '.join(futures[future]):<70.70}", end="", file=sys.stderr, flush=True
                )
    if progress:
        print(file=sys.stderr)
    return [row for request in requests for row in rows[request]]
