"""The training example's own machinery: signals, the best model, and the log."""

import math
import shutil
import signal
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch

from tests.examples.launch import EXAMPLES, example
from tests.examples.test_train_gpt import losses, trained

run = example("_run")


def test_a_launcher_that_has_gone_counts_as_a_signal():
    with run.StopSignal(launched=True) as stop, run.StopSignal(launched=False) as alone:
        assert stop.number == alone.number == 0
        stop.parent = -1  # as if another process had taken its place
        assert stop.number == signal.SIGHUP


def test_a_signal_counts_again_only_later(monkeypatch):
    """Launchers deliver one twice at once; who asks again wants it."""
    with pytest.raises(KeyboardInterrupt), run.StopSignal(launched=False) as stop:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        assert stop.number == signal.SIGINT
        monkeypatch.setattr(run, "PATIENCE", -1.0)
        signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_an_error_is_said_before_a_signal_is_obeyed():
    """The launcher's signal comes while the error that names the dead rank is still on its way out."""
    code = textwrap.dedent("""
        import os, signal, sys, time
        from _run import StopSignal
        sys.excepthook = lambda *_: (time.sleep(0.2), print("the error", file=sys.stderr))
        with StopSignal(launched=False):
            if os.fork() == 0:  # the launcher
                for _ in range(20):
                    time.sleep(0.02)
                    os.kill(os.getppid(), signal.SIGTERM)
                os._exit(0)
            time.sleep(0.1)
            raise RuntimeError("rank 1 has ended")
    """)
    done = subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and done.stderr == "the error\n"


class Saved:
    """A model as far as Best looks, whose directory is one file: all ranks call, one writes."""

    def __init__(self, weights: str):
        self.weights = weights

    def save_pretrained(self, folder: Path) -> None:
        if torch.distributed.get_rank() == 0:
            folder.mkdir(parents=True)
            (folder / "weights").write_text(self.weights)
        torch.distributed.barrier()


def offered(world, folder: Path) -> list[tuple[int, list[str]]]:
    """What best/ holds after each offer, and after what a kill may leave."""
    best, seen = run.Best(folder), []
    for step, bits in (2, 3.0), (4, 3.5), (6, 2.5), (8, math.nan):
        best.offer(Saved(f"of {step}"), step, bits if world.rank == 0 else None)
        torch.distributed.barrier()
        seen.append((best.step, sorted(path.name for path in folder.iterdir())))
    if world.rank == 0:
        (folder / "unfinished").mkdir()
        (folder / "unfinished" / "weights").write_text("torn")
        shutil.copytree(folder / "step-00000006", folder / "step-00000002")
    torch.distributed.barrier()
    again = run.Best(folder)  # of a run that is resumed at step 3
    for step, bits in (4, 2.0), (6, 2.5), (8, 2.25):
        again.offer(Saved(f"again {step}"), step, bits)
        torch.distributed.barrier()
        seen.append((again.step, sorted(path.name for path in folder.iterdir())))
    return seen


def test_a_better_model_takes_the_place_of_the_best(ranks, tmp_path):
    """Not at a step that was reached before, and not one that is NaN; of what a kill left the highest step counts."""
    folder = tmp_path / "best"
    seen = ranks(2, offered, folder)[0]
    two, six, eight = "step-00000002", "step-00000006", "step-00000008"
    assert seen == [(2, [two]), (2, [two]), *[(6, [six])] * 4, (8, [eight])]
    assert (folder / eight / "weights").read_text() == "again 8" and trained(folder / eight)["held_out_bits"] == 2.25


def test_tensorboard_has_every_number(monkeypatch, tmp_path):
    written = []

    class Writer:
        def __init__(self, folder, purge_step):
            written.append((folder, purge_step))

        def add_scalar(self, *scalar):
            written.append(scalar)

        def close(self):
            written.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    log = run.Log(tmp_path / "log.jsonl", 2, tmp_path / "board")
    log(step=3, loss=1.25, lr=0.5, imbalance=[1.0, 1.0])
    log.close()
    assert written == [(str(tmp_path / "board"), 3), ("loss", 1.25, 3), ("lr", 0.5, 3), "closed"]


def test_a_log_drops_what_is_beyond_and_what_is_torn(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n{"step": 3, "loss": 1.0}\n{"step": 4, "lo')
    log = run.Log(path, 2)
    log(step=3, loss=1.25)
    log.file.close()
    assert losses(tmp_path) == {1: 2.0, 2: 1.5, 3: 1.25}
