"""Every public function of tpfuse.kernels on small tensors of odd sizes.

The tensors are scaled as a model's are, so that logits and scores are of unit size: ``exp`` multiplies the rounding of
its argument z by |z|, and :func:`tpfuse.tools.accuracy.op_limit` counts each rounding once.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .... import kernels
from ....kernels.attn.op import attend_queries, attention_decode
from ....kernels.attn.options import DecodeOptions, Options, QueryChunk
from ....kernels.experts.grouped import experts_wgrad_add
from ....kernels.experts.records import Sides
from ....kernels.gemm.op import linear_wgrad_add
from ....kernels.losses.linear import linear_cross_entropy_bwd_add
from ....kernels.losses.options import Linear, Loss, Rows
from ....kernels.runtime.op import acc_dtype
from ....kernels.runtime.philox import make_rng
from ....kernels.sparse import SparseInt, sampled_matmul, sparse_matmul

M, D, V = 21, 40, 37  # rows, columns, tokens


class SelfTest(NamedTuple):
    """``function(**tensors, **fixed)``; the tensors are fp64 here, and differentiated unless ``backward`` is False."""

    name: str
    function: Callable[..., Any]
    tensors: dict[str, Tensor]
    fixed: dict[str, Any] = {}
    backward: bool = True


def cases(seed: int = 0) -> list[SelfTest]:
    """Returns the cases, the same ones on every rank and in every run; another ``seed`` draws other numbers."""
    generator = torch.Generator().manual_seed(seed)
    random = functools.partial(torch.randn, generator=generator, dtype=torch.float64, device="cpu")
    numbers = lambda most, n: torch.randint(most, (n,), generator=generator, device="cpu")
    vectors = lambda n, *names: {name: 1 + 0.1 * random(n) for name in names}
    drop = dict(p=0.1, rng=make_rng(7, 3, device="cpu"), site=5)
    labels = numbers(V, M)
    labels[3] = -100
    return [
        *_linears(random),
        SelfTest("layer_norm", kernels.layer_norm, dict(x=random(M, D)) | vectors(D, "weight", "bias")),
        SelfTest("rms_norm", kernels.rms_norm, dict(x=random(M, D)) | vectors(D, "weight")),
        SelfTest("dropout", kernels.dropout, dict(x=random(M, D)), drop),
        SelfTest(
            "reduce_bias_dropout_add_norm",
            _first_two(kernels.reduce_bias_dropout_add_norm),
            dict(parts=random(3, M, D), residual=random(M, D)) | vectors(D, "bias", "weight", "norm_bias"),
            drop | dict(batch=3),
        ),
        SelfTest(
            "embed_finish",
            _first_two(kernels.embed_finish),
            dict(parts=random(2, M, D), position_weight=random(9, D)) | vectors(D, "weight", "norm_bias"),
            drop | dict(batch=3, positions=numbers(9, M)),
        ),
        *_attentions(random, drop),
        *_experts(random),
        SelfTest("swiglu", kernels.swiglu, dict(gate_up=random(M, D, 2))),
        SelfTest("cross_entropy", kernels.cross_entropy, dict(logits=random(M, V)), dict(labels=labels)),
        SelfTest(
            "linear_cross_entropy",
            kernels.linear_cross_entropy,
            dict(x=random(M, D), weight=random(V, D) / D**0.5, bias=random(V)),
            dict(labels=labels, label_smoothing=0.1),
        ),
        SelfTest(
            "linear_cross_entropy, added",
            _loss_added,
            dict(x=random(M, D), weight=random(V, D) / D**0.5, bias=random(V), total=random(V, D)),
            dict(labels=labels),
            backward=False,
        ),
        SelfTest("embedding", kernels.embedding, dict(weight=random(V, D)), dict(ids=numbers(V, M))),
        SelfTest(
            "select_large",
            kernels.select_large,
            dict(x=random(M * D)),
            dict(threshold=2.0, most=M * D // 30),
            backward=False,
        ),
        *_sparse(numbers),
        SelfTest("rope", kernels.rope, dict(x=random(M, 3, 10)), rotation(10)),
    ]


def rotation(width: int) -> dict[str, Tensor]:
    cos, sin = kernels.rope_table(width, M, theta=1e4)
    return dict(cos=cos, sin=sin)


def _linears(random: Callable[..., Tensor]) -> list[SelfTest]:
    x, weight, bias = random(M, D), random(34, D) / 6, random(34)
    activations = "none", "gelu_tanh", "swiglu"
    tensors = dict(x=x, weight=weight, bias=bias)
    added = dict(dy=random(M, 34), x=x, total=random(34, D))
    plain = [SelfTest(f"linear, {a}", kernels.linear, tensors, dict(activation=a)) for a in activations]
    return [*plain, SelfTest("linear, added", _wgrad_added, added, backward=False)]


def _wgrad_added(dy: Tensor, x: Tensor, total: Tensor) -> tuple[Tensor, ...]:
    """A weight's gradient added to a sum in fp32, and the bias's, as MainGrad has them."""
    total = total.to(acc_dtype(total), copy=True)
    return linear_wgrad_add(dy, x, total, total.dtype), total


def _loss_added(x: Tensor, weight: Tensor, bias: Tensor, total: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    total = total.to(acc_dtype(total), copy=True)
    logits = torch.nn.functional.linear(x.to(total.dtype), weight.to(total.dtype), bias.to(total.dtype))
    rows = Rows(labels, logits.logsumexp(-1), logits.new_full((len(x),), 1 / len(x)))
    dx, db = linear_cross_entropy_bwd_add(Linear(x, weight, bias), rows, Loss(len(weight)), total)
    return dx, db, total


def _experts(random: Callable[..., Tensor]) -> list[SelfTest]:
    E, F, k = 5, 18, 2
    chosen = torch.stack([torch.arange(M, device="cpu") % 3, 3 + torch.arange(M, device="cpu") % 2], 1)
    fc = dict(fc1=random(E, F, 2, D) / D**0.5, fc2=random(E, D, F) / F**0.5)
    routed = dict(x=random(M, D), weight=random(E, D) / D**0.5)
    added = dict(dy=random(M, F), x=random(M, D), total=random(E, F, D))
    offsets = torch.tensor([0, 3, 3, 10, 20, M], device="cpu")
    routing = kernels.Routing(k, "sigmoid", scale=2.0)
    return [
        SelfTest("route", _weights_and_logits, routed, dict(routing=routing)),
        SelfTest(
            "expert_mlps", kernels.expert_mlps, dict(x=random(M, D), weights=random(M, k)) | fc, dict(chosen=chosen)
        ),
        SelfTest("expert_mlps, added", _experts_added, added, dict(offsets=offsets), backward=False),
    ]


def _weights_and_logits(x: Tensor, weight: Tensor, routing: kernels.Routing) -> tuple[Tensor, ...]:
    return kernels.route(x, weight, routing=routing)[::2]


def _experts_added(dy: Tensor, x: Tensor, total: Tensor, offsets: Tensor) -> Tensor:
    """The gradient of experts' weights added to a sum in fp32, as MainGrad has it."""
    total = total.to(acc_dtype(total), copy=True)
    experts_wgrad_add(Sides(dy, x, offsets), total)
    return total


def _sparse(numbers: Callable[..., Tensor]) -> list[SelfTest]:
    """Integers, which are as exact in every dtype."""
    int8 = lambda rows, columns: (numbers(256, rows * columns) - 128).view(rows, columns).to(torch.int8)
    weight = int8(M, D) * numbers(2, M * D).view(M, D)
    product = lambda weight, x: sparse_matmul(SparseInt.from_dense(weight), x)
    sampled = lambda weight, q, k: sampled_matmul(q, k, SparseInt.from_dense(weight))
    return [
        SelfTest("sparse_matmul", product, {}, dict(weight=weight, x=int8(D, V)), backward=False),
        SelfTest("sampled_matmul", sampled, {}, dict(weight=weight, q=int8(M, V), k=int8(D, V)), backward=False),
    ]


def _attentions(random: Callable[..., Tensor], drop: dict[str, Any]) -> list[SelfTest]:
    qkv = dict(qkv=random(M, 2, 4, 16))
    options = DecodeOptions(None, lengths=None, window=None, scale=0.25, softcap=None)
    decoded = dict(q=random(2, 2, 3, 16), k=random(2, 9, 2, 16), v=random(2, 9, 2, 16))
    decode = functools.partial(_decode, options=options)
    chunk = dict(q=random(5, 2, 2, 16), kv=random(M, 2, 2, 16))
    return [
        SelfTest("attention", kernels.attention, qkv, dict(batch=1, causal=True)),
        SelfTest("attention, dropout", kernels.attention, qkv, drop | dict(batch=3, causal=False) | rotation(16)),
        SelfTest("attention, some queries", _some_queries, chunk),
        SelfTest("attention, one new token", decode, decoded, backward=False),
    ]


def _some_queries(q: Tensor, kv: Tensor) -> Tensor:
    options = Options(seq=len(kv), causal=True, scale=q.shape[-1] ** -0.5)
    return attend_queries(q, QueryChunk(kv, len(kv) // 2, len(q)), options)


def _decode(q: Tensor, k: Tensor, v: Tensor, options: DecodeOptions) -> Tensor:
    return attention_decode(q, k, v, options)


def _first_two(function: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    """Returns a function without the third output, which is no tensor."""
    return lambda **inputs: tuple(t.contiguous() for t in function(**inputs)[:2])
