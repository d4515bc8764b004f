"""A transformer block with dropout, on one rank or split over a group, against the same block by definition on one."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ....collectives import all_gather
from ....kernels.experts.records import Routing
from ....kernels.runtime.philox import make_rng
from ....layers.block import TransformerBlock
from ....layers.shards import named_specs
from ....models.files.write import full_tensor
from ....parallel import TensorParallel
from ..connections import connections, device_of
from ..report import FAULT, NOTE, Finding
from .blame import blamed
from .compare import ADVICE, findings, tensor_errors
from .references import References

WIDTH, HEAD, BATCH, SEQ = 20, 6, 3, 7
MOST = 64  # ranks that the block is made for
OPS = 4  # a block's results are those of a chain of ops
SHARED = dict(q="weight", kv="weight", q_bias="bias", kv_bias="bias")  # layers.attention.CopiedKV's, of one weight


class BlockSplit(NamedTuple):
    """A way to split a block; together they run every op that sends messages."""

    name: str
    split: Callable[..., TensorParallel] = TensorParallel  # of a group
    block: Callable[..., TransformerBlock] = TransformerBlock
    ops: tuple[str, ...] = ()  # that send messages
    kernels: bool = True  # False: there are none, and it runs on a CPU alone


def both(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}_{phase}" for name in names for phase in ("fwd", "bwd"))


def with_experts(
    width: int,
    heads: int,
    ffn: int,
    *,
    tp: TensorParallel,
    head_width: int,
    dropout: float,
    attention_dropout: float,
    dtype: torch.dtype,
    device: torch.device,
) -> TransformerBlock:
    """Returns a block with as many experts as heads, of which a row has two, and a shared one."""
    return TransformerBlock(
        width, heads, ffn, tp=tp, head_width=head_width, dropout=dropout, attention_dropout=attention_dropout,
        num_experts=heads, routing=Routing(2), shared_size=ffn, shared_gate=True, gated=True, activation="silu",
        bias=False, norm="rms", dtype=dtype, device=device,
    )  # fmt: skip


ALONE = (
    BlockSplit("block on one rank"),
    BlockSplit("block that recomputes", block=partial(TransformerBlock, saving="smallest")),
    BlockSplit("block by leaves", partial(TensorParallel, bitwise=1), kernels=False),
)
_OVERLAPPED = partial(TensorParallel, sequence_parallel=True, overlap="pairwise")
SPLIT = (
    BlockSplit(
        "block, sequence parallel",
        partial(TensorParallel, sequence_parallel=True, overlap="off"),
        partial(TransformerBlock, saving="smallest", num_kv_heads=1),
        ("all_gather", "all_to_all", "all_gather_copies", "reduce_parts"),
    ),
    BlockSplit("block, overlapped", _OVERLAPPED, ops=both("gather_attention_exchange", "gather_mlp_exchange")),
    BlockSplit(
        "block, normalised q and k",
        _OVERLAPPED,
        partial(TransformerBlock, qk_norm=True),
        both("gather_linear", "linear_exchange", "gather_mlp_exchange"),
    ),
    BlockSplit(
        "block, replicated rows",
        partial(TensorParallel, overlap="pairwise"),
        ops=("linear_reduce_bwd", "all_gather", "reduce_parts"),
    ),
    BlockSplit(
        "block, pieces of sequences",
        lambda group: TensorParallel(cp=group, cp_kind="heads", overlap="pairwise"),
        ops=both("attention_of_heads"),
    ),
    BlockSplit(
        "block with experts",
        partial(TensorParallel, sequence_parallel=True, overlap="off"),
        with_experts,
        ("all_gather", "all_to_all", "exchange_rows"),
    ),
)


def alone(device: torch.device) -> list[Finding]:
    """Returns the lines of the blocks on one rank."""
    lines = []
    for split in ALONE:
        if not split.kernels and device.type != "cpu":
            continue
        try:
            lines += compared(split, split.split(), device)
        except Exception as error:
            lines.append(Finding(split.name, f"{type(error).__name__}: {error}", FAULT, ADVICE))
    return lines


def over(group: dist.ProcessGroup | None) -> list[Finding]:
    """Returns the lines of the blocks that are split over ``group``.  Each rank calls it."""
    if group is None or group.size() == 1:
        return []
    if group.size() > MOST:
        advice = f"Run the doctor on {MOST} ranks or fewer to have blocks compared: one rank computes them whole."
        return [Finding("blocks", f"not run on more than {MOST} ranks", NOTE, advice)]
    with connections(group) as connected:
        device = device_of(group)
        return [f for split in SPLIT for f in compared(split, split.split(connected), device)]


def compared(split: BlockSplit, tp: TensorParallel, device: torch.device) -> list[Finding]:
    """Returns the lines of one block: its output, and the gradients of its input and of every parameter."""
    ours = make(split, tp, torch.float32, device)
    reference = make(split, TensorParallel(), torch.float64, torch.device("cpu"), ranks=tp.call_size)
    values = {name: random(p.shape, i) for i, (name, p) in enumerate(reference.named_parameters())}
    values = {name: 1 + 0.1 * t if t.dim() == 1 else t / WIDTH**0.5 for name, t in values.items()}
    for block in ours, reference:
        fill(block, {name: t.float() for name, t in values.items()})
    tensors = step(ours, tp.call_size)
    with References() as references:
        exact = step(reference, tp.call_size)
    results = tensor_errors(tensors, {name: part(exact, name) for name in tensors}, torch.float32, OPS)
    wrong = not all(result.ok for result in results)
    return findings(split.name, results, blamed(references.calls, device, split.ops) if wrong else "")


def make(
    split: BlockSplit, tp: TensorParallel, dtype: torch.dtype, device: torch.device, *, ranks: int | None = None
) -> TransformerBlock:
    """Returns the block of a group of so many ``ranks``, those of ``tp`` unless given."""
    heads = 2 * (ranks or tp.call_size)
    return split.block(
        WIDTH, heads, 3 * heads, tp=tp, head_width=HEAD, dropout=0.1, attention_dropout=0.1, dtype=dtype, device=device
    )


@torch.no_grad()
def fill(block: TransformerBlock, values: dict[str, Tensor]) -> None:
    """Fills the parameters with this rank's slices of those of the block on one rank."""
    for name, p, spec, tp in named_specs(block):
        p.copy_(part(values, name)[spec.local(tp)])


def part(values: dict[str, Tensor], name: str) -> Tensor:
    """Returns the value of a name on one rank, or the part of it that has a name of its own where ranks share the only
    kv head."""
    stem, _, leaf = name.rpartition(".")
    shared = SHARED.get(leaf)
    if shared is None:
        return values[name]
    value = values[f"{stem}.{shared}"]  # [1, H + 2, ..]
    return value[:, -2:] if leaf.startswith("kv") else value[0, :-2]


def step(block: TransformerBlock, ranks: int) -> dict[str, Tensor]:
    """Returns the output and every gradient, whole, of a forward and a backward with dropout."""
    tp, p = block.tp, next(block.parameters())
    seq = ranks * -(-SEQ // ranks)
    x, dy = (random((BATCH * seq, WIDTH), seed).float().to(p.device, p.dtype) for seed in (100, 101))
    mine = lambda t: t.chunk(tp.cp_size)[tp.cp_rank].chunk(tp.row_shards)[tp.row_rank].contiguous()
    x = mine(x).clone().requires_grad_()
    y = block(x, batch=BATCH, rng=make_rng(7, 3, device=p.device))
    y.backward(mine(dy))
    assert x.grad is not None
    tensors = {"output": rows(y, tp), "gradient of the input": rows(x.grad, tp)}
    for name, p, spec, _ in named_specs(block):
        assert p.grad is not None
        tensors[f"gradient of {name}"] = full_tensor(p.grad, spec, tp)
    return tensors


def rows(shard: Tensor, tp: TensorParallel) -> Tensor:
    """Returns all rows of what is sharded under sequence parallelism, or in pieces."""
    for ranks in (tp if tp.row_shards > 1 else None, tp.cp):
        if ranks is not None:
            shard = all_gather(shard.detach().contiguous(), ranks.size, ranks.group_name).flatten(0, 1)
    return shard


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    """Returns normal numbers in fp64 on the CPU."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64, device="cpu")
