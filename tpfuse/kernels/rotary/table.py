"""The tables of rotary positions: cos and sin of each position and pair, in every scaling of transformers."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..runtime.errors import check
from ..runtime.rules import WHOLE, boolean, check_rules, instance, integer, number, optional, quoted

Scaling = Mapping[str, Any]  # rope parameters by their names in a config.json, none of them None
_FACTOR = number(1e-3, 1e6)
_SCALING = dict(  # what rope_table's arguments, and their namesakes in a config, may be
    rope_theta=number(1, 1e15, "(]"),
    partial_rotary_factor=number(0, 1024, "(]"),
    max_position_embeddings=integer(),
    original_max_position_embeddings=integer(),
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
_GIVEN = dict(
    head_width=integer(most=1 << 16),
    length=WHOLE,
    seq_len=optional(WHOLE),
    scaling=optional(instance("a mapping", Mapping)),
)


def rope_table(
    head_width: int,
    length: int,
    *,
    theta: float | None = None,
    scaling: Mapping[str, Any] | None = None,
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
    values = dict(head_width=head_width, length=length, seq_len=seq_len, scaling=scaling)
    check_rules("rope_table", values, _GIVEN)
    rope = {k: v for k, v in (scaling or {}).items() if v is not None}
    rope.setdefault("rope_type", rope.get("type", "default"))
    if max_position_embeddings is not None:
        rope.setdefault("max_position_embeddings", max_position_embeddings)
    if theta is not None:
        rope.setdefault("rope_theta", theta)
    kind = rope["rope_type"]
    if not isinstance(kind, str) or kind not in _FREQUENCIES:  # torch.compile cannot make the words, so not before
        raise ValueError(f"rope_table: rope type {quoted(kind)} is not supported; use {', '.join(_FREQUENCIES)}")
    check_rules("rope_table", dict(partial_rotary_factor=partial_rotary_factor) | rope, _SCALING)
    rotary = int(head_width * rope.get("partial_rotary_factor", partial_rotary_factor))
    enough = 1 <= rotary and rotary + rotary % 2 <= head_width
    check(enough, f"rope_table: {rotary} rotary columns, in pairs, do not fit head_width={head_width}")
    frequencies, factor = _FREQUENCIES[kind](
        rope, rotary, _need(rope, "rope_theta"), length if seq_len is None else seq_len
    )
    angles = torch.arange(length, device="cpu").float()[:, None] * frequencies
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


# ---- frequencies [F] and the attention factor of each type ----


def _need(scaling: Scaling, key: str, *instead: str) -> Any:
    """Returns scaling[key], or else what may stand in for it."""
    for k in (key, *instead):
        if k in scaling:
            return scaling[k]
    kind = scaling["rope_type"]
    raise ValueError(f"rope_table: rope type {kind!r} needs {key}, which has no safe default; got {quoted(scaling)}")


def _original(scaling: Scaling) -> int:
    return _need(scaling, "original_max_position_embeddings", "max_position_embeddings")


def _factor(scaling: Scaling) -> float:
    """Returns factor, or the ratio of the two lengths where it is missing and both are there."""
    lengths = "original_max_position_embeddings", "max_position_embeddings"
    if "factor" not in scaling and all(key in scaling for key in lengths):
        return scaling["max_position_embeddings"] / scaling["original_max_position_embeddings"]
    return _need(scaling, "factor")


def _powers(theta: float, rotary: int) -> Tensor:
    return theta ** (torch.arange(0, rotary, 2, device="cpu").float() / rotary)


def _default(scaling: Scaling, rotary: int, theta: float, seq_len: int) -> tuple[Tensor, float]:
    return 1.0 / _powers(theta, rotary), 1.0


def _linear(scaling: Scaling, rotary: int, theta: float, seq_len: int) -> tuple[Tensor, float]:
    return 1.0 / _powers(theta, rotary) / _need(scaling, "factor"), 1.0


def _dynamic(scaling: Scaling, rotary: int, theta: float, seq_len: int) -> tuple[Tensor, float]:
    """Uses a larger base (NTK), once the sequence is longer than the model was trained for."""
    check(rotary > 2, f"rope_table: rope type 'dynamic' needs more than 2 rotary columns, got {rotary}")
    factor, trained = _need(scaling, "factor"), _need(scaling, "max_position_embeddings")
    stretch = factor * max(seq_len, trained) / trained - (factor - 1)
    return 1.0 / _powers(theta * stretch ** (rotary / (rotary - 2)), rotary), 1.0


def _yarn(scaling: Scaling, rotary: int, theta: float, seq_len: int) -> tuple[Tensor, float]:
    """Peng et al. 2023 (arXiv:2309.00071): fast pairs stay, slow ones are stretched, a ramp between."""
    check(rotary % 2 == 0, f"rope_table: rope type 'yarn' needs an even number of rotary columns, got {rotary}")
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


def _longrope(scaling: Scaling, rotary: int, theta: float, seq_len: int) -> tuple[Tensor, float]:
    """Ding et al. 2024 (arXiv:2402.13753): a searched factor for every pair, one list for short and one for long
    sequences."""
    factor, original = _factor(scaling), _original(scaling)
    name = "long_factor" if seq_len > original else "short_factor"
    factors = _need(scaling, name)
    if not isinstance(factors, list | tuple) or not all(_FACTOR(x) is None for x in factors):
        raise ValueError(f"rope_table: {name} must be numbers in [1e-3, 1e6], got {quoted(factors)}")
    check(original > 1, f"rope_table: rope type 'longrope' needs a trained length of more than 1, got {original}")
    pair_factors = torch.tensor(factors, dtype=torch.float32, device="cpu")
    check(
        len(pair_factors) == -(-rotary // 2),
        f"rope_table: {name} must have {-(-rotary // 2)} numbers, one a pair, got {len(pair_factors)}",
    )
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1.0 / (pair_factors * _powers(theta, rotary)), scaling.get("attention_factor", attention)


def _llama3(scaling: Scaling, rotary: int, theta: float, seq_len: int) -> tuple[Tensor, float]:
    """Long waves are stretched, short ones stay, a blend between."""
    factor, low, high = (_need(scaling, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    check(low < high, f"rope_table: low_freq_factor must be less than high_freq_factor, got {low} and {high}")
    original, frequencies = _original(scaling), 1.0 / _powers(theta, rotary)
    wave = 2 * math.pi / frequencies
    blend = (original / wave - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    return torch.where(
        wave > original / low, frequencies / factor, torch.where(wave < original / high, frequencies, blended)
    ), 1.0


_FREQUENCIES = dict(default=_default, linear=_linear, dynamic=_dynamic, yarn=_yarn, longrope=_longrope, llama3=_llama3)
