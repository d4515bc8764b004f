"""The training example over pipeline stages: every schedule learns what one process learns, a checkpoint goes on at any
layout and schedule, a killed stage is named, and what is written is one model.

A run is 8 steps of a GPT-2 with dropout, with a checkpoint every third and after the last; the one before the last is
where runs are resumed that nothing had to stop.

Spans: examples/train_gpt.py with --pp, its _batches.py and the schedules of tpfuse/pipeline, together.
"""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.examples.launch import example, interrupted, ok, run
from tests.examples.test_train_gpt import (
    STEPS,
    back,
    begun,
    close,
    killed_and_resumed,
    latest,
    losses,
    same_run,
    trained,
    transformers_bits,
)

SCRIPT = "train_gpt.py"
SMALL = "--width 32 --layers 4 --heads 4 --seq 32 --batch 8 --max-mb 0.03 --prompt import --lr 3e-4"
SMALL += f" --steps {STEPS} --checkpoint-every 3 --validate-every 4"
DROPPING = "--family gpt2 --dropout 0.1"
ZBV = "--pp 2 --schedule zbv --micro-batches 4"


def arguments(out: Path, *more: str) -> list:
    return [*" ".join((SMALL, *more)).split(), "--out", out]


def once(tmp_path_factory, name: str, procs: int, *more: str) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp(name)
    return out, ok(SCRIPT, *arguments(out, *more), procs=procs)


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """The directory and stdout of a run on one process."""
    return once(tmp_path_factory, "alone", 1, DROPPING)


@pytest.fixture(scope="session")
def staged(tmp_path_factory):
    """The same of a run over two ranks with two stages each."""
    return once(tmp_path_factory, "staged", 2, DROPPING, ZBV)


def held_out(out: Path) -> list[float]:
    records = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [r["held_out_bits"] for r in records if "held_out_bits" in r]


# ---- what is learnt, written and read ----


@pytest.mark.slow
def test_stages_learn_what_one_process_learns(alone, staged):
    close(staged[0], alone[0])
    np.testing.assert_allclose(held_out(staged[0]), held_out(alone[0]), rtol=1e-5)
    assert "pp=2 (zbv) x tp=1 x dp=1" in staged[1] and "continues 'import':\nimport" in staged[1]


@pytest.mark.slow
def test_the_files_of_stages_are_one_model(alone, staged, monkeypatch, capsys):
    """generate.py goes on as from another's."""
    written = []
    for out in staged[0], alone[0]:
        monkeypatch.setattr("sys.argv", ["generate.py", "--model", str(out / "hf"), "--max-new-tokens", "8", "import"])
        example("generate").main()
        said = capsys.readouterr().out
        written.append(said[said.index("> import") :].split("tokens in")[0])
    assert written[0] == written[1]


LAYOUTS = {  # of which run, and how it goes on; FAMILIES has the other schedules
    "copies": ("alone", 2, "--pp 2 --schedule chimera --micro-batches 2"),
    "more stages": ("staged", 4, "--pp 4 --schedule gpipe --micro-batches 4"),
    "dp": ("staged", 4, "--pp 2 --dp 2 --schedule dualpipev --micro-batches 4"),
    "no stages": ("staged", 1, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_checkpoint_goes_on_at_another_layout(tmp_path, request, alone, kind):
    of, procs, layout = LAYOUTS[kind]
    out = back(tmp_path / "out", request.getfixturevalue(of)[0])
    said = ok(SCRIPT, *arguments(out, DROPPING, layout, "--resume"), procs=procs)
    assert f"resumed at step 6 of {STEPS}" in said
    close(out, alone[0])


FAMILIES = {  # two layouts of each: its first run is resumed at the second
    "llama": ("--dropout 0.1 --layers 5", ZBV + " --stage-layers 1 2 1 1", 2, "--micro-batches 2", 1),
    "mistral": ("--untied", "--pp 2 --schedule zero-bubble --micro-batches 4", 2, "--tp 2", 2),
    "qwen2": ("--untied --dropout 0.1", "--pp 2 --tp 2 --micro-batches 2", 4, ZBV, 2),
    "qwen3": ("", "--pp 2 --schedule interleaved --micro-batches 2", 2, "--pp 2 --stage-layers 3 1", 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path, family):
    """Tied and untied, stages of unequal numbers of layers: what was trained at one layout goes on at another, and
    transformers' held-out bits are those of the log, for best/ and hf/ alike."""
    model, layout, procs, other, others = FAMILIES[family]
    model = f"--family {family} {model}"
    first = tmp_path / "first"
    ok(SCRIPT, *arguments(first, model, layout), procs=procs)
    again = back(tmp_path / "again", first)
    ok(SCRIPT, *arguments(again, model, other, "--resume"), procs=others)
    close(again, first)
    for folder in first / "hf", next((first / "best").iterdir()):
        loaded, bits = transformers_bits(folder)
        assert loaded.config.model_type == family and loaded.config.tie_word_embeddings == ("--untied" not in model)
        assert bits == pytest.approx(trained(folder)["held_out_bits"], rel=1e-5)


@pytest.mark.slow
def test_packed_documents_and_a_killed_stage_of_a_replica(tmp_path):
    """Without dropout, whose masks depend on the rows: what one process learns of the same documents.  Gradients in
    fp32, which are summed by MainGrad; of a killed rank the stages are named, and the run goes on."""
    alone, staged, killed = tmp_path / "alone", tmp_path / "staged", tmp_path / "killed"
    ok(SCRIPT, *arguments(alone, "--pack"), procs=1)
    flags = "--pack --main-grad --pp 2 --dp 2 --schedule zbv --micro-batches 4"
    ok(SCRIPT, *arguments(staged, flags), procs=4)
    close(staged, alone)
    done = run(SCRIPT, *arguments(killed, flags), procs=4, killed=("backward@3", 6))
    assert done.returncode != 0 and "rank 3, which holds stages 1 and 2, has ended" in done.stderr, done.stderr
    ok(SCRIPT, *arguments(killed, flags, "--resume"), procs=4)
    same_run(killed, staged)


# ---- stopped and killed ----


@pytest.mark.slow
def test_ctrl_c_finishes_the_step_and_the_run_goes_on(tmp_path, staged):
    stop = lambda launcher: os.kill(launcher, signal.SIGINT)
    given = arguments(tmp_path, DROPPING, ZBV)
    code, said = interrupted(SCRIPT, *given, procs=2, when=begun(tmp_path), send=stop)
    reached = len(losses(tmp_path))
    assert code != 0 and said.count("stopped by SIGINT") == 1 and latest(tmp_path) == f"step-{reached:08d}", said
    again = said.split("stopped by SIGINT")[1].splitlines()[1]
    assert ZBV in again and again.endswith("--resume")
    ok(SCRIPT, *given, "--resume", procs=2)
    same_run(tmp_path, staged[0])


KILLS = [  # (where, on which rank, in the how-manieth, the checkpoint then found, what the other rank says)
    ("backward", 0, 6, 3, "which holds stages 1 and 2: rank 0, which holds stages 0 and 3, has ended"),
    ("shards", 1, 2, 3, "is not published: rank 1 has ended"),
]


@pytest.mark.slow
@pytest.mark.parametrize("where, rank, count, found, words", KILLS)
def test_a_killed_stage_is_named_and_the_run_goes_on(tmp_path, staged, where, rank, count, found, words):
    given = arguments(tmp_path, DROPPING, ZBV)
    done = run(SCRIPT, *given, procs=2, killed=(f"{where}@{rank}", count))
    assert done.returncode != 0 and words in done.stderr, done.stderr
    assert latest(tmp_path) == f"step-{found:08d}"
    said = ok(SCRIPT, *given, "--resume", procs=2)
    assert f"resumed at step {found} of {STEPS}" in said
    same_run(tmp_path, staged[0])


@pytest.mark.slow
def test_delayed_gradients_are_killed_and_resumed(tmp_path):
    """Without a flush bit for bit at the same layout; in one process to rounding, with the delay alone."""
    layout, first = "--delayed --pp 2 --schedule 2bw --micro-batches 4", tmp_path / "first"
    ok(SCRIPT, *arguments(first, DROPPING, layout), procs=2)
    kept = arguments(tmp_path / "killed", DROPPING, layout.removeprefix("--delayed "))
    killed_and_resumed(tmp_path / "killed", kept, 2, ("backward@1", 5), 3)
    same_run(tmp_path / "killed", first, of=range(2, STEPS + 1))
    one = back(tmp_path / "one", first)
    done = run(SCRIPT, *arguments(one, DROPPING, "--resume"), procs=1)
    assert "holds a gradient that is not yet applied" in done.stderr and "and --delayed" in done.stderr, done.stderr
    ok(SCRIPT, *arguments(one, DROPPING, "--delayed --resume"), procs=1)
    np.testing.assert_allclose(list(losses(one).values()), list(losses(first).values()), rtol=1e-5)
    np.testing.assert_allclose(held_out(one), held_out(first), rtol=1e-5)


# ---- what is refused ----


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, said",
    [
        ("--stage-layers 3 2", "stage's layers must be 2 positive integers whose sum is 4, got"),
        ("--untied", "a run goes on with its own --family, --size"),
    ],
)
def test_what_stages_cannot_do_is_one_line(tmp_path, staged, flags, said):
    """When it is resumed too, and the run is as it was."""
    out = back(tmp_path / "out", staged[0])
    done = run(SCRIPT, *arguments(out, DROPPING, "--pp 2 --micro-batches 4", flags, "--resume"), procs=2)
    errors = [line for line in done.stderr.splitlines() if "train_gpt.py: error: " in line]
    assert done.returncode != 0 and len(errors) == 1 and said in errors[0], done.stderr
    assert losses(out) == losses(staged[0])


# ---- what a replica computes ----


def batches(monkeypatch, dp_rank: int, *flags: str):
    """Returns what replica ``dp_rank`` computes, as the script would with these flags, on its own text."""
    options, texts = example("_options"), example("_text")
    monkeypatch.setattr(example("_common"), "WORLD", 4)
    monkeypatch.setattr("sys.argv", [SCRIPT, *" ".join((SMALL, "--pp 2 --tp 1 --dp 2", *flags)).split()])
    args = options.parse()
    text = texts.read_text(None, 0.03, args.seq)
    spans = texts.paragraphs(text, args.seq)
    device = torch.device("cpu")
    return example("_batches").Batches(args, text, spans, options.config_of(args), dp_rank, device)


def test_a_pipelines_rows_hold_each_document_once(monkeypatch):
    """As many rows as micro-batches, of one length; what fills them up does not count."""
    found = []
    for rank in range(2):
        mine = batches(monkeypatch, rank, "--pack --micro-batches 4")
        given = mine.merged(5)
        ids, labels = given["input_ids"], given["labels"]
        assert (
            len(ids) == 4 and ids.shape == labels.shape and ids.shape[1] % 32 == 0 and given["first_sample"] == 4 * rank
        )
        for row, guesses, bounds, longest in zip(ids, labels, given["cu_seqlens"], given["max_seqlen"]):
            assert bounds[0] == 0 and bounds[-1] == len(row) and int(bounds.diff().max()) == longest <= 32
            pieces = [(row[a:b], guesses[a:b]) for a, b in zip(bounds[:-1], bounds[1:])]
            found += [bytes(r.tolist()) for r, g in pieces if (g >= 0).all()]
            assert all((g >= 0).all() or not (r.any() or (g >= 0).any()) for r, g in pieces)
    spans = mine._spans(5)
    assert sorted(found) == sorted(mine.text.train[a:b].tobytes() for a, b in spans)
    assert mine.labels(5) == sum(len(document) - 1 for document in found)


def test_more_micro_batches_than_documents_are_filled_up(monkeypatch):
    mine = batches(monkeypatch, 0, "--pack --micro-batches 4")
    few = mine._replace(text=mine.text, spans=mine.spans[:1])
    monkeypatch.setattr(type(few), "_documents", lambda self, step: [torch.arange(1, 6), torch.arange(1, 9)])
    given = few.merged(0)
    assert given["input_ids"].shape == (4, 32) and sorted((given["labels"] >= 0).sum(1).tolist()) == [0, 0, 5, 8]


def test_replicas_evaluate_every_held_out_byte_once(monkeypatch):
    """In calls of one shape, as many on each."""
    parts = [list(batches(monkeypatch, rank, "--micro-batches 2").held_out()) for rank in range(2)]
    assert len(parts[0]) == len(parts[1]) and {part["labels"].shape for part in parts[0] + parts[1]} == {(4, 32)}
    labels = torch.cat([part["labels"] for parts in zip(*parts) for part in parts])
    guessed = labels[:, 1:][labels[:, 1:] >= 0]
    assert bytes(guessed.tolist()) == batches(monkeypatch, 0).text.held_out[1:]
