"""What surrounds a training loop: signals that stop it between steps, and a log that survives being resumed."""

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE = 5.0  # seconds: Slurm, Ctrl-C and launchers that pass a signal on deliver it twice at once


class StopSignal:
    """A context in which Ctrl-C, SIGTERM and SIGHUP are noted rather than obeyed; one sent again later is obeyed.

    ``number`` is the signal, or 0.  A launcher that has gone counts as SIGHUP: nobody would stop this process later.
    """

    def __init__(self, launched: bool):
        self.noted, self.since = 0, 0.0
        self.parent = os.getppid() if launched else None

    def __enter__(self):
        signals = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
        heard = [s for s in signals if signal.getsignal(s) is not signal.SIG_IGN]  # nohup ignores SIGHUP
        self.before = {s: signal.signal(s, self._note) for s in heard}
        return self

    def __exit__(self, *_):
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


class Log:
    """log.jsonl, one object a line; lines beyond the step that a run resumes at (or torn by a crash) are dropped."""

    def __init__(self, path: Path, step: int):
        self.records = [r for r in self._read(path) if r["step"] <= step]
        fresh = path.with_suffix(".tmp")
        fresh.write_text("".join(json.dumps(r) + "\n" for r in self.records))
        os.replace(fresh, path)
        self.file = open(path, "a", buffering=1)

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
