"""A training step of a whole model, replayed, starts what its launchers start: the same kernels with the same numbers,
and CUDA's driver would take them (bench/idle).

Spans: models/, layers/ and kernels/replay/: whole training steps.
"""

from dataclasses import replace
from unittest import mock

import pytest

pytest.importorskip("triton")
import torch

from tests.models.common import BERT_CONFIG, GPT_CONFIG
from tests.models.families.test_llama_like import config_of
from tpfuse import clip_grad_norm_
from tpfuse.kernels import replay
from tpfuse.models import GPT, Bert

B, S = 3, 24
CONFIGS = {
    "gpt2": GPT_CONFIG,
    "bert": BERT_CONFIG,
    "llama": config_of("llama", 2),
    "gemma2": config_of("gemma2", 2),
    "gpt_neox": config_of("gpt_neox", 8),
}


def padded():
    ids = torch.zeros(B, S, dtype=torch.int64)
    return dict(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids))


def packed():
    ids = torch.zeros(1, B * S, dtype=torch.int64)
    return dict(input_ids=ids, labels=ids, cu_seqlens=torch.arange(0, B * S + 1, S, dtype=torch.int32), max_seqlen=S)


CALLS = {"padded": padded, "packed": packed}
STEPS = [  # each compiles ten kernels and more
    ("gpt2", "padded", "fastest"),
    ("bert", "padded", "smallest"),
    ("llama", "packed", "fastest"),
    ("gemma2", "padded", "smallest"),
    ("gpt_neox", "packed", "smallest"),
]


# ---- in a process whose driver starts nothing ----


def _started(name: str, call: str, saving: str) -> tuple[list[list], list[int]]:
    """What each of four steps starts, the last of which runs every launcher; and how many kernels launchers start."""
    from bench import idle
    from tpfuse.kernels.runtime import launch

    config = replace(CONFIGS[name], dropout=0.1, attention_dropout=0.1)
    model = Bert(config, masked_lm=True, saving=saving) if name == "bert" else GPT(config, saving=saving)
    model.bfloat16()

    start = mock.Mock(side_effect=launch._start)
    launched: list[int] = []

    def step() -> list:
        idle.STARTED = []
        start.reset_mock()
        model(**CALLS[call]()).loss.backward()
        clip_grad_norm_(model, 1.0)
        model.zero_grad()
        launched.append(start.call_count)
        seen = [each for each in idle.STARTED if each.name != "mm"]
        addresses = lambda params: ["address" if p > 1 << 32 else p for p in params]
        return [(each.name, each.function, each.launch, addresses(each.params)) for each in seen]

    with mock.patch.object(launch, "_start", start):
        steps = [step() for _ in range(3)]
        with mock.patch.object(replay, "REPLAY", False):
            steps.append(step())
    return steps, launched


# ---- in this one ----


@pytest.mark.slow
@pytest.mark.parametrize("name, call, saving", STEPS)
def test_a_replayed_step_starts_what_launchers_do(idle, name, call, saving):
    (first, *replayed, last), launched = idle(_started, name, call, saving)
    assert len(last) > 20 and replayed == [first, first] and last == first
    assert 4 * launched[2] <= launched[3] == len(last), "the embeddings' and the loss's alone are not replayed"
