"""Documents packed into one row train as they would one by one: no attention, position or label crosses a bound.

Spans: models/gpt.py, models/inputs.py and attention below: packed rows through a whole model.
"""

from dataclasses import replace

import pytest
import torch

from tests.common import assert_close, make_tp
from tests.models.common import GPT_CONFIG, default_dtype, scramble, whole, whole_logits
from tests.models.families.test_llama_like import config_of, fused
from tpfuse.models import GPT
from tpfuse.models.gpt import _shifted
from tpfuse.models.rotary import packed_positions

F64 = torch.float64
NO_DROPOUT = dict(dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0)
CONFIGS = {
    "gpt2": replace(GPT_CONFIG, **NO_DROPOUT),
    "llama": replace(config_of("llama", 2), attention_dropout=0.0),
    "mistral": replace(config_of("mistral", 2), attention_dropout=0.0),
    "qwen2": replace(config_of("qwen2", 4), attention_dropout=0.0),
    "qwen3": replace(config_of("qwen3", 2), attention_dropout=0.0),
    "gpt_neox": replace(config_of("gpt_neox", 8), attention_dropout=0.0),
}
LENGTHS = (5, 1, 9, 3)  # one of a single token; 18 and three tokens of padding, which 2 and 4 ranks do not share evenly
IDS = torch.randint(1, 97, (1, 21), generator=torch.Generator().manual_seed(3))
BOUNDS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)


def make(world, config, sp):
    with default_dtype(F64):
        model = GPT(config, tp=None if world is None else make_tp(world, sp))
    scramble(model)
    return model.train()


def packed(world, config, sp, **options):
    model = make(world, config, sp)
    out = model(IDS, labels=IDS, cu_seqlens=BOUNDS, max_seqlen=9, return_logits=True, **options)
    out.loss.backward()
    found = dict(loss=out.loss.detach(), logits=whole_logits(out.logits, 97, model.tp)[:, : BOUNDS[-1]])
    return fused(found | {f"d {k}": g for k, g in whole(model, grad=True).items()})


def one_by_one(config):
    model = make(None, config, False)
    count = sum(LENGTHS) - len(LENGTHS)  # labels
    logits, total = [], 0
    for a, b in zip(BOUNDS, BOUNDS[1:]):
        ids = IDS[:, a:b]
        out = model(ids, labels=ids, loss_normalizer=count, return_logits=True)
        out.loss.backward()
        logits.append(out.logits.detach())
        total += out.loss.detach()
    return dict(loss=total, logits=torch.cat(logits, 1)) | {f"d {k}": g for k, g in whole(model, grad=True).items()}


@pytest.mark.parametrize("R, sp", [(1, False), (2, True), (4, True), (4, False)])
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "gpt_neox" else n for n in CONFIGS])
def test_packed_is_one_by_one(ranks, reached, name, R, sp):
    exact = one_by_one(CONFIGS[name])
    for got in ranks(R, packed, CONFIGS[name], sp):
        reached(CONFIGS[name], R, {"packed documents": max(assert_close(got, exact, F64).values())})


def test_a_crossing_would_show():
    exact = one_by_one(CONFIGS["gpt2"])
    model = make(None, CONFIGS["gpt2"], False)
    ids = IDS[:, : BOUNDS[-1]]
    assert abs(model(ids, labels=ids).loss - exact["loss"]) > 1e-3
    positions = torch.arange(21)[None]
    assert not torch.allclose(packed(None, CONFIGS["gpt2"], False, position_ids=positions)["loss"], exact["loss"])


def test_positions_begin_again():
    assert packed_positions(BOUNDS, 21).tolist() == [0, 1, 2, 3, 4, 0, *range(9), 0, 1, 2, 0, 0, 0]


@pytest.mark.parametrize("documents", [1, 3, 40])
def test_labels_are_the_next_tokens_of_the_same_document(documents):
    """Documents may be empty, also the first; some rows end before the padding does."""
    for seq in (1, 30, 64):
        lengths = torch.randint(0, 3, (documents,))
        bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).clamp(max=seq).int()
        labels = torch.arange(100, 100 + seq)[None]
        want = [-100] * seq
        for a, b in zip(bounds.tolist(), bounds[1:].tolist()):
            for i in range(a, b - 1):
                want[i] = 100 + i + 1
        assert _shifted(labels, bounds)[0].tolist() == want


def test_many_documents_are_longer_than_the_model():
    """The positions of a model limit the longest document, not the row, nor its padding."""
    model, config = make(None, CONFIGS["gpt2"], False), CONFIGS["gpt2"]
    ids = IDS[:, : BOUNDS[-1]].repeat(1, 5)
    bounds = torch.tensor([0, *LENGTHS * 5]).cumsum(0, dtype=torch.int32)
    padded = torch.nn.functional.pad(ids, (0, 40))
    assert ids.shape[1] > 2 * config.max_positions
    loss = model(padded, labels=padded, cu_seqlens=bounds).loss
    torch.testing.assert_close(loss, one_by_one(config)["loss"], rtol=1e-10, atol=0)
    with pytest.raises(ValueError, match="GPT: 33 positions are more than the model's max_positions=32"):
        model(ids, labels=ids, cu_seqlens=torch.tensor([0, 33], dtype=torch.int32))


def test_padding_adds_nothing():
    """What stands beyond the last bound does not matter."""
    other = IDS.clone()
    other[:, BOUNDS[-1] :] = 96
    model = make(None, CONFIGS["llama"], False)
    losses = [model(ids, labels=ids, cu_seqlens=BOUNDS).loss for ids in (IDS, other)]
    assert torch.equal(*losses)


@pytest.mark.parametrize(
    "bounds, longest, message",
    [
        (torch.tensor([0, 21]), None, r"cu_seqlens must be int32 \[N \+ 1\]"),
        (torch.tensor([1, 21], dtype=torch.int32), None, "must rise from 0 to at most 21"),
        (torch.tensor([0, 9, 5, 21], dtype=torch.int32), None, "must rise from 0 to at most 21"),
        (torch.tensor([0, 22], dtype=torch.int32), None, "must rise from 0 to at most 21"),
        (BOUNDS, 8, "max_seqlen=8, and the longest document has 9 tokens"),
    ],
)
def test_errors(bounds, longest, message):
    with pytest.raises(ValueError, match=message):
        make(None, CONFIGS["gpt2"], False)(IDS, labels=IDS, cu_seqlens=bounds, max_seqlen=longest)
