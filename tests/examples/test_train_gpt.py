"""The training example end to end, in real processes: what a newcomer runs, how it is stopped, and that it goes on bit
for bit.

A run is 8 steps of a small GPT-2 with dropout and a checkpoint every third.  Kills are at exact points (killed.py), and
a run that is to be stopped waits in every step, so no test depends on the time it takes.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.examples.launch import EXAMPLES, children, example, interrupted, ok, run
from tpfuse.models import GPT, GPTConfig
from tpfuse.tools.ledger import parameter_count

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

SCRIPT = "train_gpt.py"
STEPS = 8
MAX_MB = 0.03
WIDTH, LAYERS, HEADS = 64, 2, 4
SHAPED = ["--width", WIDTH, "--layers", LAYERS, "--heads", HEADS]
CONFIG = dict(hidden_size=WIDTH, num_layers=LAYERS, num_heads=HEADS)
TINY = [
    "--family",
    "gpt2",
    "--dropout",
    0.1,
    "--prompt",
    "class Error(",
    "--steps",
    STEPS,
    "--batch",
    6,
    "--seq",
    32,
    "--lr",
    3e-4,
    "--max-mb",
    MAX_MB,
    "--checkpoint-every",
    3,
    "--validate-every",
    4,
]


def arguments(out: Path, tp: int, dp: int, *more) -> list:
    return [*TINY, *SHAPED, "--tp", tp, "--dp", dp, "--out", out, *more]


def log_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def losses(out: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in log_of(out) if "loss" in r}


def latest(out: Path) -> str:
    return (out / "checkpoints" / "latest").read_text().strip()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """(tp, dp) -> the directory and stdout of a run that nothing happened to."""
    runs = {}

    def get(tp: int, dp: int) -> tuple[Path, str]:
        if (tp, dp) not in runs:
            out = tmp_path_factory.mktemp(f"tp{tp}dp{dp}")
            runs[tp, dp] = out, ok(SCRIPT, *arguments(out, tp, dp), procs=tp * dp)
        return runs[tp, dp]

    return get


def same_run(out: Path, reference: Path) -> None:
    """Bit for bit: every loss, and the files of weights at the end."""
    assert list(losses(out)) == list(range(1, STEPS + 1))
    assert losses(out) == losses(reference)
    files = [{file.name: file.read_bytes() for file in (run / "hf").glob("*.safetensors")} for run in (out, reference)]
    assert files[0] == files[1] != {}


SIZES = [pytest.param(2, 1), pytest.param(1, 3, marks=pytest.mark.slow), pytest.param(2, 2, marks=pytest.mark.slow)]
KILLS = [  # (where, in the how-manieth, the checkpoint then found)
    pytest.param("step", 5, 3, marks=pytest.mark.slow),
    pytest.param("shards", 2, 3, marks=pytest.mark.slow),
    pytest.param("rename", 2, 3, marks=pytest.mark.slow),
    pytest.param("clean", 3, 8, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("where, count, found", KILLS)
@pytest.mark.parametrize("tp, dp", SIZES)
def test_killed_and_resumed(tmp_path, undisturbed, tp, dp, where, count, found):
    done = run(SCRIPT, *arguments(tmp_path, tp, dp), procs=tp * dp, killed=(where, count))
    assert done.returncode != 0 and "SIGKILL" in done.stderr, done.stderr
    assert latest(tmp_path) == f"step-{found:08d}"
    said = ok(SCRIPT, *arguments(tmp_path, tp, dp, "--resume"), procs=tp * dp)
    assert f"resumed at step {found} of {STEPS}" in said
    same_run(tmp_path, undisturbed(tp, dp)[0])


MAIN_GRAD = "--main-grad", "--micro-batches", 3, "--bf16"


@pytest.mark.slow
def test_killed_and_resumed_with_gradients_in_fp32(tmp_path):
    reference, out = tmp_path / "reference", tmp_path / "killed"
    ok(SCRIPT, *arguments(reference, 1, 2, *MAIN_GRAD), procs=2)
    run(SCRIPT, *arguments(out, 1, 2, *MAIN_GRAD), procs=2, killed=("step", 5))
    assert latest(out) == "step-00000003"
    ok(SCRIPT, *arguments(out, 1, 2, *MAIN_GRAD, "--resume"), procs=2)
    same_run(out, reference)


@pytest.mark.parametrize("density, beta", [(None, 0.95), (0.01, 0.999), (0.1, 0.99), (1.0, 0.95)])
def test_the_mean_of_squares_outlasts_ten_sparse_gradients(density, beta):
    assert example("train_gpt").betas_of(types.SimpleNamespace(ok_topk=density)) == (0.9, beta)


@pytest.mark.slow
@pytest.mark.parametrize("tp, dp, warmup", [(1, 3, 1), (2, 2, 5)])
def test_killed_and_resumed_with_sparse_gradients(tmp_path, tp, dp, warmup):
    """From a checkpoint after the warm-up, and from one in it."""
    sparse = "--ok-topk", 0.05, "--ok-topk-warmup", warmup
    reference, out = tmp_path / "reference", tmp_path / "killed"
    ok(SCRIPT, *arguments(reference, tp, dp, *sparse), procs=tp * dp)
    run(SCRIPT, *arguments(out, tp, dp, *sparse), procs=tp * dp, killed=("step", 5))
    assert latest(out) == "step-00000003"
    ok(SCRIPT, *arguments(out, tp, dp, *sparse, "--resume"), procs=tp * dp)
    same_run(out, reference)
    sent = [[r["bytes_sent"] for r in log_of(run) if "bytes_sent" in r] for run in (out, reference)]
    assert sent[0] == sent[1] and max(sent[0][warmup:]) < 0.5 * sent[0][0]
    done = run(SCRIPT, *arguments(out, tp, dp, "--ok-topk", 0.1, *sparse[2:], "--resume"), procs=tp * dp)
    assert "--ok-topk is 0.1 and was 0.05 in" in done.stderr


@pytest.mark.slow
def test_torchrun_starts_the_same_run(tmp_path, undisturbed):
    """As a user types it: no process here was forked."""
    ok(SCRIPT, *arguments(tmp_path, 2, 1), procs=2, forked=False)
    same_run(tmp_path, undisturbed(2, 1)[0])


@pytest.mark.slow
def test_the_comparison_can_fail(tmp_path, undisturbed):
    """A run with another seed is not the same run."""
    reference, _ = undisturbed(2, 1)
    ok(SCRIPT, *arguments(tmp_path, 2, 1, "--seed", 1), procs=2)
    with pytest.raises(AssertionError):
        same_run(tmp_path, reference)


def everyone(number: signal.Signals):
    """As Slurm and Ctrl-C do: to the launcher, which passes it on, and to each process."""
    return lambda launcher: os.killpg(launcher, number)


def begun(out: Path):
    log = out / "log.jsonl"
    return lambda: log.exists() and log.read_text().count("\n") >= 2


TO_LAUNCHER = [
    (*sizes, number, lambda pid, number=number: os.kill(pid, number))
    for sizes, numbers in {
        (2, 1, 2): (signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
        (1, 3, 3): (signal.SIGTERM,),
        (1, 1, 0): (signal.SIGINT, signal.SIGHUP),
    }.items()
    for number in numbers
]
TO_ALL = [(2, 1, 2, number, everyone(number)) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.slow
@pytest.mark.parametrize("tp, dp, procs, number, send", TO_LAUNCHER + TO_ALL)
def test_a_signal_finishes_the_step_and_says_how_to_go_on(tmp_path, undisturbed, tp, dp, procs, number, send):
    code, said = interrupted(SCRIPT, *arguments(tmp_path, tp, dp), procs=procs, when=begun(tmp_path), send=send)
    reached = len(losses(tmp_path))
    assert 2 <= reached < STEPS and latest(tmp_path) == f"step-{reached:08d}"
    assert code != 0 and said.count(f"stopped by {number.name}") == 1, said
    again = said.split(f"stopped by {number.name}")[1].splitlines()[1]
    assert "train_gpt.py" in again and again.endswith("--resume") and f"--out {tmp_path}" in again
    assert procs or (code == 128 + number and "Traceback" not in said)

    said = ok(SCRIPT, *arguments(tmp_path, tp, dp, "--resume"), procs=procs)
    assert f"resumed at step {reached} of {STEPS}" in said
    same_run(tmp_path, undisturbed(tp, dp)[0])


@pytest.mark.slow
def test_processes_whose_launcher_was_killed_stop_with_a_checkpoint(tmp_path, undisturbed):
    kill = lambda launcher: os.kill(launcher, signal.SIGKILL)
    _, said = interrupted(SCRIPT, *arguments(tmp_path, 2, 1), procs=2, when=begun(tmp_path), send=kill)
    reached = len(losses(tmp_path))
    assert 2 <= reached < STEPS and latest(tmp_path) == f"step-{reached:08d}"
    assert "stopped by SIGINT" in said, said  # which torch's launcher has forked processes sent at its death
    ok(SCRIPT, *arguments(tmp_path, 2, 1, "--resume"), procs=2)
    same_run(tmp_path, undisturbed(2, 1)[0])


def test_a_launcher_that_has_gone_counts_as_a_signal():
    StopSignal = example("_run").StopSignal
    with StopSignal(launched=True) as stop, StopSignal(launched=False) as alone:
        assert stop.number == alone.number == 0
        stop.parent = -1  # as if another process had taken its place
        assert stop.number == signal.SIGHUP


def test_a_signal_counts_again_only_later(monkeypatch):
    """Launchers deliver one twice at once; who asks again wants it."""
    run = example("_run")
    with pytest.raises(KeyboardInterrupt), run.StopSignal(launched=False) as stop:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        assert stop.number == signal.SIGINT
        monkeypatch.setattr(run, "PATIENCE", -1.0)
        signal.raise_signal(signal.SIGINT)


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


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_run(tmp_path):
    """In --timeout seconds, with an error of the other; what was saved is there."""
    flags = *arguments(tmp_path, 2, 1), "--timeout", 4, "--steps", 1000, "--checkpoint-every", 1

    def stop(launcher):
        os.kill(children(launcher)[1], signal.SIGSTOP)

    code, said = interrupted(SCRIPT, *flags, procs=2, when=begun(tmp_path), send=stop)
    assert code != 0 and ("RuntimeError" in said or "RankEnded" in said)  # in a step, or in a save
    assert "that the others wait for longer than 4 s ends the run" in said
    assert latest(tmp_path).startswith("step-")


@pytest.mark.slow
@pytest.mark.parametrize(
    "tp, dp, more", [(4, 1, []), (1, 1, []), (2, 2, []), (1, 3, []), (2, 1, ["--micro-batches", 3])]
)
def test_a_checkpoint_resumes_at_another_split(tmp_path, undisturbed, tp, dp, more):
    """From (tp, dp) = (2, 1); equal to rounding, which Adam and five steps enlarge."""
    run(SCRIPT, *arguments(tmp_path, 2, 1), procs=2, killed=("step", 5))
    said = ok(SCRIPT, *arguments(tmp_path, tp, dp, "--resume", *more), procs=tp * dp)
    assert f"resumed at step 3 of {STEPS}" in said
    close(tmp_path, undisturbed(2, 1)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "tp, dp, more",
    [
        (1, 1, []),
        (4, 1, ["--saving", "smallest"]),
        (2, 2, ["--no-sequence-parallel"]),
        (1, 1, ["--micro-batches", 3]),
        (1, 3, ["--micro-batches", 2]),
    ],
)
def test_the_split_does_not_change_what_is_learnt(tmp_path, undisturbed, tp, dp, more):
    ok(SCRIPT, *arguments(tmp_path, tp, dp, *more), procs=tp * dp)
    close(tmp_path, undisturbed(2, 1)[0])


def close(out: Path, reference: Path) -> None:
    ours, theirs = losses(out), losses(reference)
    assert list(ours) == list(theirs) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-5)


def test_what_a_run_leaves(undisturbed):
    out, said = undisturbed(2, 1)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    records = log_of(out)
    assert [r["step"] for r in records if "held_out_bits" in r] == [4, 8]
    kept = ["job.json", "latest", "step-00000006", "step-00000008"]
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == kept
    assert records[-1]["held_out_bits"] < 8 and f"held out: {records[-1]['held_out_bits']:.3f} bits per byte" in said
    assert "gzip -9" in said and "continues 'class Error(':\nclass Error(" in said


def test_transformers_loads_it_and_agrees(undisturbed):
    """The same bits per byte of the held-out text, to the printed digits and beyond."""
    transformers = pytest.importorskip("transformers")
    texts = example("_text")
    out, _ = undisturbed(2, 1)
    model = transformers.GPT2LMHeadModel.from_pretrained(out / "hf").eval()
    assert sum(p.numel() for p in model.parameters()) == parameter_count(
        GPTConfig(vocab_size=256, max_positions=32, **CONFIG)
    )
    text = texts.read_text(None, MAX_MB, 32)
    nats = 0.0
    with torch.no_grad():
        for ids in texts.windows(text, 32, 64):
            nats += float(model(ids, labels=ids).loss) * ids[:, 1:].numel()
    bits = nats / math.log(2) / (len(text.held_out) - 1)
    records = log_of(out)
    assert bits == pytest.approx(records[-1]["held_out_bits"], rel=1e-5)


def test_the_best_model_is_kept(undisturbed):
    """The one directory in best/ is the model with the fewest held-out bits; hf/ and it say which step they are of."""
    out, said = undisturbed(2, 1)
    records = log_of(out)
    bits, step = min((r["held_out_bits"], r["step"]) for r in records if "held_out_bits" in r)
    (best,) = (out / "best").iterdir()
    assert best.name == f"step-{step:08d}" and trained(best) == dict(step=step, held_out_bits=bits)
    last = dict(step=STEPS, held_out_bits=records[-1]["held_out_bits"], best_step=step)
    assert trained(out / "hf") == last and f"best: {bits:.3f} at step {step}" in said
    assert step == STEPS  # so that both are one model
    assert (best / "model.safetensors").read_bytes() == (out / "hf" / "model.safetensors").read_bytes()


def trained(folder: Path) -> dict:
    return json.loads((folder / "training.json").read_text())


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
    Best = example("_run").Best
    best, seen = Best(folder), []
    for step, bits in (2, 3.0), (4, 3.5), (6, 2.5), (8, math.nan):
        best.offer(Saved(f"of {step}"), step, bits if world.rank == 0 else None)
        torch.distributed.barrier()
        seen.append((best.step, sorted(path.name for path in folder.iterdir())))
    if world.rank == 0:
        (folder / "unfinished").mkdir()
        (folder / "unfinished" / "weights").write_text("torn")
        shutil.copytree(folder / "step-00000006", folder / "step-00000002")
    torch.distributed.barrier()
    again = Best(folder)  # of a run that is resumed at step 3
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


# ---- families and sizes

SMALL = "--seq", 32, "--batch", 6, "--max-mb", MAX_MB, "--steps", STEPS, "--checkpoint-every", 3, "--validate-every", 4
SHAPE = "--width", 32, "--layers", 2, "--heads", 4


def of_family(family: str, out: Path, *more) -> list:
    return ["--family", family, *SHAPE, *SMALL, "--out", out, *more]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "qwen2", "qwen3"])
def test_every_family_trains_and_transformers_loads_it(tmp_path, family):
    """Its held-out bits are those of the log, best/ and hf/ alike."""
    transformers = pytest.importorskip("transformers")
    texts = example("_text")
    said = ok(SCRIPT, *of_family(family, tmp_path), procs=2)
    assert f"{family}, " in said
    text = texts.read_text(None, MAX_MB, 32)
    (best,) = (tmp_path / "best").iterdir()
    for folder in tmp_path / "hf", best:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        assert model.config.model_type == family and model.config.hidden_size == 32
        with torch.no_grad():
            nats = sum(float(model(i, labels=i).loss) * i[:, 1:].numel() for i in texts.windows(text, 32, 64))
        assert nats / math.log(2) / (len(text.held_out) - 1) == pytest.approx(
            trained(folder)["held_out_bits"], rel=1e-5
        )


def test_a_size_is_of_every_family_and_a_flag_overrides_it(monkeypatch):
    options = example("_options")

    def config(*flags):
        monkeypatch.setattr("sys.argv", [SCRIPT, *map(str, flags)])
        return options.config_of(options.parse())

    for family in options.FAMILIES:
        for size, shape in options.SIZES.items():
            made = config("--family", family, "--size", size)
            width, layers = shape["hidden_size"], shape["num_layers"]
            assert made.family == family and (made.hidden_size, made.num_layers) == (width, layers)
            matrices = 12 * layers * width**2
            assert matrices <= parameter_count(made) <= 1.25 * matrices
    made = config("--size", "3m", "--layers", 3, "--heads", 2)
    assert (made.hidden_size, made.num_layers, made.num_heads) == (256, 3, 2)
    assert config("--dropout", 0.25).attention_dropout == 0.25 and config("--dropout", 0.25).dropout == 0.0
    assert config("--dropout", 0.25, "--family", "gpt2").dropout == 0.25


@pytest.mark.slow
def test_the_best_model_survives_a_kill(tmp_path):
    """Killed after a better model was kept and before its checkpoint: the same run goes on, and keeps the same."""
    reference, out = tmp_path / "reference", tmp_path / "killed"
    ok(SCRIPT, *of_family("llama", reference), procs=2)
    run(SCRIPT, *of_family("llama", out), procs=2, killed=("step", 6))
    assert latest(out) == "step-00000003" and [p.name for p in (out / "best").iterdir()] == ["step-00000004"]
    ok(SCRIPT, *of_family("llama", out, "--resume"), procs=2)
    same_run(out, reference)
    assert sorted(p.name for p in (out / "best").iterdir()) == sorted(p.name for p in (reference / "best").iterdir())
    done = run(SCRIPT, *of_family("llama", out, "--resume", "--width", 64), procs=2)
    assert (
        "model.embedding.weight must be (256, 64) for this model" in done.stderr and "its own --family" in done.stderr
    )


def test_a_run_of_before_families_is_a_gpt2(monkeypatch):
    train_gpt, options = example("train_gpt"), example("_options")
    monkeypatch.setattr("sys.argv", [SCRIPT, *map(str, TINY), "--size", "3m"])
    args = options.parse()
    text = example("_text").Text(None, b"", "fingerprint")
    on = train_gpt.Setup(args=args, text=text, **dict.fromkeys(train_gpt.Setup._fields[2:]))
    kept = "seq", "batch", "pack", "seed", "steps", "lr", "dropout"
    extra = {key: getattr(args, key) for key in kept} | dict(size="3m", data="fingerprint")
    monkeypatch.setattr(train_gpt.tpfuse, "load_checkpoint", lambda *_, **__: (3, dict(extra)))
    assert train_gpt.resume(on, Path("checkpoints")) == 3
    extra["size"] = "10m"
    with pytest.raises(ValueError, match="--width is 256 and was 384"):
        train_gpt.resume(on, Path("checkpoints"))


# ---- compiled, and on TensorBoard


@pytest.mark.slow
def test_compiled_blocks_learn_the_same(tmp_path):
    """To rounding; and a compiled run that is killed goes on bit for bit."""
    plain, reference, out = (tmp_path / name for name in ("plain", "compiled", "killed"))
    small = "--dropout", 0.1, "--layers", 1
    ok(SCRIPT, *of_family("llama", plain, *small), procs=2)
    ok(SCRIPT, *of_family("llama", reference, *small, "--compile"), procs=2)
    close(reference, plain)
    run(SCRIPT, *of_family("llama", out, *small, "--compile"), procs=2, killed=("step", 5))
    ok(SCRIPT, *of_family("llama", out, *small, "--compile", "--resume"), procs=2)
    same_run(out, reference)


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
    log = example("_run").Log(tmp_path / "log.jsonl", 2, tmp_path / "board")
    log(step=3, loss=1.25, lr=0.5, imbalance=[1.0, 1.0])
    log.close()
    assert written == [(str(tmp_path / "board"), 3), ("loss", 1.25, 3), ("lr", 0.5, 3), "closed"]


def test_tensorboard_that_is_not_installed_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    code, err = main(monkeypatch, capsys, "--tensorboard", "--out", str(tmp_path / "out"))
    assert code == 2 and "--tensorboard needs the package tensorboard: pip install tensorboard" in err
    assert err.count("\n") == 1 and not (tmp_path / "out").exists()


# ---- packed documents

PACKED = ["--pack", "--seq", 96]  # longer, so that not every paragraph is cut


@pytest.fixture(scope="session")
def packed(tmp_path_factory):
    """The directory and stdout of a run on packed paragraphs, balanced over two replicas, without dropout."""
    out = tmp_path_factory.mktemp("packed")
    return out, ok(SCRIPT, *arguments(out, 1, 2, *PACKED, "--dropout", 0), procs=2)


@pytest.mark.slow
def test_packed_and_balanced_is_every_document_alone(packed):
    """The loss of the first step, one document after the other on one process; and the text that the documents are
    of."""
    texts = example("_text")
    out, said = packed
    text = texts.read_text(None, MAX_MB, 96)
    spans = texts.documents(texts.paragraphs(text, 96), 6 * 96, 0, 0)
    assert len({end - start for start, end in spans}) > 2 and 5 * 96 < (spans[:, 1] - spans[:, 0]).sum() <= 6 * 96
    rates = dict.fromkeys(("dropout", "attention_dropout", "embedding_dropout"), 0.0)
    model = GPT(GPTConfig(vocab_size=256, max_positions=96, init_std=WIDTH**-0.5, **CONFIG, **rates))
    count, total = sum(end - start - 1 for start, end in spans), 0.0
    for start, end in spans:
        ids = torch.from_numpy(text.train[start:end].astype(np.int64))[None]
        total += float(model(ids, labels=ids, loss_normalizer=float(count)).loss.detach())
    assert losses(out)[1] == pytest.approx(total, rel=1e-5)
    before, after = np.mean(
        [json.loads(line).get("imbalance", (1, 1)) for line in (out / "log.jsonl").read_text().splitlines()], 0
    )
    assert 1 <= after < before and re.search(r"dp=2: 1\.\d+ dealt in turn, 1\.\d+ balanced", said)


@pytest.mark.slow
@pytest.mark.parametrize("tp, dp, more", [(2, 1, ["--micro-batches", 3]), (2, 2, ["--micro-batches", 3]), (1, 3, [])])
def test_packed_at_another_split(tmp_path, packed, tp, dp, more):
    ok(SCRIPT, *arguments(tmp_path, tp, dp, *PACKED, "--dropout", 0, *more), procs=tp * dp)
    close(tmp_path, packed[0])


@pytest.mark.slow
@pytest.mark.parametrize("tp, dp", [(1, 2), (2, 2)])
def test_packed_killed_and_resumed(tmp_path, tp, dp):
    reference, out = tmp_path / "undisturbed", tmp_path / "killed"
    ok(SCRIPT, *arguments(reference, tp, dp, *PACKED), procs=tp * dp)
    run(SCRIPT, *arguments(out, tp, dp, *PACKED), procs=tp * dp, killed=("step", 5))
    said = ok(SCRIPT, *arguments(out, tp, dp, *PACKED, "--resume"), procs=tp * dp)
    assert f"resumed at step 3 of {STEPS}" in said
    same_run(out, reference)
    done = run(SCRIPT, *arguments(out, tp, dp, *PACKED[1:], "--resume"), procs=tp * dp)
    assert "--pack is False and was True in" in done.stderr


def test_paragraphs_are_the_text():
    texts = example("_text")
    raw = b"one\n\ntwo\nlines\n \nx\0a long paragraph of its own\0\n\n"
    text = texts.Text(np.frombuffer(raw, np.uint8), b"", "")
    found = [raw[start:end] for start, end in texts.paragraphs(text, 10)]
    assert found == [b"one\n\n", b"two\nlines\n", b" \n", b"x\0", b"a long par", b"agraph of ", b"its own\0", b"\n\n"]
    drawn = texts.documents(texts.paragraphs(text, 10), 64, 1, 2)
    assert np.array_equal(drawn, texts.documents(texts.paragraphs(text, 10), 64, 1, 2))
    assert not np.array_equal(drawn, texts.documents(texts.paragraphs(text, 10), 64, 1, 3))


# ---- flags and guards


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--foo", "unrecognized arguments: --foo"),
        ("--step 3", "unrecognized arguments: --step"),  # no guessing at abbreviations
        ("--size 7m", "--size: invalid choice: '7m'"),
        ("--steps 0", "--steps: must be at least 1, got 0"),
        ("--batch x", "--batch: invalid positive value: 'x'"),
        ("--tp 2", "--tp 2 x --dp 1 needs 2 processes, and there are 1: torchrun --nproc-per-node 2 "),
        ("--dp 3 --tp 2", "needs 6 processes"),
        ("--batch 4 --micro-batches 3", "--batch 4 is not divisible by --dp 1 x --micro-batches 3"),
        ("--lr 0", "--lr must be a positive number, got 0.0"),
        ("--lr nan", "--lr must be a positive number, got nan"),
        ("--ok-topk 0.01", "--ok-topk is of gradients that replicas share: give --dp 2 or more"),
        ("--ok-topk 0 --dp 2", "--ok-topk must be in (0, 1], got 0.0"),
        ("--ok-topk nan --dp 2", "--ok-topk must be in (0, 1], got nan"),
        ("--ok-topk 0.01 --dp 2 --main-grad", "--ok-topk stands in DDP, which --main-grad does without"),
        ("--ok-topk 0.01 --dp 2 --pp 2", "--ok-topk stands in DDP, which --pp does without"),
        ("--ok-topk-warmup 9", "--ok-topk-warmup is of --ok-topk, which is not given"),
        ("--dropout 1", "--dropout must be in [0, 1), got 1.0"),
        ("--seed -1", "--seed must be in [0, 2^63), got -1"),
        ("--top-p 1.5", "--top-p must be in (0, 1], got 1.5"),
        ("--temperature 0", "--temperature must be a positive number, got 0.0"),
        ("--family bert", "--family: invalid choice: 'bert'"),
        ("--width 100 --heads 3", "--width 100 is not divisible by --heads 3"),
        ("--seq 1", "--seq must be at least 2"),
        ("--seq 4 --prompt import", "--prompt must have 1 to 3 bytes"),
        ("--resume --restart", "exclude each other"),
        ("--data /nowhere", "--data /nowhere is neither a file nor a folder"),
        ("--data {empty}", "are too few for --seq 256"),
    ],
)
def test_a_bad_flag_is_one_line_and_code_2(monkeypatch, capsys, tmp_path, flags, said):
    code, err = main(monkeypatch, capsys, *flags.format(empty=tmp_path).split(), "--out", str(tmp_path / "out"))
    assert code == 2 and said in err
    assert err.startswith("train_gpt.py: error: ") and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def main(monkeypatch, capsys, *argv) -> tuple[int, str]:
    """main(), as far as it goes without a process group -> (exit code, stderr)."""
    monkeypatch.setattr("sys.argv", [SCRIPT, *argv])
    with pytest.raises(SystemExit) as stopped:
        example("train_gpt").main()
    return stopped.value.code, capsys.readouterr().err


def test_help_shows_groups_and_defaults(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [SCRIPT, "--help"])
    with pytest.raises(SystemExit) as stopped:
        example("train_gpt").main()
    said = capsys.readouterr().out
    assert stopped.value.code == 0
    for words in (
        "model and text:",
        "training:",
        "how it is split",
        "output:",
        "(default: llama)",
        "(default: 0.6m)",
        "(default: 0)",
        "--resume",
    ):
        assert words in said
    assert "None" not in said and "False" not in said and max(map(len, said.splitlines())) <= 120


@pytest.mark.slow
@pytest.mark.parametrize(
    "flag, said", [("--nope", "unrecognized arguments: --nope"), ("--size=3m --tp=3", "num_heads=8 is not divisible")]
)
def test_under_torchrun_one_rank_speaks(tmp_path, flag, said):
    """What torchrun itself says of a failed process comes after it."""
    flags = *flag.split(), "--max-mb", MAX_MB, "--seq", 32, "--batch", 6, "--out", tmp_path / "out"
    done = run(SCRIPT, *flags, procs=3 if "tp=3" in flag else 2, forked=False)
    errors = [line for line in done.stderr.splitlines() if "train_gpt.py: error:" in line]
    assert len(errors) == 1 and said in errors[0], done.stderr
    assert (
        done.returncode != 0
        and "exitcode  : 2" in done.stderr
        and done.stderr.count("Traceback (most recent call last)") == 1
    )


def finished(out: Path, *, hf: bool = True) -> None:
    """What a run leaves, as far as the guards look."""
    (out / "checkpoints").mkdir(parents=True)
    (out / "checkpoints" / "latest").write_text("step-00000003\n")
    (out / "log.jsonl").write_text("")
    if hf:
        (out / "hf").mkdir()


@pytest.mark.parametrize("hf", [False, True])
def test_a_run_is_not_thrown_away(monkeypatch, capsys, tmp_path, hf):
    finished(tmp_path, hf=hf)
    code, err = main(monkeypatch, capsys, "--out", str(tmp_path))
    assert code == 2 and "holds a run: --resume goes on with it, --restart throws it away" in err
    assert latest(tmp_path) == "step-00000003"


def test_another_programs_directory_is_not_touched(monkeypatch, capsys, tmp_path):
    finished(tmp_path)
    (tmp_path / "log.jsonl").unlink()
    code, err = main(monkeypatch, capsys, "--out", str(tmp_path), "--restart")
    assert code == 2 and "was not written by a run of this script" in err and latest(tmp_path)


@pytest.mark.slow
def test_start_anew_and_refuse_another_run(tmp_path, undisturbed):
    reference, _ = undisturbed(2, 1)
    out = tmp_path / "out"
    shutil.copytree(reference, out)
    done = run(SCRIPT, *arguments(out, 2, 1, "--resume", "--seed", 1), procs=2)
    assert done.stderr.count("--seed is 1 and was 0 in") == 1
    said = ok(SCRIPT, *arguments(out, 2, 1, "--resume"), procs=2)  # a finished run: nothing to train, the end again
    assert f"resumed at step {STEPS} of {STEPS}" in said and "continues 'class Error('" in said
    same_run(out, reference)
    said = ok(SCRIPT, *arguments(out, 2, 1, "--restart"), procs=2)  # anew, over a finished run
    assert "resumed" not in said
    same_run(out, reference)
    empty = tmp_path / "empty"
    said = ok(SCRIPT, *arguments(empty, 2, 1, "--resume"), procs=2)
    assert "no checkpoint in" in said
    same_run(empty, reference)


# ---- what the promises rest on


def test_samples_are_a_function_of_seed_step_and_number():
    texts = example("_text")
    text = texts.Text(np.arange(1000) % 251, b"", "")
    draw = lambda step, samples, seed=0: texts.sample(text, 16, 12, seed, step, samples)
    whole = draw(3, range(12))
    assert whole.shape == (12, 16) and whole.dtype == torch.int64
    assert torch.equal(whole, torch.cat([draw(3, range(i, i + 4)) for i in (0, 4, 8)]))
    assert not torch.equal(whole, draw(4, range(12))) and not torch.equal(whole, draw(3, range(12), seed=1))


def test_every_held_out_byte_but_the_first_is_guessed_once():
    texts = example("_text")
    held_out = bytes(range(31))
    text = texts.Text(None, held_out, "")
    guessed = torch.cat([ids[:, 1:].reshape(-1) for ids in texts.windows(text, 7, 2)])
    assert guessed.tolist() == list(held_out[1:])


@pytest.mark.parametrize("count", [1, 3, 40])
def test_train_and_held_out_text_are_apart(tmp_path, count):
    texts = example("_text")
    for i in range(count):
        (tmp_path / f"{i:02}.txt").write_text(f"<{i:02}>" * 200)
    text = texts.read_text(tmp_path, 8, 16)
    again = texts.read_text(tmp_path, 8, 16)
    assert text.fingerprint == again.fingerprint and text.held_out == again.held_out
    assert (len(text.held_out) - 1) % 15 == 0
    train = bytes(text.train)
    names = [f"<{i:02}>".encode() for i in range(count)]
    both = [name for name in names if name in train and name in text.held_out]
    assert both == [] if count == 40 else len(both) <= 1
    assert len(train) + len(text.held_out) <= 800 * count + count


def test_a_log_drops_what_is_beyond_and_what_is_torn(tmp_path):
    train_gpt = example("train_gpt")
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n{"step": 3, "loss": 1.0}\n{"step": 4, "lo')
    log = train_gpt.Log(path, 2)
    log(step=3, loss=1.25)
    log.file.close()
    assert losses(tmp_path) == {1: 2.0, 2: 1.5, 3: 1.25}
