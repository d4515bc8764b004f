"""Adapters of pipeline stages: PEFT's files hold those of all stages, and a stage loads its own.

Spans: tpfuse/interop/adapter.py over the stages of tpfuse/models/stages.py: apart from test_adapter.py, which has no
stages.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.common import assert_equal
from tests.models.common import default_dtype
from tests.pipeline.common import MODELS, ROWS, made
from tpfuse import TensorParallel, add_lora, load_adapter, save_adapter
from tpfuse.layers.shards import named_specs
from tpfuse.pipeline import schedule

ALL, SOME = ["qkv", "out", "fc1", "fc2"], ["h.0.attn.c_attn", "h.3.mlp.c_proj"]


def staged(world, layout, name, kind):
    mesh = world.stages(*layout)
    pp = mesh["pp"]
    options = {} if name is None else dict(stage=(pp.get_local_rank(), pp.size(), name))
    with default_dtype(torch.float64):
        model = made(MODELS[kind], tp=TensorParallel(mesh["tp"]), **options)
    if name is not None:
        schedule(model, pp, name, ROWS)
    return model


@torch.no_grad()
def fill(model):
    """Adapters of which no element is zero, the same at any layout."""
    for name, p, spec, tp in named_specs(model):
        if ".lora." in name:
            g = torch.Generator().manual_seed(sum(map(ord, name)))
            p.copy_(torch.randn(spec.shape, generator=g, dtype=p.dtype)[spec.local(tp)])


def save(world, layout, name, kind, path, targets):
    model = staged(world, layout, name, kind)
    mine = targets if targets == ALL or name is None else [t for t in targets if _held(model, t)]
    if mine:
        add_lora(model, rank=2, alpha=3, targets=mine)
    fill(model)
    save_adapter(model, path)


def _held(model, target):
    return model.blocks._modules[target.split(".")[1]] is not None


def there_and_back(world, layout, name, kind, source, target):
    model = load_adapter(staged(world, layout, name, kind), source, trainable=True)
    assert all(p.requires_grad == (".lora." in key) for key, p in model.named_parameters())
    save_adapter(model, target)


@pytest.mark.parametrize(
    "layout, name, kind, targets",
    [
        ((2, 1, 2), "zbv", "llama", ALL),
        ((2, 1, 2), "1f1b", "mixtral", ALL),
        ((2, 1, 1), "1f1b", "gpt2", SOME[:1]),  # the second stage has none
        pytest.param((2, 1, 1), "interleaved", "gpt2", SOME, marks=pytest.mark.slow),
        pytest.param((4, 1, 1), "chimera", "bert", ALL, marks=pytest.mark.slow),
        pytest.param((2, 1, 2), "chimera", "gpt2", ALL, marks=pytest.mark.slow),
    ],
)
def test_what_stages_save_is_what_one_process_saves(ranks, tmp_path, layout, name, kind, targets):
    one, stages, back = (tmp_path / key for key in ("one", "stages", "back"))
    size = layout[0] * layout[1] * layout[2]
    ranks(1, save, (1, 1, 1), None, kind, str(one), targets)
    if name != "interleaved" or targets != SOME:  # a stage holds parts of the model that targets cannot tell apart
        ranks(size, save, layout, name, kind, str(stages), targets)
        check_same(stages, one)
    ranks(size, there_and_back, layout, name, kind, str(one), str(back))
    check_same(back, one)


def check_same(path, expected):
    tensors = [load_file(p / "adapter_model.safetensors") for p in (path, expected)]
    assert_equal(*tensors)
    assert any(x.abs().max() > 0 for x in tensors[0].values())
    configs = [json.loads((p / "adapter_config.json").read_text()) for p in (path, expected)]
    assert configs[0] == configs[1]


def refused(world, path):
    model, found = staged(world, (2, 1, 1), "1f1b", "gpt2"), []
    before = [p.requires_grad for p in model.parameters()]
    for attempt in (lambda: save_adapter(model, path + "-new"), lambda: load_adapter(model, path)):
        with pytest.raises(ValueError) as caught:
            attempt()
        found.append(str(caught.value))
    torch.distributed.barrier()
    assert [p.requires_grad for p in model.parameters()] == before
    return found


def test_what_does_not_fit_is_said_on_every_rank(ranks, tmp_path):
    ranks(1, save, (1, 1, 1), None, "llama", str(tmp_path), ALL)
    first, second = ranks(2, refused, str(tmp_path))
    assert first == second
    assert "the model has no adapters" in first[0] and "no layer is called" in first[1]
