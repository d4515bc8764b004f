"""Steps of training whose every number is compared as bits, over layouts of tensor and sequence parallelism."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.pool import World
from tpfuse import TensorParallel, clip_grad_norm_, load_checkpoint, save_checkpoint
from tpfuse.layers.shards import named_specs
from tpfuse.models import GPT, Bert, BertConfig, GPTConfig

# The rows of a batch, 3 x 13, are padded to 40; the last leaf of the vocabulary has fewer tokens.
ODD: dict[str, Any] = dict(
    hidden_size=112, ffn_size=296, vocab_size=227, num_heads=8, num_layers=2, max_positions=32
)  # fmt: skip
BARE = dict(qkv_bias=False, out_bias=False, mlp_bias=False, gated=True)
ROPE = dict(rope_type="default", rope_theta=1e4)
DROPOUT = dict(dropout=0.1, embedding_dropout=0.1, attention_dropout=0.1)
KINDS: dict[str, Any] = {
    "gpt2": GPTConfig(hidden_size=64, num_heads=8, num_layers=2, vocab_size=96, max_positions=32, **DROPOUT),
    "gpt2 odd": GPTConfig(**ODD, **DROPOUT),
    "llama": GPTConfig(
        family="llama", hidden_size=64, num_heads=16, num_kv_heads=8, num_layers=2, vocab_size=96, ffn_size=176,
        norm="rms", activation="silu", rope=ROPE, tie_embeddings=False, max_positions=32, **BARE, **DROPOUT,
    ),
    "qwen3 odd": GPTConfig(
        family="qwen3", **ODD, num_kv_heads=8, head_width=12, norm="rms", activation="silu", rope=ROPE, qk_norm=True,
        **BARE, **DROPOUT,
    ),
    "gemma odd": GPTConfig(
        family="gemma2", **ODD, num_kv_heads=8, norm="gemma_rms", activation="gelu_tanh", rope=ROPE, branch_norm=True,
        attention_softcap=50.0, logit_softcap=30.0, scaled_embedding=True, **BARE, **DROPOUT,
    ),
    "neox odd": GPTConfig(family="gpt_neox", **ODD, rope=ROPE, parallel_residual=True, tie_embeddings=False, **DROPOUT),
    "bert odd": BertConfig(**ODD, **DROPOUT),
}  # fmt: skip


class Layout(NamedTuple):
    size: int
    sequence_parallel: bool = False


LAYOUTS = Layout(1, True), Layout(2), Layout(2, True), Layout(4), Layout(4, True)


class Result(NamedTuple):
    """This rank's losses, gradients and weights after the steps, norms; and the slices of the whole that they are."""

    losses: list[Tensor]
    norms: list[Tensor]
    tensors: dict[str, Tensor]
    slices: dict[str, tuple[slice, ...]]


def train(
    world: World | None,
    kind: str,
    *,
    dtype: torch.dtype,
    sequence_parallel: bool = False,
    bitwise: int | None = 8,
    saving: str = "fastest",
    steps: int = 2,
    save: Path | None = None,
    load: Path | None = None,
) -> Result:
    """Trains ``steps`` steps, from the checkpoint ``load`` on if there is one."""
    group = None if world is None else world.group
    tp = TensorParallel(group, sequence_parallel=sequence_parallel, bitwise=bitwise)
    config = KINDS[kind]
    options: Any = dict(tp=tp, seed=3, saving=saving)
    model = Bert(config, masked_lm=True, **options) if isinstance(config, BertConfig) else GPT(config, **options)
    model.to(dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(5)
    losses, norms = [], []
    tensors: dict[str, Tensor] = {}
    specs = {name: (spec, owner) for name, spec, owner in named_specs(model)}
    done = 0 if load is None else load_checkpoint(load, model, optimizer)[0]
    for step in range(steps):
        ids = torch.randint(config.vocab_size, (3, 13), generator=generator)
        if step < done:
            continue
        optimizer.zero_grad()
        loss = model(ids, labels=ids, step=step).loss
        loss.backward()
        losses.append(loss.detach())
        tensors |= {f"gradient {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norms.append(clip_grad_norm_(model, 0.5))
        optimizer.step()
    if save is not None:
        save_checkpoint(save, model, optimizer, step=steps)
    tensors |= {f"weight {name}": p.detach() for name, p in model.named_parameters()}
    slices = {name: specs[name.split(" ", 1)[1]][0].local(specs[name.split(" ", 1)[1]][1]) for name in tensors}
    return Result(losses, norms, tensors, slices)


def bits(x: Tensor) -> Tensor:
    """Returns x as integers: NaNs compare, and -0 is not 0."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def differences(one: Result, other: Result) -> dict[str, float]:
    """Returns the names of what differs, and the share of the elements that do."""
    scalars = {f"{what} {i}": (a, b) for what in ("losses", "norms") for i, (a, b) in enumerate(
        zip(getattr(one, what), getattr(other, what), strict=True))}  # fmt: skip
    assert one.tensors.keys() == other.tensors.keys()
    pairs = scalars | {name: (one.tensors[name][other.slices[name]], t) for name, t in other.tensors.items()}
    for name, (a, b) in pairs.items():
        assert a.shape == b.shape and a.dtype == b.dtype and b.numel(), name
    shares = {name: (bits(a) != bits(b)).double().mean().item() for name, (a, b) in pairs.items()}
    return {name: share for name, share in shares.items() if share}
