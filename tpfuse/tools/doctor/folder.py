"""Tests of a folder: writing to it, and the same one on all ranks."""

import tempfile
import time
import uuid
from pathlib import Path

import torch.distributed as dist

from ...ranks.messages import gather_results
from .report import FAULT, Finding

WAIT = 1.0  # seconds that a network's file system may take to show a new file to another host


def writable(folder: Path) -> Finding:
    """Writes a file and removes it; one that cannot be written is a fault."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".tpfuse-doctor-") as file:
            file.write(b"token")
            file.flush()
    except OSError as error:
        return Finding("folder", f"cannot be written to: {error}", FAULT, "Choose a folder that can be, by --folder.")
    return Finding("folder", "can be written to")


def shared(folder: Path, group: dist.ProcessGroup) -> Finding:
    """Rank 0 writes a token that nobody can guess, and the others look for it.  Each rank calls it."""
    token = uuid.uuid4().hex
    advice = "Give every rank the same folder of a shared file system: checkpoints are written by several ranks."
    path = folder / f".tpfuse-doctor-{token[:12]}" if group.rank() == 0 else None
    try:
        (name, word), *_ = gather_results(lambda: _write(path, token), group)
        see = gather_results(lambda: _sees(folder / name, word), group)
    except OSError as error:
        return Finding("folder", f"cannot be looked at: {error}", FAULT, advice)
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
    blind = [str(rank) for rank, sees in enumerate(see) if not sees]
    if not blind:
        return Finding("folder", "all ranks see the same one")
    return Finding("folder", f"not shared: rank {', '.join(blind)} does not see what rank 0 wrote", FAULT, advice)


def _write(path: Path | None, token: str) -> tuple[str, str]:
    if path is None:
        return "", ""
    path.write_text(token)
    return path.name, token


def _sees(path: Path, token: str) -> bool:
    until = time.monotonic() + WAIT
    while time.monotonic() < until:
        if path.is_file() and path.read_text() == token:
            return True
        time.sleep(0.05)
    return False
