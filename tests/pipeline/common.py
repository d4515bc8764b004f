"""Small models over pipeline stages, their batches, and how far their gradients are from one process's."""

from dataclasses import replace

import torch

from tpfuse import add_lora
from tpfuse.layers.module import named_specs
from tpfuse.models import GPT, Bert, BertConfig, GPTConfig

ROWS, SEQ, VOCAB = 8, 12, 97
SHAPE = dict(vocab_size=VOCAB, max_positions=16, hidden_size=24, num_layers=8, num_heads=4)
DROP = dict(dropout=0.1, attention_dropout=0.1, embedding_dropout=0.1)
GPT2 = GPTConfig(**SHAPE, **DROP)
LLAMA = dict(family="llama", norm="rms", gated=True, activation="silu", rope=dict(rope_theta=1e4), num_kv_heads=2)
PLAIN = dict(qkv_bias=False, out_bias=False, mlp_bias=False)
MODELS = {
    "gpt2": GPT2,
    "untied": replace(GPT2, tie_embeddings=False),
    "llama": GPTConfig(**SHAPE, **DROP, **LLAMA, **PLAIN, tie_embeddings=False),
    "parallel": replace(GPT2, parallel_residual=True),
    "branches": replace(GPT2, pre_norm=False, branch_norm=True),
    "bert": BertConfig(**SHAPE, **DROP),
}


def made(config, **options):
    if isinstance(config, BertConfig):
        return Bert(config, masked_lm=True, seed=3, **options).train()
    return GPT(config, seed=3, **options).train()


def batches(steps, rows=ROWS):
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(VOCAB, (rows, SEQ), generator=g)
        yield ids, ids.masked_fill(torch.rand(rows, SEQ, generator=g) < 0.2, -100)


def adapted(model, lora):
    if lora:
        add_lora(model, rank=2, alpha=4)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith(".B"):
                    p.add_(0.01)
    return model


def errors(model, first, gradient=lambda p: p.grad):
    """The largest relative error of this rank's gradients against those of one process, by name."""
    worst = 0.0
    for (name, spec, tp), p in zip(named_specs(model), model.parameters(), strict=True):
        if p.requires_grad:
            exact = first[name][spec.local(tp)]
            worst = max(worst, float((gradient(p) - exact).abs().max() / first[name].abs().max()))
    return worst
