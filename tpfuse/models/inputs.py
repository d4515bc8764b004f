"""The arguments of a model's forward, checked before anything is changed.

A value is read where that costs nothing: on a CPU, and not by a compiler.  A GPU would have to be waited for.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.attn.options import as_key_mask, takes_key_mask
from ..kernels.losses.op import LOSS, Reduction, check_ids
from ..kernels.runtime import rules
from ..kernels.runtime.errors import check


class Inputs(NamedTuple):
    """The arguments of a model's forward."""

    input_ids: Tensor | None = None
    inputs_embeds: Tensor | None = None
    labels: Tensor | None = None
    shift_labels: Tensor | None = None
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    token_type_ids: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    loss_normalizer: float | Tensor | None = None
    step: int | Tensor | None = None
    first_sample: int | Tensor | None = None
    return_logits: bool | None = None
    output_hidden_states: bool | None = None
    logits_to_keep: int | Tensor | None = None
    headless: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    reduction: str = "mean"

    @property
    def tokens(self) -> Tensor:
        """The tensor that has a row for every token: input_ids [B, S], or inputs_embeds [B, S, D]."""
        tokens = self.input_ids if self.inputs_embeds is None else self.inputs_embeds
        assert tokens is not None  # checked
        return tokens

    @property
    def shape(self) -> torch.Size:
        """[B, S]"""
        return self.tokens.shape[:2]

    @property
    def labelled(self) -> bool:
        """True if the call has labels, shifted or not."""
        return self.labels is not None or self.shift_labels is not None

    @property
    def loss_options(self) -> dict[str, Any]:
        """The options of the loss, as kernels.cross_entropy takes them."""
        named = dict(label_smoothing=self.label_smoothing, z_loss=self.z_loss, reduction=self.reduction)
        return named | dict(normalizer=self.loss_normalizer)

    @property
    def key_mask(self) -> Tensor | None:
        """attention_mask as bool: converted once here, and not in every layer."""
        return as_key_mask("attention_mask", self.attention_mask)


class Aligned(NamedTuple):
    """The requirement on a tensor that has a value for every token."""

    accepts: Callable[[torch.dtype], bool]
    description: str
    reason: str = ""


_INT64 = Aligned(lambda dtype: dtype == torch.int64, "int64")
ALIGNED = {
    "labels": _INT64,
    "shift_labels": _INT64,
    "attention_mask": Aligned(takes_key_mask, "bool or integer", ", nonzero where a token may be seen, not additive"),
    "position_ids": _INT64,
    "token_type_ids": _INT64,
}
_NUMBERS = {"loss_normalizer": rules.POSITIVE, "step": rules.STEP, "first_sample": rules.SAMPLE}


def readable() -> bool:
    """Returns whether the program may depend on a tensor's value: not in a graph that serves other values too."""
    return not torch.compiler.is_compiling()


def check_given(name: str, inputs: Inputs, width: int) -> None:
    """Raises the ValueError of ``name`` unless exactly one of input_ids and inputs_embeds [B, S, width] is given."""
    ids, embeds = inputs.input_ids, inputs.inputs_embeds
    check(
        (ids is None) != (embeds is None),
        f"{name}: give input_ids or inputs_embeds, {'none' if ids is None else 'both'} came",
    )
    if embeds is None:
        return check_tokens(name, ids)
    if (
        not isinstance(embeds, Tensor)
        or embeds.dim() != 3
        or embeds.shape[2] != width
        or not embeds.is_floating_point()
    ):
        raise ValueError(f"{name}: inputs_embeds must be floating [B, S, {width}], got {rules.described(embeds)}")


def check_tokens(name: str, ids: Any) -> None:
    """Raises the ValueError of ``name`` for input_ids that are not int64 [B, S]."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype != torch.int64:
        raise ValueError(f"{name}: input_ids must be int64 [B, S], got {rules.described(ids)}")


def check_asked(name: str, inputs: Inputs, headed: bool, cure: str) -> None:
    """Raises the ValueError of ``name``, unless it is ``headed``, for what a model without a head cannot give."""
    wanted = inputs.labels is not None or inputs.return_logits
    check((headed and not inputs.headless) or not wanted, f"{name}: labels and return_logits need {cure}")


def check_of_language(name: str, inputs: Inputs, headed: bool) -> None:
    """Raises the ValueError of ``name`` for shift_labels and logits_to_keep that contradict other arguments, or where
    it has no head over a vocabulary."""
    for key in ("shift_labels", "logits_to_keep"):
        if getattr(inputs, key) is not None:
            check(
                headed and not inputs.headless,
                f"{name}: {key} needs the language-model head; make the model with lm_head=True",
            )
            check(inputs.labels is None, f"{name}: give labels or {key}, both came")
    keep, (batch, seq) = inputs.logits_to_keep, inputs.shape
    if keep is None:
        return
    check(inputs.shift_labels is None, f"{name}: give shift_labels or logits_to_keep, both came")
    if not isinstance(keep, Tensor):
        return rules.check_number(f"{name}: logits_to_keep", keep, rules.WHOLE)
    fits = keep.dtype == torch.int64 and 0 not in keep.shape and (keep.dim() == 1 or keep.shape[:-1] == (batch,))
    fits |= keep.dtype == torch.bool and keep.shape == inputs.shape
    check(
        fits and keep.dim() <= 2,
        f"{name}: logits_to_keep must be a number of last positions, int64 positions [K] or [{batch}, K], or bool"
        f" {tuple(inputs.shape)}, got {rules.described(keep)}",
    )
    if keep.dtype == torch.int64 and readable():
        check_ids(f"{name}: logits_to_keep", keep, seq)


def check_inputs(
    name: str, inputs: Inputs, *, most: int | None, start: int, longest: int | None, device: torch.device
) -> None:
    """Raises the ValueError of ``name`` for arguments that no model takes.

    ``most`` positions are the model's (None: any number), of which sequences begin at ``start``; ``longest`` is the
    length of the longest packed document (None: there are none), ``device`` where the weights are.
    """
    source = "input_ids" if inputs.inputs_embeds is None else "inputs_embeds"
    if inputs.tokens.device != device:
        raise ValueError(f"{name}: {source} must be on {device}, where the model is, got {inputs.tokens.device}")
    (batch, seq), length = inputs.shape, inputs.shape[1] if longest is None else longest
    if batch < 1 or seq < 1:
        raise ValueError(f"{name}: {source} must have at least one token, got {rules.described(inputs.tokens)}")
    begins = f" from {start} on" * bool(start)
    if most is not None and length + start > most:
        raise ValueError(f"{name}: {length} positions{begins} are more than the model's max_positions={most}")
    for key, rule in ALIGNED.items():
        x = getattr(inputs, key)
        if x is not None and not (
            isinstance(x, Tensor) and x.shape == inputs.shape and rule.accepts(x.dtype) and x.device == device
        ):
            place = f" on {device}" * (device.type != "cpu")
            kind = f"{rule.description} {tuple(inputs.shape)} as {source}{place}"
            raise ValueError(f"{name}: {key} must be {kind}{rule.reason}, got {rules.described(x)}")
    for key, number in _NUMBERS.items():
        value = getattr(inputs, key)
        if value is not None:
            rules.check_scalar(f"{name}: {key}", value, number, readable=readable())
    rules.check_numbers(name, inputs._asdict(), LOSS)
    Reduction(inputs.reduction, inputs.loss_normalizer).check(name, "loss_normalizer")
    _check_last_sample(name, inputs.first_sample, batch)
    for key in ("return_logits", "output_hidden_states"):
        flag = getattr(inputs, key)
        if flag is not None and not isinstance(flag, bool):
            raise ValueError(f"{name}: {key} must be True, False or None, got {rules.described(flag)}")


def _check_last_sample(name: str, first_sample: int | Tensor | None, batch: int) -> None:
    """Raises ValueError beyond 2**32 samples: masks count them in 32 bits, and two would share theirs."""
    if isinstance(first_sample, Tensor) and not (first_sample.device.type == "cpu" and readable()):
        return
    if first_sample is not None and int(first_sample) + batch > 1 << 32:
        raise ValueError(f"{name}: first_sample + batch must be at most 2**32, got {int(first_sample)} + {batch}")


def bound_of(name: str, position_ids: Tensor, unread: int) -> int:
    """Returns a bound of ``position_ids``: their maximum and 1.

    ``unread``, where they cannot be read without a wait; a device stops at one that lies beyond.
    """
    if readable() and position_ids.device.type == "cpu":
        return int(position_ids.max()) + 1
    if readable():
        torch._assert_async((position_ids < unread).all(), f"{name}: position_ids must lie below {unread} on a GPU")
    return unread


def check_packed(name: str, inputs: Inputs) -> int | None:
    """Returns the length of the longest packed document, given or computed, None where there are none; ValueError for
    bounds that are none."""
    bounds, longest = inputs.cu_seqlens, inputs.max_seqlen
    if longest is not None:
        check(bounds is not None, f"{name}: max_seqlen needs cu_seqlens, the bounds of packed documents")
        rules.check_number(f"{name}: max_seqlen", longest, rules.COUNT)
    if bounds is None:
        return None
    batch, seq = inputs.shape
    if batch != 1:
        one = "packed documents (cu_seqlens) are one row of tokens, input_ids [1, S]"
        raise ValueError(f"{name}: {one}; got a batch of {batch}")
    if not (isinstance(bounds, Tensor) and bounds.dim() == 1 and len(bounds) >= 2 and bounds.dtype == torch.int32):
        raise ValueError(f"{name}: cu_seqlens must be int32 [N + 1], N >= 1, got {rules.described(bounds)}")
    if bounds.device != inputs.tokens.device:
        raise ValueError(f"{name}: cu_seqlens must be on {inputs.tokens.device} as input_ids, got {bounds.device}")
    if not readable() or bounds.device.type != "cpu":
        return seq if longest is None else longest
    return _longest(name, bounds.tolist(), longest, seq)


def _longest(name: str, bounds: list[int], longest: int | None, seq: int) -> int:
    lengths = [b - a for a, b in zip(bounds, bounds[1:])]
    if bounds[0] != 0 or bounds[-1] > seq or min(lengths) < 0:
        raise ValueError(f"{name}: cu_seqlens must rise from 0 to at most {seq}, got {bounds}")
    if longest is not None and longest < max(lengths):
        raise ValueError(f"{name}: max_seqlen={longest}, and the longest document has {max(lengths)} tokens")
    return max(lengths) if longest is None else longest
