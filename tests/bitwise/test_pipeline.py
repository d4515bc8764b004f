"""The same bits over pipeline stages: losses, gradients, norms and weights, against one process's micro-batches.

Spans: tpfuse/pipeline/trees.py, tpfuse/pipeline/step.py, tpfuse/training/foreign/norm.py.
"""

import dataclasses

import pytest
import torch

from tests.bitwise.training import KINDS, Result, differences
from tests.pipeline.common import check_said, said
from tpfuse import MainGrad, TensorParallel, clip_grad_norm_, data_parallel, models
from tpfuse.kernels.runtime.leaves import TreeSum, tree
from tpfuse.layers.shards import named_specs
from tpfuse.models import GPT, Bert, BertConfig
from tpfuse.pipeline import schedule, trees

K, SAMPLES, SEQ, STEPS = 4, 3, 13, 2  # micro-batches of all replicas
TOTAL = K * SAMPLES * (SEQ - 1)  # labels of a step


def made(kind, tp, **options):
    """A model of four layers; with "untied" behind the kind's name a head of its own, with "tied" the other way."""
    kind, _, head = kind.partition(", ")
    config = dataclasses.replace(KINDS[kind], num_layers=4)
    config = dataclasses.replace(config, tie_embeddings=head == "tied") if head else config
    if isinstance(config, BertConfig):
        return Bert(config, masked_lm=True, tp=tp, seed=3, **options)
    return GPT(config, tp=tp, seed=3, **options)


def batches(vocab):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(vocab, (K, SAMPLES, SEQ), generator=generator) for _ in range(STEPS)]


def run(model, step_of):
    """Steps of AdamW; ``step_of(ids, step)`` makes the gradients and returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms, tensors = [], [], {}
    for step, ids in enumerate(batches(model.config.vocab_size)):
        optimizer.zero_grad()
        losses.append(step_of(ids, step))
        tensors |= {f"gradient {name}": p.grad.clone() for name, p in model.named_parameters()}
        norms.append(clip_grad_norm_(model, 0.5))
        optimizer.step()
    tensors |= {f"weight {name}": p.detach() for name, p in model.named_parameters()}
    slices = {name: spec.local(tp) for name, _, spec, tp in named_specs(model)}
    return Result(losses, norms, tensors, {name: slices[name.split(" ", 1)[1]] for name in tensors})


def one_process(world, kind, dtype):
    torch.set_num_threads(1)
    model = made(kind, TensorParallel(bitwise=8)).to(dtype).train()
    replica = data_parallel(model, None, bitwise_micro_batches=K)

    def step_of(ids, step):
        replica.zero_grad()
        losses = []
        for i, micro in enumerate(ids):
            options = dict(step=step, first_sample=i * SAMPLES, loss_normalizer=labels_of(model) / K)
            loss = replica(micro, labels=micro, **options).loss
            loss.backward()
            losses.append(loss.detach())
        return tree(losses) / K

    return run(model, step_of)


def labels_of(model):
    return float(TOTAL if isinstance(model, GPT) else K * SAMPLES * SEQ)


def over_stages(world, kind, dtype, layout, name):
    torch.set_num_threads(1)
    mesh = world.stages(*layout)
    dp, place = mesh["dp"], (mesh["pp"].get_local_rank(), mesh["pp"].size(), name)
    tp = TensorParallel(mesh["tp"], sequence_parallel=layout[2] > 1, bitwise=8)
    model = made(kind, tp, dp=dp, stage=place).to(dtype).train()
    pipeline = schedule(model, mesh["pp"], name, K // dp.size(), bitwise=True)
    rows = slice(dp.get_local_rank() * K // dp.size(), (dp.get_local_rank() + 1) * K // dp.size())

    def step_of(ids, step):
        mine = ids[rows].flatten(0, 1)
        return pipeline.step(mine, labels=mine, step=step)

    result = run(model, step_of)
    assert trees.micro_batches_of(model) == K
    return result


def compare(one, result):
    """What differs of a rank, which has some of the parameters."""
    mine = {name: tensor for name, tensor in one.tensors.items() if name in result.tensors}
    return differences(one._replace(tensors=mine), result)


def check(ranks, kind, dtype, layout, name):
    (one,) = ranks(1, one_process, kind, dtype)
    pp, dp, tp = layout
    names = set()
    for result in ranks(pp * dp * tp, over_stages, kind, dtype, layout, name):
        assert compare(one, result) == {}
        names |= set(result.tensors)
    assert names == set(one.tensors)


EVERYDAY = [("gpt2 odd", torch.float32, (2, 1, 2), "1f1b")]
SLOW = [
    ("gpt2 odd", dtype, layout, name)
    for dtype, layout, name in (
        (torch.float32, (1, 1, 1), "gpipe"), (torch.bfloat16, (2, 1, 1), "gpipe"),
        (torch.float32, (4, 1, 1), "1f1b"), (torch.bfloat16, (2, 1, 1), "zero-bubble"),
        (torch.float32, (2, 1, 2), "zbv"), (torch.bfloat16, (2, 2, 1), "zbv"),
        (torch.float32, (2, 2, 1), "interleaved"), (torch.bfloat16, (2, 2, 2), "1f1b"),
    )
]  # fmt: skip
SLOW += [("llama", torch.float32, (4, 1, 1), "gpipe"), ("llama, tied", torch.bfloat16, (2, 1, 2), "zero-bubble")]
SLOW += [("qwen3 odd, untied", torch.float32, (2, 1, 2), "zbv"), ("qwen3 odd", torch.bfloat16, (4, 1, 1), "1f1b")]
SLOW += [("neox odd", torch.bfloat16, (2, 1, 2), "1f1b"), ("gemma odd", torch.bfloat16, (2, 1, 2), "zbv")]
SLOW += [("bert odd", torch.float32, (2, 1, 2), "zero-bubble")]
CASES = [pytest.param(*case, id="-".join(map(str, case))) for case in EVERYDAY]
CASES += [pytest.param(*case, id="-".join(map(str, case)), marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize("kind, dtype, layout, name", CASES)
def test_every_layout(kind, dtype, layout, name, ranks):
    check(ranks, kind, dtype, layout, name)


# ---- each cure taken away ----


def in_order(self, leaf, index=None):
    self.count += 1
    self._nodes[0, 0] = self._nodes[0, 0].add_(leaf) if self._nodes else leaf


def without_a_tree(world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeSum, "add", in_order)
        return over_stages(world, "gpt2", torch.float32, (2, 1, 1), "1f1b")


def with_uses_together(world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models.model, "apart", lambda model, weight: weight)
        return one_process(world, "gpt2", torch.float32)


@pytest.mark.slow
def test_gradients_are_a_tree_in_stages_too(ranks):
    (one,) = ranks(1, one_process, "gpt2", torch.float32)
    assert all(len(compare(one, result)) > 10 for result in ranks(2, without_a_tree))


@pytest.mark.slow
def test_both_uses_of_a_tied_weight_are_added_up_apart(ranks):
    (together,), (one,) = ranks(1, with_uses_together), ranks(1, one_process, "gpt2", torch.float32)
    assert {name for name in compare(together, one) if "gradient" in name} > {"gradient embedding.weight"}


# ---- what is refused, and what stays usable ----


def refusals(world):
    mesh = world.stages(2, 1, 1)["pp"]
    staged = lambda name="1f1b": made("gpt2", TensorParallel(bitwise=8), stage=(mesh.get_local_rank(), 2, name)).train()
    summed = staged()
    MainGrad(summed)
    model = staged()
    pipeline = schedule(model, mesh, "1f1b", K, bitwise=True)
    ids = torch.arange(K * SEQ).view(K, SEQ)
    tries = {
        "chimera": lambda: schedule(staged("chimera"), mesh, "chimera", K, bitwise=True),
        "three": lambda: schedule(staged(), mesh, "1f1b", 3, bitwise=True),
        "ranks": lambda: schedule(staged(), mesh, "1f1b", K, bitwise=mesh.get_local_rank() == 0),
        "main": lambda: schedule(summed, mesh, "1f1b", K, bitwise=True),
        "later": lambda: (MainGrad(model), pipeline.step(ids, labels=ids, step=0)),
    }
    return {key: said(attempt) for key, attempt in tries.items()}


WORDS = {
    "chimera": "is not built for two copies of a stage, each with a part of the micro-batches; use another schedule",
    "three": "micro_batches times replicas must be a power of two, got 3",
    "ranks": "bitwise must be the same on every pipeline rank",
    "main": "leave off FSDP2, whose order is that of its rings, and MainGrad",
    "later": "MainGrad adds micro-batches one after another, bitwise a tree of them",
}


def test_what_is_refused_says_why_on_every_rank(ranks):
    check_said(ranks(2, refusals), WORDS)


def steps_added(world):
    mesh = world.stages(2, 1, 1)["pp"]
    model = made("gpt2", TensorParallel(bitwise=8), stage=(mesh.get_local_rank(), 2, "1f1b")).train()
    pipeline = schedule(model, mesh, "1f1b", K, bitwise=True)
    ids = torch.arange(K * SEQ).view(K, SEQ)
    pipeline.step(ids, labels=ids, step=0)
    once = [p.grad.clone() for p in model.parameters()]
    model.unused = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="unused took no part in the loss of a micro-batch"):
        pipeline.step(ids, labels=ids, step=0)
    del model.unused
    assert all(map(torch.equal, once, (p.grad for p in model.parameters())))
    pipeline.step(ids, labels=ids, step=0)
    return all(torch.equal(2 * g, p.grad) for g, p in zip(once, model.parameters(), strict=True))


def test_a_step_adds_to_what_is_there_and_one_that_failed_leaves_it(ranks):
    assert ranks(2, steps_added) == [True, True]


def of_one_model(world):
    """The tied weight's gradient by each of three pipelines of one model, the second one not ``bitwise``."""
    mesh = world.stages(1, 1, 1)["pp"]
    model = made("gpt2", TensorParallel(bitwise=8), stage=(0, 1, "1f1b")).train()
    pipelines = [schedule(model, mesh, "1f1b", K, bitwise=bitwise) for bitwise in (True, False, True)]
    ids, gradients = torch.arange(K * SEQ).view(K, SEQ), []
    for pipeline in pipelines:
        model.zero_grad()
        pipeline.step(ids, labels=ids, step=0)
        gradients.append(model.embedding.weight.grad)
    return gradients


def test_pipelines_of_one_model_take_no_gradient_of_each_others_heads(ranks):
    ((first, summed, last),) = ranks(1, of_one_model)
    assert torch.equal(first, last)
    torch.testing.assert_close(summed, first)


def trained_later(world):
    """The differences of gradients from those of a model whose blocks were trainable when the pipeline was made."""
    mesh, gradients = world.stages(1, 1, 1)["pp"], []
    ids = torch.arange(K * SEQ).view(K, SEQ)
    for later in (False, True):
        model = made("gpt2", TensorParallel(bitwise=8), stage=(0, 1, "1f1b")).train()
        model.blocks.requires_grad_(not later)
        pipeline = schedule(model, mesh, "1f1b", K, bitwise=True)
        model.blocks.requires_grad_(True)
        model.positions.requires_grad_(False)
        pipeline.step(ids, labels=ids, step=0)
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return [gradients[0].keys() ^ gradients[1].keys(), *map(torch.equal, *(g.values() for g in gradients))]


def test_a_step_takes_the_parameters_that_are_trained_then(ranks):
    ((names, *same),) = ranks(1, trained_later)
    assert names == set() and all(same) and len(same) > 40
