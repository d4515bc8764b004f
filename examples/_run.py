"""Surroundings of a training loop: signals that stop it between steps, the best model so far, and a log that survives
being resumed."""

import hashlib
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tpfuse.models.files.write import whole_tensors

PATIENCE = 5.0  # seconds: Slurm, Ctrl-C and launchers that pass a signal on deliver it twice at once


class StopSignal:
    """A context in which Ctrl-C, SIGTERM and SIGHUP are noted rather than obeyed; one sent again later is obeyed.

    ``number`` is the signal, or 0.  A launcher that has gone counts as SIGHUP: nobody would stop this process later.
    An error that leaves the context leaves it in force: a launcher that ends this process because another one has died
    must not do so before the error is printed, which names that other one.
    """

    def __init__(self, launched: bool):
        self.noted, self.since = 0, 0.0
        self.parent = os.getppid() if launched else None

    def __enter__(self):
        signals = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
        heard = [s for s in signals if signal.getsignal(s) is not signal.SIG_IGN]  # nohup ignores SIGHUP
        self.before = {s: signal.signal(s, self._note) for s in heard}
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, Exception):
            return
        for number, handler in self.before.items():
            signal.signal(number, handler)

    @property
    def number(self) -> int:
        orphaned = self.parent is not None and os.getppid() != self.parent
        return self.noted or (signal.SIGHUP if orphaned else 0)

    def _note(self, number, frame):
        if not self.noted:
            self.noted, self.since = number, time.monotonic()
        elif time.monotonic() - self.since > PATIENCE:
            signal.signal(number, self.before[number])
            signal.raise_signal(number)


def save_trained(model: Any, folder: Path, **about: Any) -> None:
    """Writes a directory that transformers loads, and ``about`` in its training.json.  Every rank calls it."""
    model.save_pretrained(folder)
    if dist.get_rank() == 0:
        path = folder / "training.json"
        fresh = path.with_suffix(".tmp")
        with open(fresh, "w") as file:
            file.write(json.dumps(about, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)


def weights_digest(model: Any) -> str:
    """Returns the sha256 of the names of all weights and of the sha256 of each, whole: it does not depend on the split.

    Every rank calls it.
    """
    elements = lambda x: x.contiguous().view(-1).view(torch.uint8).cpu().numpy()
    digests = {name: hashlib.sha256(elements(tensor)).digest() for name, tensor in whole_tensors(model.files)}
    if model.stages.place is not None:
        stages = [digests] * dist.get_world_size()
        dist.all_gather_object(stages, digests)
        digests = {name: digest for stage in stages for name, digest in stage.items()}
    return hashlib.sha256(b"".join(name.encode() + digests[name] for name in sorted(digests))).hexdigest()


class Best:
    """The model with the fewest held-out bits so far: ``folder``/step-00000400, a directory that transformers loads.

    A better one is written beside it, gets its name when it is whole, and the one before then goes: at any moment the
    directory with the highest step is whole and the best.  A resumed run goes on from there.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        names = sorted(path.name for path in folder.glob("step-*"))
        about = json.loads((folder / names[-1] / "training.json").read_text()) if names else {}
        self.step, self.bits = about.get("step", 0), about.get("held_out_bits", math.inf)
        self._tidy()

    @property
    def path(self) -> Path:
        return self.folder / f"step-{self.step:08d}"

    def offer(self, model: Any, step: int, bits: float | None) -> None:
        """Keeps the model if it is better.  Every rank calls it; rank 0 decides, the others need no ``bits``.

        A resumed run comes by steps again that it had reached before: they are what they were.
        """
        better = [dist.get_rank() == 0 and step > self.step and bits < self.bits]
        dist.broadcast_object_list(better)
        if not better[0]:
            return
        unfinished = self.folder / "unfinished"
        if dist.get_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        dist.barrier()
        save_trained(model, unfinished, step=step, held_out_bits=bits)
        self.step, self.bits = step, bits
        if dist.get_rank() == 0:
            os.replace(unfinished, self.path)
        self._tidy()

    def _tidy(self) -> None:
        """Removes what is not the best: the one before, and what a killed run left unfinished."""
        if dist.get_rank() == 0:
            for folder in self.folder.glob("*"):
                if folder != self.path:
                    shutil.rmtree(folder)


class Log:
    """log.jsonl, one object a line; lines beyond the step that a run resumes at (or torn by a crash) are dropped.

    ``board``: a folder that gets every number for TensorBoard too.
    """

    def __init__(self, path: Path, step: int, board: Path | None = None):
        self.records = [r for r in self._read(path) if r["step"] <= step]
        fresh = path.with_suffix(".tmp")
        fresh.write_text("".join(json.dumps(r) + "\n" for r in self.records))
        os.replace(fresh, path)
        self.file = open(path, "a", buffering=1)
        self.board = None
        if board is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(board), purge_step=step + 1)

    @staticmethod
    def _read(path: Path) -> Iterator[dict]:
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return

    def __call__(self, **record) -> None:
        self.records.append(record)
        self.file.write(json.dumps(record) + "\n")
        if self.board is not None:
            for name, value in record.items():
                if name != "step" and isinstance(value, (int, float)):
                    self.board.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()

    def draw(self, path: Path, gzip_bits: float) -> None:
        """Draws the losses."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        fig, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
        loss = [(r["step"], r["loss"] / math.log(2)) for r in self.records if "loss" in r]
        held_out = [(r["step"], r["held_out_bits"]) for r in self.records if "held_out_bits" in r]
        ax.plot(*zip(*loss), lw=0.8, label="training")
        if held_out:
            ax.plot(*zip(*held_out), marker="o", label="held out")
        ax.axhline(gzip_bits, ls="--", color="gray", label=f"gzip -9, held out: {gzip_bits:.2f}")
        ax.set(xlabel="step", ylabel="bits per byte", ylim=(0, 8))
        ax.legend()
        fig.savefig(path, dpi=120)
        plt.close(fig)
