"""The training example end to end, in real processes: what a newcomer runs, how it is stopped, and that it goes on bit
for bit.

A run is 8 steps of a small GPT-2 with dropout and a checkpoint every third.  Kills are at exact points (killed.py), and
a run that is to be stopped waits in every step, so no test depends on the time it takes.
"""

import hashlib
import json
import math
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.examples.launch import children, example, interrupted, ok, run, running
from tpfuse.models import GPT, GPTConfig
from tpfuse.tools.ledger import parameter_count

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")
transformers = pytest.importorskip("transformers")

SCRIPT = "train_gpt.py"
STEPS = 8
MAX_MB = 0.03
WIDTH, LAYERS, HEADS = 64, 2, 4
SHAPED = ["--width", WIDTH, "--layers", LAYERS, "--heads", HEADS]
CONFIG = dict(hidden_size=WIDTH, num_layers=LAYERS, num_heads=HEADS)
TINY = f"--family gpt2 --dropout 0.1 --steps {STEPS} --batch 6 --seq 32 --lr 3e-4 --max-mb {MAX_MB}".split()
TINY += ["--prompt", "class Error(", *"--checkpoint-every 3 --validate-every 4".split()]


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


def back(out: Path, of: Path, to: int = 6) -> Path:
    """Copies a run, and points it back to an earlier checkpoint."""
    shutil.copytree(of, out)
    (out / "checkpoints" / "latest").write_text(f"step-{to:08d}\n")
    return out


def same_run(out: Path, reference: Path, of: range = range(1, STEPS + 1)) -> None:
    """Bit for bit: every loss, which steps ``of`` log, and the files of weights at the end."""
    assert list(losses(out)) == list(of)
    assert losses(out) == losses(reference)
    files = [{file.name: file.read_bytes() for file in (run / "hf").glob("*.safetensors")} for run in (out, reference)]
    assert files[0] == files[1] != {}


KILLS = [  # (tp, dp, where, in the how-manieth, the checkpoint then there)
    pytest.param(1, 3, "step", 5, 3, marks=pytest.mark.rare),
    pytest.param(2, 1, "shards", 2, 3, marks=pytest.mark.rare),
    (2, 2, "rename", 2, 3),
    (2, 1, "clean", 3, 8),
]


def killed_and_resumed(out: Path, flags: list, procs: int, kill: tuple[str, int], saved: int) -> None:
    """Kills a run at a point, and lets it go on from the checkpoint that is then there."""
    done = run(SCRIPT, *flags, procs=procs, killed=kill)
    assert done.returncode != 0 and "SIGKILL" in done.stderr, done.stderr
    assert latest(out) == f"step-{saved:08d}"
    assert f"resumed at step {saved} of {STEPS}" in ok(SCRIPT, *flags, "--resume", procs=procs)


@pytest.mark.slow
@pytest.mark.parametrize("tp, dp, where, count, saved", KILLS)
def test_killed_and_resumed(tmp_path, undisturbed, tp, dp, where, count, saved):
    killed_and_resumed(tmp_path, arguments(tmp_path, tp, dp), tp * dp, (where, count), saved)
    same_run(tmp_path, undisturbed(tp, dp)[0])


FEATURES = {  # flags: (tp, dp)
    "--pack --seq 96 --main-grad --micro-batches 3 --bf16": (1, 2),
    "--ok-topk 0.05 --ok-topk-warmup 1": (1, 3),
    "--ok-topk 0.05 --ok-topk-warmup 5": (1, 2),
}
RARELY = {"--ok-topk 0.05 --ok-topk-warmup 1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [pytest.param(f, marks=[pytest.mark.rare] * f.endswith("warmup 1")) for f in FEATURES]
)
def test_killed_and_resumed_with(tmp_path, flags):
    """Packed documents with gradients in fp32; sparse gradients, from a checkpoint after their warm-up and from one in
    it."""
    tp, dp = FEATURES[flags]
    reference, out = tmp_path / "reference", tmp_path / "killed"
    ok(SCRIPT, *arguments(reference, tp, dp, *flags.split()), procs=tp * dp)
    killed_and_resumed(out, arguments(out, tp, dp, *flags.split()), tp * dp, ("step", 5), 3)
    same_run(out, reference)
    if "topk" in flags:
        sent = [[r["bytes_sent"] for r in log_of(run) if "bytes_sent" in r] for run in (out, reference)]
        assert sent[0] == sent[1] and max(sent[0][int(flags[-1]) :]) < 0.5 * sent[0][0]


def digests(out: Path) -> dict[int, str]:
    return {r["step"]: r["weights_sha256"] for r in log_of(out) if "weights_sha256" in r}


BITWISE = ["--bitwise", 4, "--no-sequence-parallel"]


def test_a_digest_of_the_weights(tmp_path):
    """In the log and beside the held-out bits; of the weights that are saved."""
    from safetensors.torch import load_file

    said = ok(SCRIPT, *arguments(tmp_path, 1, 1, *BITWISE, "--steps", 2))
    saved = load_file(tmp_path / "hf" / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(saved):
        digest.update(name.encode())
        digest.update(hashlib.sha256(saved[name].contiguous().numpy().tobytes()).digest())
    assert list(digests(tmp_path)) == [1, 2] and digests(tmp_path)[2] == digest.hexdigest() != digests(tmp_path)[1]
    assert "step 2: held out" in said and f"weights sha256 {digest.hexdigest()}" in said


@pytest.mark.slow
def test_killed_and_resumed_at_another_split(tmp_path):
    """The bits of one process that was never killed, from two ranks with sequence parallelism to four without."""
    one, out = tmp_path / "one", tmp_path / "killed"
    ok(SCRIPT, *arguments(one, 1, 1, *BITWISE))
    done = run(SCRIPT, *arguments(out, 2, 1, *BITWISE[:2]), procs=2, killed=("step", 6))
    assert done.returncode != 0 and "SIGKILL" in done.stderr and latest(out) == "step-00000003"
    said = ok(SCRIPT, *arguments(out, 4, 1, *BITWISE, "--resume"), procs=4)
    assert f"resumed at step 3 of {STEPS}, bit for bit" in said
    same_run(out, one)
    assert digests(out) == digests(one) and list(digests(one)) == list(range(1, STEPS + 1))
    assert f"weights sha256 {digests(one)[STEPS]}" in said


MICRO = "--micro-batches", 2


@pytest.fixture(scope="module")
def two_replicas(tmp_path_factory):
    """The directories of a bitwise run on one process, with two micro-batches, and of one on two replicas of two ranks
    that was killed."""
    one, out = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("killed")
    ok(SCRIPT, *arguments(one, 1, 1, *BITWISE, *MICRO))
    done = run(SCRIPT, *arguments(out, 2, 2, *BITWISE[:2]), procs=4, killed=("step", 6))
    assert done.returncode != 0 and "SIGKILL" in done.stderr and latest(out) == "step-00000003"
    return one, out


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [pytest.param((4, 1), marks=pytest.mark.rare), (2, 1, "--pp", 2)], ids=str)
def test_killed_and_resumed_with_other_replicas(tmp_path, two_replicas, resumed):
    """The bits of one process with two micro-batches, from two replicas of two ranks to one of four, or two stages."""
    one, out = two_replicas[0], back(tmp_path / "out", two_replicas[1], 3)
    done = run(SCRIPT, *arguments(out, *resumed, *BITWISE, *MICRO, "--resume"), procs=4)
    assert (
        done.returncode == 0 and ", bit for bit" in done.stdout and "not bit for bit" not in done.stdout + done.stderr
    )
    assert digests(out) == digests(one) and list(digests(one)) == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_torchrun_starts_the_same_run(tmp_path, undisturbed):
    """As a user types it: no process here was forked.  With nothing there to resume it begins."""
    assert "no checkpoint in" in ok(SCRIPT, *arguments(tmp_path, 2, 1, "--resume"), procs=2, forked=False)
    same_run(tmp_path, undisturbed(2, 1)[0])


def begun(out: Path):
    log = out / "log.jsonl"
    return lambda: log.exists() and log.read_text().count("\n") >= 2


SIGNALS = [  # (tp, dp, processes under torchrun or 0, signal, how it is sent)
    (2, 1, 2, signal.SIGHUP, os.kill),
    (1, 3, 3, signal.SIGTERM, os.kill),
    (1, 1, 0, signal.SIGINT, os.kill),
    (2, 1, 2, signal.SIGINT, os.killpg),  # as Slurm and Ctrl-C do: to the launcher, which passes it on, and to each
]


@pytest.mark.slow
@pytest.mark.parametrize("tp, dp, procs, number, kill", SIGNALS)
def test_a_signal_finishes_the_step_and_says_how_to_go_on(tmp_path, undisturbed, tp, dp, procs, number, kill):
    send = lambda launcher: kill(launcher, number)
    code, said = interrupted(SCRIPT, *arguments(tmp_path, tp, dp), procs=procs, when=begun(tmp_path), send=send)
    reached = len(losses(tmp_path))
    assert 2 <= reached < STEPS and latest(tmp_path) == f"step-{reached:08d}"
    assert code != 0 and said.count(f"stopped by {number.name}") == 1, said
    again = said.split(f"stopped by {number.name}")[1].splitlines()[1]
    assert "train_gpt.py" in again and again.endswith("--resume") and f"--out {tmp_path}" in again
    assert procs or (code == 128 + number and "Traceback" not in said)
    if kill is os.killpg:  # of which nothing is left to resume but the checkpoint
        said = ok(SCRIPT, *arguments(tmp_path, tp, dp, "--resume"), procs=procs)
        assert f"resumed at step {reached} of {STEPS}" in said
        same_run(tmp_path, undisturbed(tp, dp)[0])


@pytest.mark.slow
def test_a_folder_in_which_another_run_is_going_on_is_refused(tmp_path):
    refused = []

    def start_another_and_stop(launcher):
        refused.append(run(SCRIPT, *arguments(tmp_path, 1, 1, "--restart"), procs=0))
        os.kill(launcher, signal.SIGINT)

    code, _ = interrupted(
        SCRIPT, *arguments(tmp_path, 1, 1), procs=0, when=begun(tmp_path), send=start_another_and_stop
    )
    assert refused[0].returncode == 2 and f"{tmp_path} is in use by process" in refused[0].stderr
    assert code == 128 + signal.SIGINT and sorted(losses(tmp_path)) == [*range(1, 1 + len(losses(tmp_path)))]


@pytest.mark.slow
def test_processes_whose_launcher_was_killed_stop_with_a_checkpoint(tmp_path, undisturbed):
    kill = lambda launcher: os.kill(launcher, signal.SIGKILL)
    _, said = interrupted(SCRIPT, *arguments(tmp_path, 2, 1), procs=2, when=begun(tmp_path), send=kill)
    reached = len(losses(tmp_path))
    assert 2 <= reached < STEPS and latest(tmp_path) == f"step-{reached:08d}"
    assert "stopped by SIGINT" in said, said  # which torch's launcher has forked processes sent at its death
    ok(SCRIPT, *arguments(tmp_path, 2, 1, "--resume"), procs=2)
    same_run(tmp_path, undisturbed(2, 1)[0])


def let_go(other, stopped):
    """Lets a stopped process hear the launcher, which would wait for half a minute, once the other has ended."""
    while running(other):
        time.sleep(0.1)
    os.kill(stopped, signal.SIGCONT)


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_run(tmp_path):
    """In --timeout seconds, with an error of the other; what was saved is there."""
    flags = *arguments(tmp_path, 2, 1), "--timeout", 4, "--steps", 1000, "--checkpoint-every", 1

    def stop(launcher):
        other, stopped = children(launcher)
        os.kill(stopped, signal.SIGSTOP)
        threading.Thread(target=let_go, args=(other, stopped), daemon=True).start()

    code, said = interrupted(SCRIPT, *flags, procs=2, when=begun(tmp_path), send=stop)
    assert code != 0 and ("RuntimeError" in said or "RankEnded" in said)  # in a step, or in a save
    assert "that the others wait for longer than 4 s ends the run" in said
    assert latest(tmp_path).startswith("step-")


@pytest.mark.slow
def test_a_checkpoint_resumes_at_another_split(tmp_path, undisturbed):
    """From (tp, dp) = (2, 1); equal to rounding, which Adam enlarges."""
    out = back(tmp_path / "out", undisturbed(2, 1)[0])
    said = ok(SCRIPT, *arguments(out, 2, 2, "--resume", "--micro-batches", 3), procs=4)
    assert f"resumed at step 6 of {STEPS}" in said
    close(out, undisturbed(2, 1)[0])


@pytest.mark.slow
def test_pieces_of_sequences(tmp_path, undisturbed):
    """Killed at (cp, tp) = (2, 2), and resumed at (2, 1): the losses of two tensor-parallel ranks."""
    done = run(SCRIPT, *arguments(tmp_path, 2, 1, "--cp", 2), procs=4, killed=("step", 5))
    assert done.returncode != 0 and "SIGKILL" in done.stderr and latest(tmp_path) == "step-00000003"
    said = ok(SCRIPT, *arguments(tmp_path, 1, 1, "--cp", 2, "--resume"), procs=2)
    assert f"resumed at step 3 of {STEPS}" in said and "tp=1 x cp=2 x dp=1" in said
    close(tmp_path, undisturbed(2, 1)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "tp, dp, more",
    [(4, 1, "--saving smallest"), (2, 2, "--no-sequence-parallel"), (1, 3, "--micro-batches 2"), (1, 1, "")],
)
def test_the_split_does_not_change_what_is_learnt(tmp_path, undisturbed, tp, dp, more):
    ok(SCRIPT, *arguments(tmp_path, tp, dp, *more.split()), procs=tp * dp)
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


def transformers_bits(folder: Path, seq: int = 32):
    """-> transformers' model of a directory, and its bits per byte of the held-out text."""
    texts, model = example("_text"), transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    text = texts.read_text(None, MAX_MB, seq)
    with torch.no_grad():
        nats = sum(float(model(i, labels=i).loss) * i[:, 1:].numel() for i in texts.windows(text, seq, 64))
    return model, nats / math.log(2) / (len(text.held_out) - 1)


def test_transformers_loads_it_and_agrees(undisturbed):
    """The same bits per byte of the held-out text, to the printed digits and beyond."""
    out, _ = undisturbed(2, 1)
    model, bits = transformers_bits(out / "hf")
    config = GPTConfig(vocab_size=256, max_positions=32, **CONFIG)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(config)
    assert bits == pytest.approx(log_of(out)[-1]["held_out_bits"], rel=1e-5)


def test_the_best_model_is_there(undisturbed):
    """The one directory in best/ is the model with the fewest held-out bits; hf/ and it say which step they are of."""
    out, said = undisturbed(2, 1)
    records = log_of(out)
    bits, step = min((r["held_out_bits"], r["step"]) for r in records if "held_out_bits" in r)
    (best,) = (out / "best").iterdir()
    assert best.name == f"step-{step:08d}" and trained(best) == dict(step=step, held_out_bits=bits)
    final = dict(step=STEPS, held_out_bits=records[-1]["held_out_bits"], best_step=step)
    assert trained(out / "hf") == final and f"best: {bits:.3f} at step {step}" in said
    assert step == STEPS  # so that both are one model
    assert (best / "model.safetensors").read_bytes() == (out / "hf" / "model.safetensors").read_bytes()


def trained(folder: Path) -> dict:
    return json.loads((folder / "training.json").read_text())


# ---- families and sizes


def setup_of(monkeypatch, *flags):
    """Returns the script, and what it would train with these flags but for the model."""
    train_gpt, options = example("train_gpt"), example("_options")
    monkeypatch.setattr("sys.argv", [SCRIPT, *map(str, TINY), *flags])
    text = example("_text").Text(None, b"", "fingerprint")
    return train_gpt, train_gpt.Setup(options.parse(), text, **dict.fromkeys(train_gpt.Setup._fields[2:]))


def test_a_run_goes_on_with_its_own_settings(monkeypatch):
    train_gpt, on = setup_of(monkeypatch)
    own = train_gpt.settings(on)
    assert {"seed", "seq", "pack", "ok_topk", "bitwise", "tree_of", "data"} <= own.keys()
    for key, now in own.items():
        monkeypatch.setattr(train_gpt.tpfuse, "load_checkpoint", lambda *_, key=key, **__: (3, own | {key: "other"}))
        flag = "dp x --micro-batches" if key == "tree_of" else key.replace("_", "-")
        with pytest.raises(ValueError, match=re.escape(f"--{flag} is {now} and was other in checkpoints: resume")):
            train_gpt.resume(on, Path("checkpoints"))


def test_a_run_of_before_families_is_a_gpt2(monkeypatch):
    train_gpt, on = setup_of(monkeypatch, "--size", "3m")
    args = on.args
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
    """To rounding.  From a checkpoint before a better model, a compiled run goes on bit for bit and has the same best
    model."""
    plain, reference, out = (tmp_path / name for name in ("plain", "compiled", "resumed"))
    llama = "--family", "llama", "--layers", 1, "--compile"
    ok(SCRIPT, *arguments(plain, 1, 1, *llama[:-1]))
    ok(SCRIPT, *arguments(reference, 1, 1, *llama))
    close(reference, plain)
    back(out, reference)
    assert [p.name for p in (out / "best").iterdir()] == [f"step-{STEPS:08d}"]
    ok(SCRIPT, *arguments(out, 1, 1, *llama, "--resume"))
    same_run(out, reference)
    assert sorted(p.name for p in (out / "best").iterdir()) == sorted(p.name for p in (reference / "best").iterdir())


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
def test_packed_at_another_split(tmp_path, packed):
    ok(SCRIPT, *arguments(tmp_path, 2, 2, *PACKED, "--dropout", 0, "--micro-batches", 3), procs=4)
    close(tmp_path, packed[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "flag, said",
    [
        pytest.param("--nope", "unrecognized arguments: --nope", marks=pytest.mark.rare),
        ("--heads=3 --width=96", "num_heads=3 is not divisible"),
    ],
)
def test_under_torchrun_one_rank_speaks(tmp_path, flag, said):
    """What torchrun itself says of a failed process comes after it."""
    flags = *flag.split(), "--max-mb", MAX_MB, "--seq", 32, "--batch", 6, "--out", tmp_path / "out"
    done = run(SCRIPT, *flags, procs=2, forked=False)
    errors = [line for line in done.stderr.splitlines() if "train_gpt.py: error:" in line]
    assert len(errors) == 1 and said in errors[0], done.stderr
    assert (
        done.returncode != 0
        and "exitcode  : 2" in done.stderr
        and done.stderr.count("Traceback (most recent call last)") == 1
    )


@pytest.mark.slow
def test_start_anew_and_refuse_another_run(tmp_path, undisturbed):
    reference, _ = undisturbed(2, 1)
    out = Path(shutil.copytree(reference, tmp_path / "out"))
    done = run(SCRIPT, *arguments(out, 2, 1, "--resume", "--seed", 1), procs=2)
    assert done.stderr.count("--seed is 1 and was 0 in") == 1
    said = ok(SCRIPT, *arguments(out, 2, 1, "--resume"), procs=2)  # a finished run: nothing to train, the end again
    assert f"resumed at step {STEPS} of {STEPS}" in said and "continues 'class Error('" in said
    same_run(out, reference)
    said = ok(SCRIPT, *arguments(out, 2, 1, "--restart", "--seed", 1), procs=2)  # anew, over a finished run
    assert "resumed" not in said
    with pytest.raises(AssertionError):  # the comparison can fail: with another seed it is not the same run
        same_run(out, reference)
