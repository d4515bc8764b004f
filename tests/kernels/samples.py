"""Arguments of every op that has a launcher, by its name and of any size: what tests of all launchers feed them.

``samples(name, rows, columns)`` makes them on torch's default device; on "meta" they may be as large as one likes.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tpfuse
from tpfuse.kernels.attn import triton_forward as attention
from tpfuse.kernels.attn.options import DecodeOptions, Options, QueryChunk
from tpfuse.kernels.experts.records import ExpertRows, Routed, Routing, Sides
from tpfuse.kernels.gemm import triton_gemm as gemm
from tpfuse.kernels.losses import linear_triton
from tpfuse.kernels.losses.options import Linear, Loss, Rows
from tpfuse.kernels.norm import triton_backward, triton_forward
from tpfuse.kernels.norm.records import DROP, POST, PRE, Add, NormVectors, Recompute, Saved, Wanted
from tpfuse.kernels.rotary.op import Rotation
from tpfuse.kernels.runtime.op import OPS
from tpfuse.kernels.runtime.philox import Mask
from tpfuse.kernels.sparse.format import Vectors

FP32 = torch.float32


def rng() -> Tensor:
    return torch.tensor([3, 2, 5])


def mask() -> Mask:
    return Mask(rng(), 0.3, site=7, first_row=11, batch=3)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape)


def below(limit: int, *shape: int) -> Tensor:
    return torch.randint(limit, shape)


def norm_of(D: int, kind: str = "layer") -> NormVectors:
    return NormVectors(random(D), random(D) if kind == "layer" else None, 1e-5, kind)


def saved_of(m: int, D: int, kind: str = "layer") -> Saved:
    return Saved(random(m, D), random(m if kind == "layer" else 0), torch.rand(m) + 0.5, random(D), kind)


def norm_forward(m: int, D: int) -> list[tuple[Any, ...]]:
    tables = dict(position_weight=random(4, D), positions=below(4, m), type_weight=random(3, D), types=below(3, m))
    return [
        (random(2, m, D), Add(random(D), **tables, residual=random(m, D)), norm_of(D), mask(), PRE),
        (random(1, m, D), Add(residual=random(m, D)), norm_of(D, "rms"), mask(), DROP),
        (random(3, m, D), Add(), NormVectors(), Mask(), PRE),
    ]


def norm_backward(m: int, D: int) -> list[tuple[Any, ...]]:
    everything, nothing = Wanted(FP32, True, FP32, FP32), Wanted(None, False, None, FP32)
    return [
        (random(2, m, D), random(m, D), saved_of(m, D), mask(), PRE, everything),
        (random(1, m, D), random(m, D), saved_of(m, D, "rms"), mask(), POST, Wanted(FP32, False, FP32, FP32)),
        (None, random(m, D), saved_of(m, D), mask(), DROP, everything),
        (random(2, m, D), None, Saved(None, None, None, None, "layer"), Mask(), PRE, nothing),
    ]


def options_of(S: int, E: int) -> list[Options]:
    table = lambda: random(S + 2, E // 2) if E > 1 else None
    numbers = dict(seq=S, scale=0.3, rng=rng(), p=0.3, site=7, first_head=5)
    seen = torch.rand(2, S) < 0.7
    ends = torch.tensor([S // 4, S // 2, S], dtype=torch.int32)
    positions = below(S + 2, 2 * S) if E > 1 else None
    rotation = dict(cos=table(), sin=table())
    return [
        Options(
            key_mask=seen,
            bias=random(4, S, S),
            batch=2,
            positions=positions,
            softcap=1.5,
            window=S // 3 + 1,
            **rotation,
            **numbers,
        ),  # fmt: skip
        Options(cu_seqlens=ends, causal=True, interleaved=True, **rotation, **numbers),
        Options(key_mask=seen & False, batch=2, seq=S),
    ]


def attention_forward(S: int, E: int) -> list[tuple[Any, ...]]:
    return [(random(S * options.batch + 1, 2, 4, E) / 3, options) for options in options_of(S, E)]


def attention_backward(S: int, E: int) -> list[tuple[Any, ...]]:
    made = []
    for qkv, options in attention_forward(S, E):
        do, o = random(2, len(qkv), 4 * E)
        made.append((do, qkv, o, torch.rand(options.batch, 4, S) + 3, options))
    return made


def queries_forward(S: int, E: int) -> list[tuple[Any, ...]]:
    made = []
    for options in options_of(S, E):
        batch, first, count = options.batch, S // 4, S - S // 3 - S // 4
        kv = random(S * batch + 1, 2, 2, E) / 3
        made.append((random(count * batch + 1, 2, 2, E) / 3, QueryChunk(kv, first, count), options))
    return made


def queries_backward(S: int, E: int) -> list[tuple[Any, ...]]:
    made = []
    for q, chunk, options in queries_forward(S, E):
        do, o = random(2, len(q), 4 * E)
        made.append((do, q, chunk, o, torch.rand(options.batch, 4, chunk.queries) + 3, options))
    return made


def attention_decode(L: int, E: int) -> list[tuple[Any, ...]]:
    seen = torch.rand(3, L) < 0.7
    lengths = torch.tensor([L // 2, L, min(L, 1)], dtype=torch.int32)
    return [
        (random(3, 2, 2, E), random(3, L, 2, E), random(3, L, 2, E), DecodeOptions(*options))
        for options in ((seen, lengths, 3, 0.3, 1.5), (None, lengths * 0, None, 0.3, None))
    ]


def losses(rows: int, vocab: int) -> tuple[Tensor, Loss, Rows]:
    """Labels in the middle of three slices of a vocabulary, and beside it."""
    labels = below(3 * vocab, rows)
    labels[1::3] = -100
    loss = Loss(3 * vocab, vocab, label_smoothing=0.1, z_loss=1e-2)
    return labels, loss, Rows(labels, torch.rand(rows) + 3, random(rows))


def linear_loss(rows: int, vocab: int, backward: bool) -> list[tuple[Any, ...]]:
    labels, loss, known = losses(rows, vocab)
    return [
        (Linear(random(rows, 6), random(vocab, 6), b), known if backward else labels, loss)
        for b in (random(vocab), None)
    ]


def experts(rows: int) -> ExpertRows:
    """Rows of three experts, of which the second has none, in an order of their own."""
    return ExpertRows(torch.randperm(rows), torch.tensor([0, rows // 3, rows // 3, rows]))


def experts_wgrad(rows: int, columns: int) -> list[Sides]:
    order = experts(rows)
    return [
        Sides(random(rows, columns), random(rows, 8), order.offsets, x_index=order.row_index),
        Sides(random(rows, 8), random(rows, columns), order.offsets, order.row_index),
    ]


def router_backward(m: int, E: int) -> list[tuple[Any, ...]]:
    made = []
    for routing in (Routing(1), Routing(1, "sigmoid", scale=2.5), Routing(E, renormalize=False)):
        d, weights, chosen = random(m, routing.k), torch.rand(m, routing.k), torch.rand(m, E).argsort(1)
        chosen = chosen[:, : routing.k].int()
        made.append((d, random(m, E), Routed(random(m, E), weights, chosen), random(E, 8), routing, random(m, 8)))
    return made


def int8(*shape: int) -> Tensor:
    return below(256, *shape).sub(128).to(torch.int8)


def sparse_places(rows: int, columns: int, V: int) -> tuple[Tensor, Tensor]:
    """Index and offsets of an even number of vectors a strip, about half of them."""
    strips, count = -(-rows // V), 2 * -(-columns // 4)
    return below(columns, strips * count).int(), torch.arange(strips + 1, dtype=torch.int32) * count


def sparse_vectors(rows: int, columns: int, V: int, bits: int) -> Vectors:
    index, offsets = sparse_places(rows, columns, V)
    planes, halves = 1 + (bits == 16), 1 + (bits == 4)
    return Vectors(int8(planes, len(index) // halves, V), index, offsets, rows, bits)


# name: (rows, columns) -> the op's arguments, one tuple or several
SAMPLES: dict[str, Callable[[int, int], tuple[Any, ...] | list[tuple[Any, ...]]]] = {
    **dict.fromkeys(("norm_fwd", "embed_finish_fwd", "reduce_bias_dropout_add_norm_fwd"), norm_forward),
    **dict.fromkeys(("norm_bwd", "embed_finish_bwd", "reduce_bias_dropout_add_norm_bwd"), norm_backward),
    "norm_apply": lambda m, D: (Recompute(*saved_of(m, D)[:4], random(D), 1e-5, "layer", FP32),),
    "dropout_fwd": lambda m, D: (random(m, D), mask()),
    "reduce_parts": lambda m, D: (random(3, m, D),),
    "attention_fwd": attention_forward,
    "attention_bwd": attention_backward,
    "attention_of_queries_fwd": queries_forward,
    "attention_of_queries_bwd": queries_backward,
    "attention_decode": attention_decode,
    "rope_fwd": lambda m, E: [
        (random(m, 3, 2 * E), Rotation(*random(2, m + 2, E), positions, False), True)
        for positions in (below(m + 2, m), None)
    ],
    "activation_fwd": lambda m, n: [(random(m, 2 * n), name) for name in ("gelu", "swiglu")],
    "activation_bwd": lambda m, n: [
        (random(m, 2 * n), random(m, 2 * n), "gelu", True, FP32),
        (random(m, n), random(m, 2 * n), "swiglu", False, None),
    ],
    "linear_fwd": lambda m, n: [
        *((random(m, 8), random(2 * n, 8), random(2 * n), act) for act in ("gelu", "swiglu")),
        (random(m, n), random(8, n), None, "none", -(-n // 2)),
    ],
    "linear_dgrad": lambda m, n: [(random(m, n), random(n, 8), *leaf) for leaf in ((), (0,), (-(-n // 2),))],
    "linear_dgrad_act": lambda m, n: [
        (random(m, 8), random(8, n), random(m, n), "gelu", True, FP32),
        (random(m, 8), random(8, n), random(m, 2 * n), "swiglu", False, None),
    ],
    "linear_wgrad": lambda m, n: [(random(m, n), random(m, 8), FP32, FP32, fixed) for fixed in (False, True)],
    "bias_grad": lambda m, n: (random(m, n), FP32),
    "cross_entropy_stats": lambda m, V: (random(m, V), *losses(m, V)[:2]),
    "cross_entropy_bwd": lambda m, V: (random(m, V), losses(m, V)[2], losses(m, V)[1]),
    "linear_cross_entropy_stats": lambda m, V: linear_loss(m, V, backward=False),
    "linear_cross_entropy_bwd": lambda m, V: linear_loss(m, V, backward=True),
    "linear_cross_entropy_bwd_add": lambda m, V: [(*args, random(V, 6)) for args in linear_loss(m, V, backward=True)],
    "embedding_fwd": lambda m, D: (random(5, D), below(9, m), 2),
    "embedding_bwd": lambda m, D: (random(m, D), below(9, m), 2, 5, FP32),
    "router_fwd": lambda m, E: [
        (random(m, 8), random(E, 8), bias, Routing(min(E, 3), score))
        for bias, score in ((None, "softmax"), (random(E), "sigmoid"))
    ],
    "router_bwd": router_backward,
    "experts_up": lambda m, n: (random(m, 8), experts(m), random(3, 2 * n, 8), "swiglu"),
    "experts_down": lambda m, n: (random(m, 8), experts(m), random(3, n, 8), torch.rand(m), m),
    "experts_dact": lambda m, n: (
        *(random(m, 8), experts(m), random(3, 8, n)),
        *(random(m, 2 * n), torch.rand(m), "swiglu"),
    ),
    "experts_dx": lambda m, n: (random(m, 8), experts(m), random(3, 8, n), m, 0),
    "experts_wgrad": lambda m, n: [(sides, FP32) for sides in experts_wgrad(m, n)],
    "experts_wgrad_add": lambda m, n: [
        (sides, random(3, sides.dy.shape[1], sides.x.shape[1])) for sides in experts_wgrad(m, n)
    ],
    "sparse_matmul": lambda m, n: [
        (sparse_vectors(m, n, V, bits), int8(n, 150)) for V, bits in ((8, 8), (8, 4), (16, 16), (64, 8))
    ],
    "sampled_matmul": lambda m, n: [
        (int8(m, E), int8(n, E), *sparse_places(m, n, V), V) for V, E in ((8, 7), (32, 150))
    ],
    "select_large": lambda m, n: [(random(m * n), 1.0, m * n // 5), (random(m * n), 0.0, m * n + 3)],
}


def samples(name: str, rows: int, columns: int) -> list[tuple[Any, ...]]:
    made = SAMPLES[name](rows, columns)
    return made if isinstance(made, list) else [made]


# ---- which ops there are, and the paths that their launchers take ----

for module in pkgutil.walk_packages(tpfuse.__path__, "tpfuse."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
LAUNCHED = [name for name, op in OPS.items() if op.launch is not None]
OTHERWISE = [
    name
    for name in LAUNCHED
    if name.startswith(("attention_fwd", "attention_of_queries_fwd", "embed_f", "linear", "norm", "reduce_b"))
]


def fused(kernel: str, arch: str, dtype: torch.dtype, shape: tuple[int, ...], default: dict) -> dict:
    """Stands for ``tuned`` where every GEMM that may take torch's path or tpfuse's takes the latter."""
    return default | dict(path="fused") if "path" in default else default


def take_other_paths(patch: pytest.MonkeyPatch) -> None:
    """GEMMs are fused, rows too wide for registers, the vocabulary comes in chunks, q and k are rotated ahead."""
    for module in (gemm, linear_triton):
        patch.setattr(module, "tuned", fused)
    patch.setattr(triton_forward, "FWD_ROW", 0)
    patch.setattr(triton_backward, "BWD_ROW", 0)
    patch.setattr(linear_triton, "ELEMENTS", 1)
    patch.setattr(linear_triton, "LEAST_COLUMNS", 1)
    patch.setattr(attention, "_rotates_ahead", lambda qkv, options: options.cos is not None)


def cases() -> list:
    """Every op on its usual path, and those that have one on another; every day one op of each launcher."""
    first = {op.launch: name for name, op in reversed(OPS.items())}
    return [
        pytest.param(
            name, other, id=name + " otherwise" * other, marks=[pytest.mark.slow] * (first[OPS[name].launch] != name)
        )
        for names, other in ((LAUNCHED, False), (OTHERWISE, True))
        for name in names
    ]
