"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), and the tables of its scaled forms.

    for each pair (a, b) of a head's columns and its angle's cos and sin, both times the attention factor
    forward   ya = a cos - b sin       yb = b cos + a sin
    backward  the same with -sin: a rotation's adjoint is the rotation back, so x is not saved

Shapes: x, y [M, H, E], cos, sin [P, F] with 2F <= E, positions [M]: row i takes table row positions[i], without
positions row i. Rotate-half (transformers' Llama) pairs column j with j + F, interleaved 2j with 2j + 1; columns from
2F on pass through.  The arithmetic is fp32 (fp64 for fp64), y is rounded once to x's dtype.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .runtime.device import load
from .runtime.errors import COUNT, POSITIVE, WHOLE, check, check_number, check_numbers
from .runtime.function import Function, once_differentiable
from .runtime.launch import launch, next_power_of_2, target
from .runtime.op import ELEMENTWISE, Cost, acc_dtype, autocast, moved, op
from .runtime.rules import boolean, check_rules, instance, number, shown, whole
from .runtime.triton import tl, triton
from .runtime.tuning import tuned


class Rotation(NamedTuple):
    cos: Tensor  # [P, F]
    sin: Tensor
    positions: Tensor | None  # int64 [M]
    interleaved: bool


# ---- reference ----


def rope_fwd_ref(x: Tensor, rotation: Rotation, back: bool) -> Tensor:
    positions, interleaved = rotation.positions, rotation.interleaved
    cos, sin = (t[: len(x)] if positions is None else t[positions] for t in rotation[:2])
    cos, sin = (t[:, None].to(acc_dtype(x)) for t in (cos, -sin if back else sin))
    rotated, rest = x.to(cos.dtype).tensor_split([2 * cos.shape[-1]], -1)
    a, b = rotated.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else rotated.chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([rotated, rest], -1).to(x.dtype)


# ---- Triton ----


@triton.jit
def _rope_kernel(
    x_ptr,  # [M, H, E] in, strides (stride_m, stride_h, 1)
    cos_ptr, sin_ptr,  # [P, F] in
    positions_ptr,  # [M] in
    y_ptr,  # [M, H, E] out
    M, H, E, F, stride_m, stride_h,
    ROWS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    heads = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    live = (rows < M)[:, None, None] & (heads < H)[None, :, None]
    x_ptr += rows[:, None, None] * stride_m + heads[None, :, None] * stride_h
    y_ptr += (rows[:, None, None] * H + heads[None, :, None]) * E
    positions = rows
    if positions_ptr is not None:
        positions = tl.load(positions_ptr + rows, mask=rows < M, other=0)
    pairs = tl.arange(0, PAIRS)
    angles = (positions[:, None] * F + pairs[None, :])[:, None, :]
    has_angle = (rows < M)[:, None, None] & (pairs < F)[None, None, :]
    cos, sin = load(cos_ptr, angles, has_angle), load(sin_ptr, angles, has_angle)
    if BACK:
        sin = -sin
    if INTERLEAVED:
        columns = tl.arange(0, 2 * PAIRS)[None, None, :]
        mask = live & (columns < 2 * F)
        a, b = tl.split(load(x_ptr, columns, mask).reshape(ROWS, HEADS, PAIRS, 2))
        y = tl.join(a * cos - b * sin, b * cos + a * sin).reshape(ROWS, HEADS, 2 * PAIRS)
        tl.store(y_ptr + columns, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        columns = pairs[None, None, :]
        mask = live & (columns < F)
        a, b = load(x_ptr, columns, mask), load(x_ptr, F + columns, mask)
        tl.store(y_ptr + columns, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_ptr + F + columns, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=mask)
    if REST > 0:
        columns = 2 * F + tl.arange(0, REST)[None, None, :]
        mask = live & (columns < E)
        tl.store(y_ptr + columns, tl.load(x_ptr + columns, mask=mask), mask=mask)


def fwd_config(H: int, E: int) -> dict[str, int]:
    """Returns launch parameters: all heads of a row, so that its angles are read once, as far as 4096 elements go; then
    more rows."""
    width = next_power_of_2(E)
    heads = min(next_power_of_2(H), max(4096 // width, 1))
    return dict(ROWS=max(4096 // (heads * width), 1), HEADS=heads, num_warps=4)


def fwd_launch(x: Tensor, rotation: Rotation, back: bool) -> Tensor:
    """Launches rope_fwd."""
    M, H, E = x.shape
    F = rotation.cos.shape[1]
    if x.stride(2) != 1:
        x = x.contiguous()
    tables = (None if t is None else t.contiguous() for t in rotation[:3])
    y = x.new_empty(M, H, E)
    config = tuned("rope", target(x.device).arch, x.dtype, (M, H, E), default=fwd_config(H, E))
    config |= dict(
        PAIRS=next_power_of_2(F),
        REST=next_power_of_2(E - 2 * F) if E > 2 * F else 0,
        INTERLEAVED=rotation.interleaved,
        BACK=back,
    )
    grid = -(-M // config["ROWS"]), -(-H // config["HEADS"])
    sizes = M, H, E, F, *x.stride()[:2]
    launch(_rope_kernel, grid, x.device, x, *tables, y, *sizes, **config)
    return y


def fwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    """Counts positions as different as they can be."""
    x, (cos, sin, positions, _), _ = args
    (M, H, _), F = x.shape, cos.shape[1]
    return Cost(moved(x, cos[:M], sin[:M], positions), moved(*outputs), 6 * M * H * F)


rope_fwd = op(rope_fwd_ref, kind=ELEMENTWISE, launch=fwd_launch, fake=lambda x, *_: x.new_empty(x.shape), cost=fwd_cost)


# ---- autograd ----


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rotation: Rotation) -> Tensor:
        ctx.save_for_backward(*rotation[:3])
        ctx.interleaved = rotation.interleaved
        return rope_fwd(x, rotation, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, positions = ctx.saved_tensors
        return rope_fwd(dy, Rotation(cos, sin, positions, ctx.interleaved), True), None


# ---- public ----

_FACTOR = number(1e-3, 1e6)
_SCALING = dict(  # what rope_table's arguments, and their namesakes in a config, may be
    rope_theta=number(1, 1e15, "(]"),
    partial_rotary_factor=number(0, 1024, "(]"),
    max_position_embeddings=whole(),
    original_max_position_embeddings=whole(),
    factor=_FACTOR,
    low_freq_factor=_FACTOR,
    high_freq_factor=_FACTOR,
    beta_fast=_FACTOR,
    beta_slow=_FACTOR,
    attention_factor=_FACTOR,
    mscale=number(0, 1e6),
    mscale_all_dim=number(0, 1e6),
    truncate=boolean,
)
_WIDTH = dict(head_width=whole(most=1 << 16))


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None, interleaved: bool = False) -> Tensor:
    """Rotates pairs of columns of every head by the angles of its row's position.

    x [..., H, E], read in place where its last stride is 1; its leading dimensions, flattened, are the rows.  cos,
    sin [P, F] in fp32 or fp64, of :func:`rope_table`, not differentiated, rotate the first 2F <= E columns; the rest
    passes.  ``positions`` int64 in the leading dimensions' shape, each in [0, P): the table row of every row of x;
    None: row i takes table row i, so an [S, B, H, E] needs them.

    Returns x's shape and dtype; under autocast x is cast.  Raises ValueError for shapes and dtypes that break these
    rules.
    """
    check(x.dim() >= 3, f"rope: x must be [..., H, E], got {tuple(x.shape)}")
    *leading, H, E = x.shape
    rows = math.prod(leading)
    check(
        cos.dim() == 2 and cos.shape == sin.shape and 2 <= 2 * cos.shape[1] <= E,
        f"rope: cos and sin must be [P, F] with 2 <= 2F <= {E}, got {tuple(cos.shape)} and {tuple(sin.shape)}",
    )
    check(
        cos.dtype == sin.dtype and cos.dtype in (torch.float32, torch.float64),
        f"rope: cos and sin must be both float32 or both float64, got {cos.dtype} and {sin.dtype}",
    )
    if positions is None:
        check(
            rows <= len(cos), f"rope: without positions a table of {len(cos)} rows serves as many rows of x, got {rows}"
        )
    else:
        check(
            list(positions.shape) == leading and positions.dtype == torch.int64,
            f"rope: positions must be {leading} int64, got {list(positions.shape)} {positions.dtype}",
        )
        positions = positions.reshape(-1)
    (x,) = autocast(x)
    rotation = Rotation(cos, sin, positions, interleaved)
    return _Rope.apply(x.reshape(rows, H, E), rotation).view(*leading, H, E)


def rope_table(
    head_width: int,
    length: int,
    *,
    theta: float | None = None,
    scaling: dict[str, Any] | None = None,
    partial_rotary_factor: float = 1.0,
    max_position_embeddings: int | None = None,
    seq_len: int | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Returns cos, sin fp32 [length, F] of positions 0 to length - 1 as transformers 5 computes them, times its
    attention factor.

    Takes both generations of a model's config: its rope_theta as ``theta`` and its rope_scaling, or its
    rope_parameters, as ``scaling``; a rope_theta or partial_rotary_factor in there goes before the argument.  Its
    rope_type (or type) is default, linear, dynamic, yarn, longrope or llama3.  ``max_position_embeddings`` is needed
    by dynamic, and stands in for a missing original_max_position_embeddings. ``seq_len`` (``length`` unless given) is
    the length that dynamic stretches to and by which longrope chooses its factors. F is half of int(head_width *
    partial_rotary_factor), rounded up.

    Computed in fp32 on the CPU, whatever the device: the same bits on every rank, and those that models were trained
    with.  Raises ValueError for an unknown type, for widths that do not fit, for a value of another type or out of its
    range, and for a missing key that has no safe default, by its name.
    """
    check_rules("rope_table", dict(head_width=head_width), _WIDTH)
    check_rules("rope_table", dict(scaling=scaling or {}), dict(scaling=instance("a mapping", Mapping)))
    scaling = {k: v for k, v in (scaling or {}).items() if v is not None}
    scaling.setdefault("rope_type", scaling.get("type", "default"))
    if max_position_embeddings is not None:
        scaling.setdefault("max_position_embeddings", max_position_embeddings)
    if theta is not None:
        scaling.setdefault("rope_theta", theta)
    sizes = dict(head_width=head_width, length=length, seq_len=seq_len)
    check_numbers("rope_table", _SIZES, sizes)
    _check_scaling(scaling)
    kind = scaling["rope_type"]
    known = isinstance(kind, str) and kind in _FREQUENCIES
    check(known, f"rope_table: rope type {shown(kind)} is not supported; use {', '.join(_FREQUENCIES)}")
    check_rules("rope_table", dict(partial_rotary_factor=partial_rotary_factor) | scaling, _SCALING)
    rotary = int(head_width * scaling.get("partial_rotary_factor", partial_rotary_factor))
    enough = 1 <= rotary and rotary + rotary % 2 <= head_width
    check(enough, f"rope_table: {rotary} rotary columns, in pairs, do not fit head_width={head_width}")
    frequencies, factor = _FREQUENCIES[kind](
        scaling, rotary, _need(scaling, "rope_theta"), length if seq_len is None else seq_len
    )
    angles = torch.arange(length, device="cpu").float()[:, None] * frequencies
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


_SIZES = {"head_width": COUNT, "length": WHOLE, "seq_len": WHOLE}
_LISTS = {"short_factor", "long_factor"}
_NUMBERS = _LISTS | {
    "rope_theta", "factor", "partial_rotary_factor", "attention_factor", "beta_fast", "beta_slow",
    "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "max_position_embeddings",
}  # fmt: skip

# ---- frequencies [F] and the attention factor of each type ----


def _need(scaling: dict[str, Any], key: str, *instead: str) -> Any:
    """Returns scaling[key], or else what may stand in for it."""
    values = [scaling[k] for k in (key, *instead) if k in scaling]
    check(
        bool(values),
        f"rope_table: rope type {scaling['rope_type']!r} needs {key}, which has no safe default; got {shown(scaling)}",
    )
    return values[0]


def _check_scaling(scaling: dict[str, Any]) -> None:
    """Holds every number of a rope to the rule that all of them keep, and those that have one to their own."""
    for key in _NUMBERS & scaling.keys():
        every = scaling[key] if key in _LISTS and isinstance(scaling[key], list | tuple) else [scaling[key]]
        for value in every:
            check_number(f"rope_table: {key}", value, POSITIVE)
    if {"low_freq_factor", "high_freq_factor"} <= scaling.keys():
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        check(low < high, f"rope_table: low_freq_factor must be less than high_freq_factor, got {low} and {high}")
    theta, logarithm = scaling.get("rope_theta"), scaling["rope_type"] == "yarn"
    check(theta is None or theta > 1 or not logarithm, f"rope_table: rope_theta must be above 1 for yarn, got {theta}")


def _original(scaling: dict[str, Any]) -> int:
    return _need(scaling, "original_max_position_embeddings", "max_position_embeddings")


def _factor(scaling: dict[str, Any]) -> float:
    """Returns factor, or the ratio of the two lengths where it is missing and both are there."""
    if "factor" not in scaling and {"original_max_position_embeddings", "max_position_embeddings"} <= scaling.keys():
        return scaling["max_position_embeddings"] / scaling["original_max_position_embeddings"]
    return _need(scaling, "factor")


def _powers(theta: float, rotary: int) -> Tensor:
    return theta ** (torch.arange(0, rotary, 2, device="cpu").float() / rotary)


def _default(scaling: dict[str, Any], rotary: int, theta: float, seq_len: int) -> tuple[Tensor, float]:
    return 1.0 / _powers(theta, rotary), 1.0


def _linear(scaling: dict[str, Any], rotary: int, theta: float, seq_len: int) -> tuple[Tensor, float]:
    return 1.0 / _powers(theta, rotary) / _need(scaling, "factor"), 1.0


def _dynamic(scaling: dict[str, Any], rotary: int, theta: float, seq_len: int) -> tuple[Tensor, float]:
    """Uses a larger base (NTK), once the sequence is longer than the model was trained for."""
    check(rotary > 2, f"rope_table: rope type 'dynamic' needs more than 2 rotary columns, got {rotary}")
    factor, trained = _need(scaling, "factor"), _need(scaling, "max_position_embeddings")
    stretch = factor * max(seq_len, trained) / trained - (factor - 1)
    return 1.0 / _powers(theta * stretch ** (rotary / (rotary - 2)), rotary), 1.0


def _yarn(scaling: dict[str, Any], rotary: int, theta: float, seq_len: int) -> tuple[Tensor, float]:
    """Peng et al. 2023 (arXiv:2309.00071): fast pairs stay, slow ones are stretched, a ramp between."""
    factor, original = _factor(scaling), _original(scaling)
    pair = lambda rotations: rotary * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))
    low, high = pair(scaling.get("beta_fast") or 32), pair(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary - 1)
    fast = _powers(theta, rotary)
    ramp = (torch.arange(len(fast), device="cpu").float() - low) / (high - low or 0.001)
    keep = 1 - ramp.clamp(0, 1)
    mscale = lambda m: 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0
    m, m_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    attention = scaling.get("attention_factor", mscale(m) / mscale(m_all) if m and m_all else mscale(1))
    return 1.0 / (factor * fast) * (1 - keep) + 1.0 / fast * keep, attention


def _longrope(scaling: dict[str, Any], rotary: int, theta: float, seq_len: int) -> tuple[Tensor, float]:
    """Ding et al. 2024 (arXiv:2402.13753): a searched factor for every pair, one list for short and one for long
    sequences."""
    factor, original = _factor(scaling), _original(scaling)
    name = "long_factor" if seq_len > original else "short_factor"
    factors = _need(scaling, name)
    valid = isinstance(factors, list | tuple) and all(_FACTOR(x) is None for x in factors)
    check(valid, f"rope_table: {name} must be numbers in [1e-3, 1e6], got {shown(factors)}")
    check(original > 1, f"rope_table: rope type 'longrope' needs a trained length of more than 1, got {original}")
    each = torch.tensor(factors, dtype=torch.float32, device="cpu")
    check(
        len(each) == -(-rotary // 2),
        f"rope_table: {name} must have {-(-rotary // 2)} numbers, one a pair, got {len(each)}",
    )
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1.0 / (each * _powers(theta, rotary)), scaling.get("attention_factor", attention)


def _llama3(scaling: dict[str, Any], rotary: int, theta: float, seq_len: int) -> tuple[Tensor, float]:
    """Long waves are stretched, short ones stay, a blend between."""
    factor, low, high = (_need(scaling, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    check(low < high, f"rope_table: low_freq_factor must be less than high_freq_factor, got {low} and {high}")
    original, frequencies = _original(scaling), 1.0 / _powers(theta, rotary)
    wave = 2 * math.pi / frequencies
    blend = (original / wave - low) / (high - low)
    between = (1 - blend) * frequencies / factor + blend * frequencies
    return torch.where(
        wave > original / low, frequencies / factor, torch.where(wave < original / high, frequencies, between)
    ), 1.0


_FREQUENCIES = dict(default=_default, linear=_linear, dynamic=_dynamic, yarn=_yarn, longrope=_longrope, llama3=_llama3)
