"""What is written by leaves is whole: files, checkpoints, tokens, reports; a vocabulary whose slices are not torch's.

Spans: tpfuse/parallel.py, whose slices of whole leaves all of these read.
"""

import dataclasses
import warnings

import pytest
import torch

import tpfuse
from tests.bitwise.training import KINDS, differences, train
from tpfuse import TensorParallel
from tpfuse.layers import CrossAttention, ParallelAttention
from tpfuse.models import GPT

ODD = KINDS["gpt2 odd"]  # 227 tokens: leaves of 29, the last of 24
COPIED = dataclasses.replace(KINDS["olmo2 odd"], dropout=0.0, embedding_dropout=0.0)  # kv heads that leaves share


def _model(world, config=ODD, sequence_parallel=True):
    torch.set_num_threads(1)
    return GPT(config, tp=TensorParallel(world.group, sequence_parallel=sequence_parallel, bitwise=8), seed=3)


def _saved(world, folder, config):
    _model(world, config).save_pretrained(folder)


def _read(world, folder, config):
    model = GPT.from_pretrained(folder, tp=TensorParallel(world.group, bitwise=8))
    return [torch.equal(a, b) for a, b in zip(model.parameters(), _model(world, config).parameters(), strict=True)]


@pytest.mark.parametrize("config", [ODD, COPIED], ids=["odd", "copied kv heads"])
def test_pretrained_files_are_whole(config, ranks, tmp_path):
    ranks(4, _saved, tmp_path / "four", config)
    ranks(1, _saved, tmp_path / "one", config)
    one, four = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "four"))
    assert one == four
    for size in 1, 2, 4:
        assert all(map(all, ranks(size, _read, tmp_path / "four", config)))


def _state(world):
    with pytest.raises(ValueError, match=r"\(227, 112\) over 2 ranks with bitwise=8 is in slices of whole leaves"):
        _model(world).state_dict()
    tp = TensorParallel(world.group, bitwise=8)
    even = GPT(KINDS["gpt2"], tp=tp, seed=3)
    state = even.state_dict()
    return torch.equal(state["embedding.weight"].full_tensor(), GPT(KINDS["gpt2"], seed=3).embedding.weight)


def test_a_state_dictionary_is_right_or_refused(ranks):
    assert ranks(2, _state) == [True, True]


def _tokens(world):
    model = _model(world, sequence_parallel=False)
    return model.generate(torch.arange(6).view(2, 3), max_new_tokens=6, return_log_probs=True)


def test_generated_tokens(ranks):
    """And their log-probabilities."""
    (one,) = ranks(1, _tokens)
    assert all(all(map(torch.equal, one, other)) for size in (2, 4) for other in ranks(size, _tokens))


def _norms(world, config):
    model = _model(world, config)
    ids = torch.arange(26).view(2, 13)
    model(ids, labels=ids, step=0).loss.backward()
    return tpfuse.clip_grad_norm_(model, 0.5), tpfuse.clip_grad_norm_(model, torch.inf)


@pytest.mark.parametrize("config", [ODD, COPIED], ids=["odd", "copied kv heads"])
def test_the_norm_is_the_norm(config, ranks):
    """Of one process's gradients by torch; and what is clipped has the norm that it was clipped to."""
    model = GPT(config, seed=3)
    ids = torch.arange(26).view(2, 13)
    model(ids, labels=ids, step=0).loss.backward()
    right = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm()
    for size in 1, 2, 4:
        for before, after in ranks(size, _norms, config):
            torch.testing.assert_close(before.double(), right, rtol=1e-5, atol=0)
            torch.testing.assert_close(after.item(), 0.5, rtol=1e-5, atol=0)


def _paths(world):
    return {path.op: path.path for path in tpfuse.explain(_model(world))}


def test_explain_says_leaves(ranks):
    (paths, _) = ranks(2, _paths)
    assert paths.pop("embedding") == "plain" and set(paths.values()) == {"leaves"}


# ---- a checkpoint resumed at another split ----


def _until(world, folder, sequence_parallel, kind):
    torch.set_num_threads(1)
    train(world, kind, dtype=torch.float32, sequence_parallel=sequence_parallel, steps=1, save=folder)


def _resumed(world, folder, sequence_parallel, kind):
    torch.set_num_threads(1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        options = dict(dtype=torch.float32, sequence_parallel=sequence_parallel, steps=3)
        result = train(world, kind, **options, load=folder)
    return result, [str(w.message) for w in said if "bit for bit" in str(w.message)]


def _never_stopped(world, kind):
    torch.set_num_threads(1)
    return train(world, kind, dtype=torch.float32, steps=3)


@pytest.mark.parametrize(
    "saved, resumed, kind", [((4, True), (2, False), "gpt2 odd"), ((1, False), (4, True), "qwen2 odd")], ids=str
)
def test_it_resumes_at_another_split(saved, resumed, kind, ranks, tmp_path):
    """The bits of a run that was never stopped, and nobody is told otherwise."""
    (one,) = ranks(1, _never_stopped, kind)
    ranks(saved[0], _until, tmp_path / "run", saved[1], kind)
    for result, said in ranks(resumed[0], _resumed, tmp_path / "run", resumed[1], kind):
        last = one._replace(losses=one.losses[1:], norms=one.norms[1:])
        assert not differences(last, result) and said == []


def _with_other_leaves(world, folder):
    with pytest.warns(UserWarning, match="training goes on, not bit for bit: .* with bitwise 8, now 4"):
        train(world, "gpt2 odd", dtype=torch.float32, steps=1, bitwise=4, load=folder)


def test_other_leaves_are_told(ranks, tmp_path):
    ranks(2, _until, tmp_path / "run", True, "gpt2 odd")
    ranks(1, _with_other_leaves, tmp_path / "run")


# ---- what is not built ----


def test_what_is_not_built_is_refused():
    tp = TensorParallel(bitwise=8)
    with pytest.raises(ValueError, match="CrossAttention: it is not built for batch_invariant"):
        CrossAttention(64, 8, tp=TensorParallel(bitwise=8, batch_invariant=12))
    with pytest.raises(ValueError, match="adapters are not built for batch_invariant"):
        tpfuse.add_lora(GPT(KINDS["gpt2"], tp=TensorParallel(bitwise=8, batch_invariant=12)), rank=2, alpha=4.0)
    with pytest.raises(ValueError, match="num_kv_heads=3 and bitwise=8: one must divide the other; use bitwise 1$"):
        ParallelAttention(96, 24, num_kv_heads=3, tp=tp)
