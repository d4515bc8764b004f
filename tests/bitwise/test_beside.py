"""The same bits beside what a training script adds: GradScaler, MainGrad, Muon, a model of transformers.

Spans: tpfuse/training/main_grad.py, matrices.py and foreign/scaler.py, tpfuse/interop/parallelize.py.
"""

import pytest
import torch

import tpfuse
from tests.bitwise.training import KINDS, Layout, Result, differences
from tpfuse import TensorParallel
from tpfuse.layers.shards import named_specs
from tpfuse.models import GPT

STEPS, MICRO = 2, 2


class Plain:
    """A step as a script writes it; the others change a part."""

    dtype = torch.float32

    def __init__(self, tp):
        self.model = self.made(tp).to(self.dtype).train()
        self.module = self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def made(self, tp):
        return GPT(KINDS["gpt2 odd"], tp=tp, seed=3)

    def gradients(self, losses):
        self.optimizer.zero_grad()
        for loss in losses:
            loss.backward()

    def step(self):
        self.optimizer.step()


class Scaled(Plain):
    def __init__(self, tp):
        super().__init__(tp)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def gradients(self, losses):
        super().gradients(map(self.scaler.scale, losses))
        self.scaler.unscale_(self.optimizer)

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()


class InFp32(Plain):
    dtype = torch.bfloat16

    def __init__(self, tp):
        super().__init__(tp)
        self.main = tpfuse.MainGrad(self.model)
        self.optimizer = torch.optim.AdamW(self.main.parameters(), lr=1e-2)

    def gradients(self, losses):
        self.main.zero()
        for loss in losses:
            loss.backward()
        self.main.reduce()


class OfMatrices(Plain):
    """Muon, whose iteration in bf16 makes much of a last bit of a gradient."""

    def __init__(self, tp):
        super().__init__(tp)
        matrices = tpfuse.WholeMatrices(self.model.blocks)
        self.muon = torch.optim.Muon(matrices.parameters(), lr=0.02)
        self.muon.register_step_pre_hook(matrices.gather_gradients)
        self.optimizer = torch.optim.AdamW(matrices.others(self.model), lr=1e-2)

    def gradients(self, losses):
        self.muon.zero_grad()
        super().gradients(losses)

    def step(self):
        self.muon.step()
        super().step()


class OfTransformers(Plain):
    def __init__(self, tp):
        import transformers

        sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8)
        torch.manual_seed(0)
        config = transformers.LlamaConfig(vocab_size=227, num_key_value_heads=8, **sizes)
        self.module = tpfuse.parallelize(transformers.LlamaForCausalLM(config), tp).train()
        self.model = self.module.parallel
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)


KINDS_OF = {"GradScaler": Scaled, "MainGrad": InFp32, "Muon": OfMatrices, "parallelize": OfTransformers}


def run(world, kind, sequence_parallel, bitwise=8):
    torch.set_num_threads(1)
    script = KINDS_OF[kind](TensorParallel(world.group, sequence_parallel=sequence_parallel, bitwise=bitwise))
    model, generator = script.model, torch.Generator().manual_seed(5)
    losses, norms, tensors = [], [], {}
    for step in range(STEPS):
        ids = torch.randint(227, (MICRO, 3, 13), generator=generator)
        calls = (script.module(x, labels=x, step=step, first_sample=3 * i).loss for i, x in enumerate(ids))
        script.gradients(losses.append(loss.detach()) or loss for loss in calls)
        grads = {name: getattr(p, "main_grad", p.grad) for name, p in model.named_parameters()}
        tensors |= {f"gradient {name}": grad.clone() for name, grad in grads.items()}
        norms.append(tpfuse.clip_grad_norm_(model, 0.5))
        script.step()
    tensors |= {f"weight {name}": p.detach() for name, p in model.named_parameters()}
    slices = {name: spec.local(tp) for name, _, spec, tp in named_specs(model)}
    return Result(losses, norms, tensors, {name: slices[name.split(" ", 1)[1]] for name in tensors})


CASES = [
    pytest.param(
        kind, layout, id=f"{kind}-{layout}", marks=[pytest.mark.slow] * (kind != "MainGrad" or layout.size == 2)
    )
    for kind in KINDS_OF
    for layout in (Layout(2), Layout(4, True))
]


@pytest.mark.parametrize("kind, layout", CASES)
def test_every_layout(kind, layout, ranks):
    (one,) = ranks(1, run, kind, False)
    for result in ranks(layout.size, run, kind, layout.sequence_parallel):
        assert differences(one, result) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS_OF)
def test_without_leaves_they_differ(kind, ranks):
    (one,) = ranks(1, run, kind, False, None)
    assert all(differences(one, result) for result in ranks(4, run, kind, True, None))
