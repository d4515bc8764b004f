"""Reads spoilt directories, each under limits of time and memory: ``python -m tests.attack.fuzz --minutes 5``.

A reader accepts a directory, or refuses it with ValueError or OSError and has then changed nothing.
"""

import argparse
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.attack import spoil
from tests.forking import forking
from tpfuse import load_adapter
from tpfuse.models import GPT, Bert, config_from_hf

SECONDS, BYTES = 10, 1 << 30  # of the processor, and of memory beside what is there before: what a case may take
WAIT = 100  # seconds by the clock, after which a case hangs, however busy the machine
KINDS = "accepted", "ValueError", "OSError", "other"


class Outcome(NamedTuple):
    seed: int
    kind: str
    what: str  # was done to the directory, and what was said


class TooLong(BaseException):
    """A case that is not done in time."""


def read_base() -> Callable[[Path], None]:
    def read(path: Path) -> None:
        for cls in GPT, Bert:
            try:
                model = cls.from_pretrained(path)
            except ValueError as error:
                if "model_type must be" not in str(error) or cls is Bert:
                    raise
                continue
            assert config_from_hf(model.origin.config) == model.config
            model(torch.zeros(1, 1, dtype=torch.int64))
            return

    return read


def read_adapter() -> Callable[[Path], None]:
    model = spoil.make("llama")
    model.head.requires_grad_(False)
    before, flags = dict(model.state_dict()), {n: p.requires_grad for n, p in model.named_parameters()}

    def read(path: Path) -> None:
        try:
            load_adapter(model, path)
        except Exception:
            assert {n: p.requires_grad for n, p in model.named_parameters()} == flags
            assert model.state_dict().keys() == before.keys()
            raise
        for module in model.modules():
            if getattr(module, "lora", None) is not None:
                module.lora = None
        for name, p in model.named_parameters():
            p.requires_grad_(flags[name])

    return read


READERS = {"base": (spoil.valid_bases, read_base), "adapter": (spoil.valid_adapters, read_adapter)}


def _limits() -> list[tuple[int, int, float]]:
    return [(signal.SIGPROF, signal.ITIMER_PROF, SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, WAIT)]


def outcome(read: Callable[[Path], None], path: Path) -> tuple[str, str]:
    """-> (kind, message) of one case."""

    def stop(*_: Any) -> None:
        raise TooLong

    for number, timer, seconds in _limits():
        signal.signal(number, stop)
        signal.setitimer(timer, seconds)
    try:
        read(path)
        return "accepted", ""
    except (ValueError, OSError) as error:
        said = str(error)
        if isinstance(error, UnicodeError) or not said.isprintable() or len(said) > 3000:
            return "other", f"{type(error).__name__}, a bad message: {said[:2000]!r}"
        return "OSError" if isinstance(error, OSError) else "ValueError", said
    except BaseException as error:
        return "other", f"{type(error).__name__}: {error}"[:2000]
    finally:
        for _, timer, _ in _limits():
            signal.setitimer(timer, 0)


def work(reader: str, bases: list[Path], folder: Path, conn: Connection) -> None:
    warnings.simplefilter("ignore")
    read = READERS[reader][1]()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
    while True:
        try:
            seed = conn.recv()
        except EOFError:
            return
        done = spoil.spoil(seed, bases, folder / "bad")
        kind, said = outcome(read, folder / "bad")
        conn.send(Outcome(seed, kind, f"{done}: {said}"))


def outcomes(reader: str, seeds: Iterable[int]) -> Iterator[Outcome]:
    """One for each seed; a process that dies or hangs is one too, and another takes over."""
    context = forking()
    with tempfile.TemporaryDirectory() as name:
        folder, process, conn = Path(name), None, None
        bases = READERS[reader][0](folder / "valid")
        try:
            for seed in seeds:
                if process is None:
                    conn, theirs = context.Pipe()
                    process = context.Process(target=work, args=(reader, bases, folder, theirs), daemon=True)
                    process.start()
                    theirs.close()
                    conn.send(seed)
                    ready = conn.poll(60 + 2 * WAIT)  # it may have to import all
                else:
                    conn.send(seed)
                    ready = conn.poll(2 * WAIT)
                try:
                    if not ready:
                        raise EOFError("hung")
                    yield conn.recv()
                except (EOFError, ConnectionError) as error:
                    yield Outcome(seed, "other", f"the process died or hung: {error!r}")
                    process.kill()
                    process.join()
                    process = None
        finally:
            if process is not None:
                process.kill()
                process.join()


def table(rows: dict[str, Counter[str]]) -> str:
    lines = ["| reader | tried | " + " | ".join(KINDS) + " |", "|---|" + "---|" * (1 + len(KINDS))]
    for reader, count in rows.items():
        lines.append(f"| {reader} | {count.total()} | " + " | ".join(str(count[kind]) for kind in KINDS) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Read spoilt directories and count what happens.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--reader", choices=READERS, default="base")
    parser.add_argument("--first-seed", type=int, default=1 << 20)
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    count: Counter[str] = Counter()

    def seeds() -> Iterator[int]:
        seed = args.first_seed
        while time.monotonic() < end:
            yield seed
            seed += 1

    for found in outcomes(args.reader, seeds()):
        count[found.kind] += 1
        if found.kind == "other":
            print(found, flush=True)
    print(table({args.reader: count}))
    return min(count["other"], 1)


if __name__ == "__main__":
    sys.exit(main())
