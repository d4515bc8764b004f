"""Hugging Face files of pipeline stages: what one process and transformers load is the whole model, whoever fails."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers

from tests.common import assert_equal
from tests.models.common import default_dtype, scramble
from tests.pipeline.common import MODELS, ROWS, SEQ, VOCAB, made
from tpfuse import TensorParallel
from tpfuse.models import GPT, Bert
from tpfuse.models.files import disk
from tpfuse.models.files import write as hf_write
from tpfuse.pipeline import SCHEDULES, schedule

DROPS_NOTHING = dict(dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0)  # as Llama's files have to say
THEIRS = {
    "gpt2": transformers.GPT2LMHeadModel,
    "untied": transformers.GPT2LMHeadModel,
    "llama": transformers.LlamaForCausalLM,
    "bert": transformers.BertForMaskedLM,
}


def staged(world, layout, name, kind):
    """A model of random norms and biases, the same at any layout."""
    mesh = world.stages(*layout)
    pp, dp = mesh["pp"], mesh["dp"]
    options = {} if name is None else dict(stage=(pp.get_local_rank(), pp.size(), name))
    with default_dtype(torch.float64):
        options |= dict(tp=TensorParallel(mesh["tp"]), dp=dp if dp.size() > 1 else None)
        model = made(replace(MODELS[kind], **DROPS_NOTHING), **options).eval()
    scramble(model)
    if name is not None:
        schedule(model, pp, name, ROWS)
    return model


def save(world, layout, name, kind, path, limit):
    """-> how many files this rank wrote, and the most bytes of tensors in one"""
    sizes: list[int] = []
    calls = lambda tensors, file: (sizes.append(bytes_of(tensors)), disk.save_file(tensors, file))
    with mock.patch.object(hf_write, "save_file", calls), mock.patch.object(hf_write, "MAX_SHARD_BYTES", limit):
        staged(world, layout, name, kind).save_pretrained(path)
    return sizes


def bytes_of(tensors):
    return sum(t.nbytes for t in tensors.values())


def tensors_of(path):
    index = json.loads((path / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, x in disk.safetensors.load_file(file).items():
            assert name not in found and index["weight_map"][name] == file.name
            found[name] = x
    assert found.keys() == index["weight_map"].keys()
    return found, index["metadata"]["total_size"]


PLACES = [((2, 1, 1), name) for name in SCHEDULES if name not in ("gpipe", "zero-bubble")]
PLACES += [((4, 1, 1), "chimera"), ((2, 1, 2), "zbv"), ((2, 2, 1), "1f1b"), ((2, 2, 2), "interleaved")]
CASES = [(*place, list(THEIRS)[i % len(THEIRS)]) for i, place in enumerate(PLACES)]
DAILY = [((2, 1, 1), "1f1b", "gpt2"), ((2, 1, 2), "zbv", "llama"), ((4, 1, 1), "chimera", "bert")]
CASES += [case for case in DAILY if case not in CASES]


@pytest.mark.parametrize(
    "layout, name, kind", [pytest.param(*c, marks=[] if c in DAILY else pytest.mark.slow) for c in CASES]
)
def test_what_stages_save_is_what_one_process_saves(ranks, tmp_path, layout, name, kind):
    limit = 20_000  # bytes: several files of each stage
    ranks(1, save, (1, 1, 1), None, kind, str(tmp_path / "one"), limit)
    pp, dp, tp = layout
    written = ranks(pp * dp * tp, save, layout, name, kind, str(tmp_path / "stages"), limit)
    assert all(bool(files) == (rank % (dp * tp) == 0) for rank, files in enumerate(written) if rank < pp // 2 * dp * tp)
    assert max(n for files in written for n in files) <= limit
    one, stages = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "stages")
    assert_equal(stages[0], one[0])
    assert stages[1] == one[1]
    config = (tmp_path / "stages" / "config.json").read_text()
    assert config == (tmp_path / "one" / "config.json").read_text()
    assert not list((tmp_path / "stages").glob(".saving*"))
    ids = torch.randint(VOCAB, (2, SEQ))
    theirs, info = THEIRS[kind].from_pretrained(
        tmp_path / "stages", output_loading_info=True, attn_implementation="eager", dtype=torch.float64
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    cls = Bert if kind == "bert" else GPT
    ours = cls.from_pretrained(tmp_path / "stages", dtype=torch.float64)(ids).logits
    torch.testing.assert_close(theirs.eval()(ids).logits, ours, rtol=1e-4, atol=1e-5)  # their rotations are fp32


def save_again(world, layout, path, fails):
    """Rank ``fails`` cannot write -> what is said."""
    model = staged(world, layout, "1f1b", "gpt2")

    def full(*args):
        raise OSError("no space left")

    where = dict(write=(hf_write, "save_file"), publish=(disk, "fsync"), folder=(hf_write.Path, "is_dir"))
    (module, function), rank = where[fails[0]], fails[1]
    broken = (lambda *args: False) if fails[0] == "folder" else full
    with mock.patch.object(module, function, broken if world.rank == rank else getattr(module, function)):
        with pytest.raises(OSError) as caught:
            model.save_pretrained(path)
    torch.distributed.barrier()
    return str(caught.value)


def content(path):
    return {file.name: file.read_bytes() for file in Path(path).iterdir()}


@pytest.mark.parametrize("fails", [("write", 1), ("write", 0), ("publish", 0), ("folder", 1)], ids=str)
def test_a_stage_that_cannot_write_is_every_ranks_error_and_leaves_the_old_files(ranks, tmp_path, fails):
    layout = (2, 1, 1)
    ranks(2, save, layout, "zbv", "gpt2", str(tmp_path), 5 << 30)
    before = content(tmp_path)
    first, second = ranks(2, save_again, layout, str(tmp_path), fails)
    assert first == second and ("share one folder" if fails[0] == "folder" else "no space left") in first
    assert content(tmp_path) == before


def die(world, layout, path):
    def killed(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(hf_write, "save_file", killed if world.rank == 1 else hf_write.save_file):
        staged(world, layout, "1f1b", "gpt2").save_pretrained(path)


@pytest.mark.slow
def test_a_stage_that_is_killed_is_named_and_the_old_files_stay(ranks, tmp_path):
    layout = (4, 1, 1)
    ranks(4, save, layout, "1f1b", "gpt2", str(tmp_path), 5 << 30)
    before = content(tmp_path)
    with pytest.raises(Exception, match="rank 1 died") as caught:
        ranks(4, die, layout, str(tmp_path))
    others = str(caught.value.__cause__)
    assert "was not done in time" not in others and others.count("RankEnded: rank 1 has ended") >= 3, others
    assert content(tmp_path) == before
