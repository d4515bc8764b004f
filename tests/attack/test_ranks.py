"""Random scripts of calls in which one rank, at one call, does otherwise: every rank gets the same ValueError there.

A call is a training step, an evaluation, a generation; what a rank does otherwise is drawn from ALTERED, MODES and
STATE, or it is in another function.  Nothing may be silently wrong, hang, abort, or end in an error of another kind;
afterwards the model goes on as if the refused call had not been.

Spans: tpfuse/ranks and the calls of tpfuse/models that compare what ranks do.
"""

import contextlib
import random
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.common import assert_equal, changed, make_tp
from tests.models.common import GPT_CONFIG, batch
from tests.ranks.test_calls import CALLS
from tpfuse import TensorParallel, WholeMatrices
from tpfuse.models import GPT

PROMPT = torch.arange(12).view(2, 6)


def other(x):
    """One element of an integer tensor is another one."""
    x = x.clone()
    x.view(-1)[len(x.view(-1)) // 2] = (x.view(-1)[len(x.view(-1)) // 2] + 1) % 50
    return x


ALTERED = {  # name: (for which calls, what the arguments become)
    "an id": ("all", lambda c: c | dict(input_ids=other(c["input_ids"]))),
    "a label": ("train", lambda c: c | dict(labels=other(c["labels"]))),
    "no labels": ("train", lambda c: {k: v for k, v in c.items() if k != "labels"}),
    "a mask": ("all", lambda c: c | dict(attention_mask=other(torch.ones_like(c["input_ids"])) % 2)),
    "one sequence fewer": ("all", lambda c: {k: v[1:] if torch.is_tensor(v) else v for k, v in c.items()}),
    "one token fewer": ("all", lambda c: {k: v[:, 1:] if torch.is_tensor(v) else v for k, v in c.items()}),
    "32 bits": ("all", lambda c: c | dict(input_ids=c["input_ids"].int())),
    "a step": ("train", lambda c: c | dict(step=5)),
    "a sample": ("train", lambda c: c | dict(first_sample=1)),
    "a normalizer": ("train", lambda c: c | dict(loss_normalizer=7.5)),
    "a keyword's type": ("train", lambda c: c | dict(step=torch.tensor(0))),
    "a seed": ("generate", lambda c: c | dict(seed=1)),
    "a length": ("generate", lambda c: c | dict(max_new_tokens=2)),
    "a temperature": ("generate", lambda c: c | dict(temperature=0.5)),
    "greedy": ("generate", lambda c: c | dict(do_sample=False)),
    "an end": ("generate", lambda c: c | dict(eos_token_id=3)),
}
MODES = "mode", "grad mode", "autocast"


STATE = {  # name: what is no argument and decides a call
    "the model's seed": lambda m: changed(m, "seed", 77),
    "the model's step": lambda m: changed(m, "step", m.step + 1),
    "a part's mode": lambda m: changed(m.blocks[1].mlp, "training", not m.training),
    "a part's dropout": lambda m: changed(m.blocks[0].attention, "dropout", 0.75),
    "a frozen weight": lambda m: changed(m.input_norm.weight, "requires_grad", False),
}
ELSEWHERE = {name: function for name, function in CALLS.items() if name not in ("forward", "generate", "collective")}


def call(model, kind, arguments, mode=""):
    """One call, its backward included -> what came of it."""
    if mode == "mode":
        model.train(not model.training)
    with contextlib.ExitStack() as stack:
        if mode == "grad mode":
            stack.enter_context(torch.set_grad_enabled(not torch.is_grad_enabled()))
        if mode == "autocast":
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        try:
            if kind == "generate":
                return model.generate(**arguments)
            out = model(**arguments)
        finally:
            if mode == "mode":
                model.train(not model.training)
    if kind == "train" and out.loss is not None and out.loss.requires_grad:
        model.zero_grad()
        out.loss.backward()
        return torch.stack([out.loss.detach(), *(p.grad.norm() for p in model.parameters())])
    return out.logits if out.loss is None else out.loss.detach()


def script(seed):
    """The calls, at which of them rank 1 does otherwise, and how."""
    draw = random.Random(seed)
    calls = []
    for _ in range(draw.randint(1, 4)):
        kind = draw.choice(["train", "eval", "generate"])
        rows = draw.randint(2, 3)
        arguments = batch(GPT_CONFIG, rows, draw.choice([5, 8]))
        if kind == "generate":
            arguments = dict(input_ids=PROMPT, max_new_tokens=3, do_sample=True)
        elif kind == "eval":
            arguments = dict(input_ids=arguments["input_ids"])
        calls.append((kind, arguments))
    at = draw.randrange(len(calls))
    possible = [name for name, (kinds, _) in ALTERED.items() if kinds in ("all", calls[at][0])]
    possible += MODES if calls[at][0] != "generate" else []
    how = draw.choice([draw.choice(possible), draw.choice(list(STATE)), draw.choice(list(ELSEWHERE))])
    return calls, at, how, draw.random() < 0.5


def otherwise(model, how, kind, arguments, folder):
    """The call as rank 1 makes it."""
    if how in ELSEWHERE:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        calls_on = SimpleNamespace(model=model, tp=model.tp, optimizer=optimizer, folder=folder)
        calls_on.matrices = WholeMatrices(model.blocks)
        return ELSEWHERE[how][0](calls_on)
    with STATE[how](model) if how in STATE else contextlib.nullcontext():
        altered = ALTERED[how][1](arguments) if how in ALTERED else arguments
        return call(model, kind, altered, how if how in MODES else "")


def play(world, folder, seeds):
    """-> for each script its refusal, or what else happened; the results of all calls but the refused one."""
    found = []
    for seed in seeds:
        calls, at, how, sp = script(seed)
        model, results = GPT(GPT_CONFIG, tp=make_tp(world, sp), seed=seed), []
        said = "silent"
        for i, (kind, arguments) in enumerate(calls):
            if i == at:
                try:
                    if world.rank == 1:
                        otherwise(model, how, kind, arguments, folder)
                    else:
                        call(model, kind, arguments)
                except ValueError as error:
                    said = re.sub("^(save|load)_checkpoint: ", "", str(error))
            results.append(call(model, kind, arguments))
        dist.barrier()
        found.append((said, results))
    return found


def undisturbed(world, seeds):
    found = []
    for seed in seeds:
        calls, _, _, sp = script(seed)
        model = GPT(GPT_CONFIG, tp=TensorParallel(world.group, sequence_parallel=sp), seed=seed)
        found.append([call(model, kind, arguments) for kind, arguments in calls])
    return found


REFUSED = "must be the same on every tensor-parallel rank", "the ranks are in different calls"


def attack(ranks, folder, seeds):
    """Tries the scripts -> those that were not clean, with what happened."""
    every, whole = ranks(2, play, folder, seeds), ranks(2, undisturbed, seeds)
    bad = []
    for i, seed in enumerate(seeds):
        said = [found[i][0] for found in every]
        if len(set(said)) != 1 or not any(words in said[0] for words in REFUSED):
            bad.append((seed, script(seed)[2], said))
        for found, results in zip(every, whole, strict=True):
            assert_equal(dict(enumerate(found[i][1])), dict(enumerate(results[i])))
    return bad


def test_whatever_one_rank_does_otherwise_all_say_so(ranks, tmp_path):
    assert attack(ranks, tmp_path, range(4)) == []


@pytest.mark.slow
def test_many_scripts(ranks, tmp_path):
    assert attack(ranks, tmp_path, range(1000, 1040)) == []


def test_every_way_is_drawn():
    assert {script(seed)[2] for seed in range(400)} == {*ALTERED, *MODES, *STATE, *ELSEWHERE}
