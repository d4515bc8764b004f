"""Generation's own forward pass on a CPU against the model's: every feature, and what is left to the model's."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

import tpfuse
from tests.common import make_tp
from tests.models.common import GPT_CONFIG
from tests.models.families.test_llama_like import config_of
from tpfuse import TensorParallel
from tpfuse.kernels.gemm import prepared
from tpfuse.kernels.gemm.prepared import Dense, Packed, Plain, Transposed
from tpfuse.layers import KVCache
from tpfuse.layers.shards import named_specs
from tpfuse.models import GPT
from tpfuse.models.generation import direct
from tpfuse.models.generation.passes import by_layers

ROPE = dict(rope_type="default", rope_theta=1e4)
LLAMA = replace(GPT_CONFIG, family="llama", norm="rms", gated=True, activation="silu", num_kv_heads=2, rope=ROPE)
CONFIGS = {
    "gpt2": GPT_CONFIG,
    "no biases, untied": replace(GPT_CONFIG, qkv_bias=False, out_bias=False, mlp_bias=False, tie_embeddings=False),
    "llama": LLAMA,
    "norms on heads, wide heads": replace(LLAMA, qk_norm=True, head_width=8, qkv_bias=False),
    "windows": replace(LLAMA, window=5, layer_types=("full_attention", "sliding_attention")),
    "gemma's norm and gate": replace(LLAMA, norm="gemma_rms", activation="gelu_tanh", num_kv_heads=4),
    "side by side, a part of each head": config_of("gpt_neox", 12),
    "longrope": config_of("phi3", 2),
    "relu2": replace(GPT_CONFIG, activation="relu2"),
    "dynamic rope": replace(LLAMA, rope=ROPE | dict(rope_type="dynamic", factor=2.0, max_position_embeddings=8)),
}
GEMMA = replace(LLAMA, norm="gemma_rms", activation="gelu_tanh", branch_norm=True, scaled_embedding=True, window=3)
GEMMA = replace(GEMMA, attention_scalar=3, layer_types=("sliding_attention", "full_attention"))
CONFIGS |= {
    "gemma 2": replace(GEMMA, attention_softcap=1.0, logit_softcap=0.1),
    "gemma 3": replace(GEMMA, qk_norm=True, qk_norm_kind="gemma_rms", local_rope=ROPE | dict(rope_theta=50.0)),
    "olmo 2": replace(LLAMA, pre_norm=False, branch_norm=True, qk_norm=True, qk_norm_all=True, mlp_bias=False),
}
EXPERTS = replace(LLAMA, num_experts=4, experts_per_token=2, qkv_bias=False, out_bias=False, mlp_bias=False)
CONFIGS |= {
    "experts": EXPERTS,
    "experts between norms": replace(EXPERTS, branch_norm=True, activation="gelu_tanh"),
    "a shared expert": replace(EXPERTS, shared_size=12, shared_gate=True, renormalize=False),
}
NEW = 4
PADDED = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7, [0, 0, 0, 0, 0, 0, 1]]).bool()
MASKS = {"padded": PADDED, "whole": torch.ones(2, 7).bool(), "one token": torch.ones(1, 1).bool()}


def perturbed(config, tp, dtype):
    """Biases and norms that are not what they start as."""
    model = GPT(config, tp=tp).to(dtype).eval()
    with torch.no_grad():
        for name, p, spec, _ in named_specs(model):
            if "norm" in name or "bias" in name:  # the same on every rank, where they are not split
                seed = 7 if spec.dim is None else tp.rank
                p += 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return model


def logits_of(forward, ids, mask):
    """Of the prompt's last position and of tokens after it, the same whatever the model says."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = [forward(ids, positions)]
    for i in range(NEW):
        positions = positions[:, -1:] + 1
        found.append(forward(torch.full_like(positions, 3 * i + 1), positions))
    return torch.stack(found)


def both(world, name, dtype, sp, mask, bitwise=None):
    model = perturbed(CONFIGS[name], TensorParallel(world.group, sequence_parallel=sp, bitwise=bitwise), dtype)
    ids = torch.randint(97, mask.shape, generator=torch.Generator().manual_seed(1))
    seen, padded = torch.cat([mask, mask.new_ones(len(mask), NEW)], 1), not bool(mask.all())
    with torch.no_grad():
        assert direct.applies(model, ids)
        ours = direct.Direct(model, seen, padded=padded, prompt=mask.shape[1], new=NEW)
        caches = [KVCache(seen, padded=padded) for _ in model.blocks]
        return logits_of(ours, ids, mask), logits_of(lambda *args: by_layers(model, caches, *args), ids, mask)


LATER = "side by side, a part of each head", "longrope", "gemma 2", "gemma 3", "olmo 2", "experts between norms"
TRIED = [(name, mask) for name in CONFIGS for mask in MASKS]


@pytest.mark.parametrize(
    "name, mask", [pytest.param(*c, marks=[pytest.mark.slow] * (c[0] in LATER and c[1] != "padded")) for c in TRIED]
)
def test_the_logits_are_those_of_the_models_own_pass(ranks, name, mask):
    mask = MASKS[mask]
    for R, sp in ((1, False), (2, True)):
        for got, want in ranks(R, both, name, torch.float64, sp, mask):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12 * float(want.abs().max()))


@pytest.mark.parametrize("name", ["longrope", "gemma 3", "olmo 2"])
def test_by_leaves(ranks, name):
    """To rounding, since rows are as many as they are; to the bit in tests/bitwise/test_generation.py."""
    for got, want in ranks(2, both, name, torch.float64, False, PADDED, 4):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12 * float(want.abs().max()))


@pytest.mark.parametrize("name", ["llama", "olmo 2"])
def test_kv_heads_fewer_than_ranks(ranks, name):
    for got, want in ranks(4, both, name, torch.float64, False, PADDED):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12 * float(want.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [Plain(), Transposed(), Packed(8), Dense()], ids=lambda f: type(f).__name__)
def test_every_form_of_the_weights(ranks, monkeypatch, form, dtype):
    if type(form) in (Packed, Dense) and not prepared._has_onednn(dtype):
        pytest.skip("this machine's oneDNN does not multiply this dtype")
    monkeypatch.setattr(direct, "form_for", lambda dtype, *, rows, times: form)
    limit = 16 * torch.finfo(dtype).eps
    for name in ("gpt2", "llama", "norms on heads, wide heads"):
        got, want = both(World, name, dtype, False, PADDED)
        assert (got - want).double().norm() < limit * want.double().norm()


@pytest.mark.parametrize("form", [Transposed(), Packed(8)], ids=lambda f: type(f).__name__)
def test_copies_of_experts_that_are_often_chosen(monkeypatch, form):
    """From the second product of one on."""
    monkeypatch.setattr(direct, "form_for", lambda dtype, *, rows, times: form)
    monkeypatch.setattr(form, "pays", 2)
    copied, make = [], type(form).mlp
    monkeypatch.setattr(type(form), "mlp", lambda self, *args: copied.append(1) or make(self, *args))
    for mask in (PADDED, MASKS["one token"]):
        got, want = both(World, "experts", torch.float32, False, mask)
        assert (got - want).norm() < 16 * torch.finfo(torch.float32).eps * want.norm()
    assert 0 < len(copied) <= 2 * 2 * EXPERTS.num_experts  # of two layers, and two models


class World:
    """One process without a group."""

    rank, size, group = 0, 1, None


def test_a_long_prompt_is_worked_on_in_pieces():
    mask = torch.ones(2, 150).bool()
    config = replace(LLAMA, max_positions=160)
    model = perturbed(config, tpfuse.TensorParallel(), torch.float64)
    ids = torch.randint(97, mask.shape)
    seen = torch.ones(2, 150 + NEW).bool()
    with torch.no_grad():
        ours = logits_of(direct.Direct(model, seen, padded=False, prompt=150, new=NEW), ids, mask)
        caches = [KVCache(seen) for _ in model.blocks]
        want = logits_of(lambda *args: by_layers(model, caches, *args), ids, mask)
    assert 2 * 150 > direct.BLOCK
    torch.testing.assert_close(ours, want, rtol=0, atol=1e-12 * float(want.abs().max()))


def test_rotary_tables_are_laid_out_for_the_positions_there_are():
    """They are made in every call of generate: a model that takes thousands of positions would wait for them."""
    model = perturbed(replace(LLAMA, max_positions=4096), tpfuse.TensorParallel(), torch.float64)
    mask = torch.ones(2, 7).bool()
    with torch.no_grad():
        forward = direct.Direct(model, torch.ones(2, 7 + NEW).bool(), padded=False, prompt=7, new=NEW)
        logits_of(forward, torch.randint(97, mask.shape), mask)
    assert [len(turning.cos) for turning in forward.turnings] == [7 + NEW]


def prepared_forms(new):
    model = GPT(LLAMA)
    seen = torch.ones(8, 7 + new).bool()  # prompts: of one, a copy pays on some processors alone
    made = direct.Direct(model, seen, padded=False, prompt=7, new=new)
    return type(made.form)


def test_few_tokens_make_no_copy_of_the_weights():
    assert prepared_forms(2) is Plain
    assert prepared_forms(500) is not Plain or not prepared._has_onednn(torch.float32)


def hook(model):
    return model.blocks[0].mlp.register_forward_hook(lambda *args: None)


def doubled(model):
    class Double(torch.nn.Module):
        def forward(self, w):
            return 2 * w

    parametrize.register_parametrization(model.blocks[0].mlp.fc1, "weight", Double(), unsafe=True)


LEFT_TO_THE_MODEL = {
    "a hook": hook,
    "an adapter": lambda model: tpfuse.add_lora(model, rank=2, alpha=4),
    "a parametrization": doubled,
    "two dtypes": lambda model: model.blocks[0].mlp.bfloat16(),
    "another layer": lambda model: model.blocks.__setitem__(0, torch.nn.Identity()),
    "another device": lambda model: model.to("meta"),
}


@pytest.mark.parametrize("what", LEFT_TO_THE_MODEL)
def test_what_it_does_not_know_is_left_to_the_model(what):
    model, ids = GPT(LLAMA), torch.ones(1, 2, dtype=torch.long)
    assert direct.applies(model, ids)
    LEFT_TO_THE_MODEL[what](model)
    assert not direct.applies(model, ids)


def test_autocast_and_onlookers_are_left_to_the_model():
    model, ids, seen = GPT(LLAMA), torch.ones(1, 2, dtype=torch.long), []
    with torch.autocast("cpu", torch.bfloat16):
        assert not direct.applies(model, ids)
    hook = model.blocks[0].register_forward_hook(lambda *args: seen.append(1))
    model.generate(ids, max_new_tokens=3)
    assert len(seen) == 3
    hook.remove()
    with tpfuse.watch(model):
        assert not direct.applies(model, ids)


def test_an_adapter_merged_into_the_weights_is_not_in_the_way():
    model = GPT(LLAMA)
    tpfuse.add_lora(model, rank=2, alpha=4)
    tpfuse.merge_lora(model)
    assert direct.applies(model, torch.ones(1, 2, dtype=torch.long))


def test_the_weights_are_read_anew_by_each_generation():
    """Copies are of one generation alone: training goes on between two, and the tables it shares are as they were."""
    model = GPT(replace(LLAMA, init_std=0.3)).eval()
    ids = torch.randint(97, (2, 5))
    first = model.generate(ids, max_new_tokens=20)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    second = model.generate(ids, max_new_tokens=20)
    assert not torch.equal(first, second)
    hook(model)  # by the model's own pass
    assert torch.equal(model.generate(ids, max_new_tokens=20), second)


class Onlooker(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def looked_at_on_one_rank(world):
    model, ids = GPT(replace(LLAMA, init_std=0.3), tp=make_tp(world)).eval(), torch.ones(2, 3, dtype=torch.long)
    plain = model.generate(ids, max_new_tokens=6)
    with Onlooker() if world.rank == 1 else contextlib.nullcontext():
        return torch.equal(model.generate(ids, max_new_tokens=6), plain)


def test_what_one_rank_leaves_to_the_model_all_do(ranks):
    """A profiler or a counter of flops on rank 0 is no error."""
    assert ranks(2, looked_at_on_one_rank) == [True, True]


def hooked_on_one_rank(world):
    model, ids = GPT(LLAMA, tp=make_tp(world)), torch.ones(2, 3, dtype=torch.long)
    on_block = model.blocks[0].register_forward_hook(lambda *args: None)  # what a block is made of runs as ever
    model(ids)
    on_block.remove()
    handle = hook(model) if world.rank == 1 else None
    for call in (lambda: model(ids), lambda: model.generate(ids, max_new_tokens=2)):
        with pytest.raises(ValueError, match="hooks inside its layers"):
            call()
    if handle is not None:
        handle.remove()
    model(ids)


def test_a_hook_on_one_rank_is_named(ranks):
    """Of a layer that runs as its parts the messages are others than of one that does not: the ranks would wait."""
    ranks(2, hooked_on_one_rank)
