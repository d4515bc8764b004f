"""Tokens a second of greedy generation, against transformers' on the same weights, which are random."""

import tempfile
import time
import warnings
from collections.abc import Callable

import torch

from bench.gpu_day.part import Context, require
from tpfuse.models import GPT
from tpfuse.tools.bench.run import attempt

BF16 = torch.bfloat16
PROMPT, NEW, BATCH = 128, 64, 8


def _config(family: str, tiny: bool):
    import transformers

    if family == "gpt2":
        sizes = dict(n_embd=32, n_layer=1, n_head=2) if tiny else dict(n_embd=1024, n_layer=24, n_head=16)
        ids = dict(vocab_size=257, n_positions=64) if tiny else dict(n_positions=1024)
        return transformers.GPT2Config(**sizes, **ids, bos_token_id=None, eos_token_id=None)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=257)
    if not tiny:
        sizes = dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_attention_heads=16)
    groups = dict(num_key_value_heads=1 if tiny else 4, max_position_embeddings=64 if tiny else 1024)
    return transformers.LlamaConfig(**sizes, **groups, bos_token_id=None, eos_token_id=None)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """The shorter of two calls, warmed up before."""
    taken = []
    for _ in range(2):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken)


def jobs(context: Context) -> list[str]:
    return ["gpt2", "llama"]


@torch.no_grad()
def run(job: str, context: Context) -> None:
    require("transformers")
    import transformers

    prompt, new, batch = (4, 3, 2) if context.tiny else (PROMPT, NEW, BATCH)
    torch.manual_seed(0)
    with context.device:
        reference = transformers.AutoModelForCausalLM.from_config(_config(job, context.tiny)).to(BF16).eval()
    with tempfile.TemporaryDirectory(dir=context.scratch) as folder:
        reference.save_pretrained(folder)
        ours = GPT.from_pretrained(folder, device=context.device, dtype=BF16)
    ids = torch.randint(257, (batch, prompt), device=context.device)
    plain = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
    calls = {
        "tpfuse": lambda: ours.generate(ids, max_new_tokens=new),
        "tpfuse, CUDA graph": lambda: ours.generate(ids, max_new_tokens=new, cuda_graph=True),
        "transformers": lambda: reference.generate(ids, attention_mask=torch.ones_like(ids), **plain),
    }
    outputs, rates, notes = {}, {}, []
    for name, call in calls.items():
        with attempt(name, notes), warnings.catch_warnings():
            warnings.filterwarnings("error", "generate: goes on without a CUDA graph")  # whose figure it would not be
            outputs[name] = call()[:, prompt:]
            rates[name] = batch * new / seconds(call, context.device)
    same = {name: float((outputs["tpfuse"] == tokens).double().mean()) for name, tokens in outputs.items()}
    sizes = dict(parameters=sum(p.numel() for p in reference.parameters()), batch=batch, prompt=prompt, new=new)
    context.emit(dict(family=job, **sizes, tokens_per_s=rates, same_tokens=same))
    if notes:
        raise RuntimeError("; ".join(notes))


def headline(rows: list[dict]) -> str:
    return ", ".join(
        f"{row['family']} {row['tokens_per_s']['tpfuse']:.0f} tokens/s, transformers"
        f" {row['tokens_per_s']['transformers']:.0f}"
        for row in rows
    )
