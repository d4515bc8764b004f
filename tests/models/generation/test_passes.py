"""Prompts that are read in pieces: the logits of reading them at once, padded ones, windows, and what is told of it."""

from dataclasses import replace

import pytest
import torch

from tests.common import make_tp
from tests.models.common import GPT_CONFIG, default_dtype
from tests.models.generation.test_direct import CONFIGS, ROPE
from tests.models.generation.test_generate import prompts
from tests.models.generation.test_graph import begun
from tpfuse.models import GPT
from tpfuse.models.generation import passes

STRETCHED = ROPE | dict(rope_type="dynamic", factor=2.0, max_position_embeddings=8)


def read(world, name, own, piece):
    """The logits of prompts and of the tokens that follow, on a CPU's own path or the model's."""
    with default_dtype(torch.float64):
        model = GPT(replace(CONFIGS[name], init_std=0.3), tp=make_tp(world)).eval()
    found = []
    for rows in (1 << 20, piece):
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(passes, "PIECE", rows)
            if not own:
                patch.setattr(passes, "applies", lambda model, ids: False)
            _, step = begun(model, *prompts((8, 5, 1)))
            assert step.forward.pieces == (1 if rows > 24 else -(-24 // rows)) and step.forward.direct == own
            logits = [step.prompt_logits]
            for _ in range(4):
                step.take(logits[-1])
                logits.append(step.logits())
        found.append(torch.stack(logits))
    return found


CASES = [("gpt2", 9), ("llama", 5), ("windows", 6), ("norms on heads, wide heads", 3)]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name, piece", CASES)
@pytest.mark.parametrize("R", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_pieces_give_what_the_whole_gives(ranks, R, name, piece, own):
    for whole, pieces in ranks(R, read, name, own, piece):
        torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-12 * float(whole.abs().max()))


def told(world):
    """On the last rank alone."""
    heard, last = [], world.rank == world.size - 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "PIECE", 6)
        ids, mask = prompts((8, 5))
        on_prompt = (lambda *columns: heard.append(columns)) if last else None
        GPT(GPT_CONFIG, tp=make_tp(world)).generate(ids, attention_mask=mask, max_new_tokens=2, on_prompt=on_prompt)
    return heard


@pytest.mark.parametrize("R", [1, 2])
def test_every_piece_is_told(ranks, R):
    assert ranks(R, told)[-1] == [(3, 8), (6, 8), (8, 8)]


def test_positions_that_stretch_are_read_at_once(monkeypatch):
    monkeypatch.setattr(passes, "PIECE", 1)
    ids = torch.ones(1, 12, dtype=torch.int64)
    stretched = GPT(replace(CONFIGS["llama"], rope=STRETCHED))
    for model, short, long in ((GPT(CONFIGS["llama"]), 6, 12), (stretched, 6, 1)):
        assert passes.pieces_of(model, begun(model, ids[:, :6], new=2)[0]) == short  # 8 columns in all, as trained
        assert passes.pieces_of(model, begun(model, ids, new=2)[0]) == long
