"""Self-attention with the heads split over the ranks.

x [m, D] -> qkv [M, G/R, Q + 2, E] -> o [M, H/R E] -> parts [R, m, D] -> sum + bias [m, D]

Where kv heads are fewer than ranks (G < R), R/G ranks in a row hold the same kv head beside query heads of their own,
and its gradient is summed over them.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..collectives import copy_within
from ..kernels.attn.op import attention
from ..kernels.attn.options import Options, as_key_mask, checked_options
from ..kernels.norm import Recompute, reduce_bias_dropout_add_norm
from ..kernels.rotary.op import rope as rotate
from ..kernels.runtime.errors import check
from ..kernels.runtime.main_grad import derived
from ..kernels.runtime.philox import threshold
from ..kernels.runtime.rules import POSITIVE, check_numbers
from ..parallel import TensorParallel
from ..sequence_parallel import gather_attention_exchange
from .cache import KVCache, Seeing
from .hooks import hooked
from .linear import ColumnParallelLinear, ColumnProjection, RowParallelLinear
from .module import Origin, ParallelModule, check_rows, local, replicated
from .norm import HeadNorm, RMSNorm, SplitNorm, normed
from .sites import sites


class Rope(NamedTuple):
    """Rotary positions: tables ``cos`` and ``sin`` [P, E/2 or less] fp32, and the row of theirs that each row has.

    ``positions`` is int64 [seq * batch], for rows s * batch + b; None: s.  ``interleaved``: the pairs that are rotated
    together are neighbours, not half a head apart.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor | None = None
    interleaved: bool = False


class Ropes(NamedTuple):
    """Rotary positions of two kinds of layers: those without a window, and those with one."""

    full: Rope
    sliding: Rope


class CopiedKV(ColumnProjection):
    """The qkv projection where ``copies`` ranks in a row share a kv head: q [H, E, D], kv [G, 2, E, D] and biases.

    ``heads`` query heads share each of ``groups`` kv heads.  Initial values are those of qkv [G, Q + 2, E, D], the
    layout for fewer ranks.
    """

    q: nn.Parameter
    kv: nn.Parameter
    q_bias: nn.Parameter | None
    kv_bias: nn.Parameter | None

    def __init__(
        self,
        width: int,
        *,
        groups: int,
        heads: int,
        head_width: int,
        copies: int,
        bias: bool,
        tp: TensorParallel,
        init_std: float,
        **factory: Any,
    ):
        super().__init__(tp)
        self.in_features = width
        self.copies, per_group, head = copies, heads + 2, head_width * width
        q, kv = (groups * heads, head_width), (groups, 2, head_width)
        of_q = Origin("weight", partial(_in_qkv, each=heads, first=0, per_group=per_group, size=head))
        of_kv = Origin("weight", partial(_in_qkv, each=1, first=heads, per_group=per_group, size=head))
        self.add_parameter("q", (*q, width), 0, init_std, origin=of_q, **factory)
        self.add_parameter("kv", (*kv, width), 0, init_std, origin=of_kv, copies=copies, **factory)
        if bias:
            self.add_parameter("q_bias", q, 0, "zeros", **factory)
            self.add_parameter("kv_bias", kv, 0, "zeros", copies=copies, **factory)
        else:
            self.q_bias = self.kv_bias = None
        self.initialize_alone()

    def flat(self) -> tuple[Tensor, Tensor | None]:
        """Returns weight [(H/R + 2) E, D] of this rank's query heads, k and v, and its bias."""
        weight = derived(self._joined, local(self.q), local(self.kv))
        if self.q_bias is None or self.kv_bias is None:
            return weight, None
        kv_bias = copy_within(local(self.kv_bias), self.tp, self.copies)
        return weight, torch.cat([local(self.q_bias).flatten(), kv_bias.flatten()])

    def _joined(self, q: Tensor, kv: Tensor) -> Tensor:
        return torch.cat([q.flatten(0, 1), copy_within(kv, self.tp, self.copies).flatten(0, 2)])


def _in_qkv(i: np.ndarray, *, each: int, first: int, per_group: int, size: int) -> np.ndarray:
    """Returns where in qkv the elements of index i begin, of ``each`` indices a group from the ``first`` one on."""
    return (i // each * per_group + i % each + first) * size


class ParallelAttention(ParallelModule):
    """Multi-head attention, or grouped-query attention with fewer ``num_kv_heads``, on rows s * batch + b.

    ``head_width`` defaults to hidden_size / num_heads.  ``window`` is the number of keys a query sees, itself included;
    without ``causal`` as many on either side.
    ``qk_norm`` puts an RMSNorm (``eps``, of ``qk_norm_kind``) on every query and key head, with ``qk_norm_all`` on all
    query heads together and on all key heads.  ``scale`` (head_width ** -0.5) and ``softcap`` are those of
    kernels.attention.  ``bias`` is that of the qkv projection and, unless ``out_bias`` is given, of the output
    projection.  ``dropout`` is on the probabilities; ``layer`` numbers its masks.  ValueError where heads cannot be
    split over the ranks.
    """

    shown = "head_width", "causal", "window", "scale", "softcap", "dropout"
    qkv: ColumnProjection
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_width: int | None = None,
        tp: TensorParallel | None = None,
        causal: bool = False,
        window: int | None = None,
        qk_norm: bool = False,
        eps: float = 1e-6,
        dropout: float = 0.0,
        bias: bool = True,
        out_bias: bool | None = None,
        layer: int = 0,
        scale: float | None = None,
        softcap: float | None = None,
        qk_norm_kind: str = "rms",
        qk_norm_all: bool = False,
        init_std: float = 0.02,
        out_init_std: float | None = None,
        **factory: Any,
    ):
        super().__init__(tp)
        groups = num_heads if num_kv_heads is None else num_kv_heads
        check(
            head_width is not None or hidden_size % num_heads == 0,
            f"ParallelAttention: hidden_size={hidden_size} is not divisible by num_heads={num_heads}",
        )
        check(
            num_heads % groups == 0,
            f"ParallelAttention: num_heads={num_heads} is not divisible by num_kv_heads={groups}",
        )
        threshold(dropout)
        check_numbers("ParallelAttention", dict(scale=scale, softcap=softcap), dict(scale=POSITIVE, softcap=POSITIVE))
        self.scale, self.softcap = scale, softcap
        self.width = hidden_size
        self.head_width = E = hidden_size // num_heads if head_width is None else head_width
        self.first_head = self.tp.rank * self.tp.divide(num_heads, "ParallelAttention: num_heads")
        self.causal, self.window, self.dropout, self.site = causal, window, dropout, sites(layer).probabilities
        heads = num_heads // groups
        shared: dict[str, Any] = dict(bias=bias, tp=self.tp, init_std=init_std, **factory)
        if groups % self.tp.size == 0:
            copies = 1
            self.groups, self.heads_per_group = groups // self.tp.size, heads + 2  # of each: query heads, k and v
            self.qkv = ColumnParallelLinear(hidden_size, (groups, heads + 2, E), **shared)
        else:
            check(self.tp.size % groups == 0, _kv_heads_error(num_heads, groups, self.tp.size))
            copies = self.tp.size // groups
            self.groups, self.heads_per_group = 1, heads // copies + 2
            self.qkv = CopiedKV(hidden_size, groups=groups, heads=heads, head_width=E, copies=copies, **shared)
        self.q_norm = self.k_norm = None
        if qk_norm:
            norm: dict[str, Any] = dict(eps=eps, kind=qk_norm_kind, tp=self.tp, **factory)
            if qk_norm_all:
                self.q_norm = SplitNorm(num_heads * E, **norm)
                self.k_norm = SplitNorm(groups * E, copies=copies, **norm)
            else:
                self.q_norm, self.k_norm = HeadNorm(E, **norm), HeadNorm(E, **norm)
        shared["bias"] = bias if out_bias is None else out_bias
        shared["init_std"] = init_std if out_init_std is None else out_init_std
        self.out = RowParallelLinear(num_heads * E, hidden_size, **shared)

    @property
    def in_one(self) -> bool:
        """Whether nothing but rotary positions stands between the projections and attention."""
        return self.q_norm is None and self.qkv.adapter is None and self.out.adapter is None

    def _attending(self, **given: Any) -> dict[str, Any]:
        """Returns the arguments of attention: those of a call, and this layer's own."""
        own: dict[str, Any] = dict(causal=self.causal, window=self.window, site=self.site, first_head=self.first_head)
        own |= dict(scale=self.scale, softcap=self.softcap)
        return given | own | dict(p=self.dropout if self.training else 0.0)

    def options(self, x: Tensor, *, seq: int | None = None, rope: Rope | None = None, **given: Any) -> Options:
        """Returns the checked options of attention over the rows of x [M, D]; the arguments are those of
        :meth:`parts`."""
        options = Options(**self._attending(**given), **({} if rope is None else rope._asdict()))
        shape = len(x), self.groups, self.heads_per_group, self.head_width
        return checked_options(shape, options, seq=seq, scale=self.scale)

    def parts(
        self,
        n: Tensor,
        *,
        batch: int,
        seq: int | None = None,
        rng: Tensor | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        rope: Rope | None = None,
        recompute: Recompute | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """n [m, D] or expanded [R, m, D] -> parts [R, m, D], to be summed over R and given the bias.

        ``key_mask`` bool [batch, seq]; the rest as in :meth:`forward`.
        """
        options = self._attending(
            batch=batch, seq=seq, key_mask=key_mask, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, rng=rng
        )
        if self.in_one and cache is None:
            options |= dict(heads_per_group=self.heads_per_group, head_width=self.head_width)
            options |= {} if rope is None else rope._asdict()
            weights = *self.qkv.flat(), local(self.out.weight)
            return gather_attention_exchange(n, *weights, tp=self.tp, recompute=recompute, **options)
        return self.out.parts(self._attend(self.qkv.project(n, recompute), options, rope=rope, cache=cache))

    def _attend(self, qkv: Tensor, options: dict[str, Any], *, rope: Rope | None, cache: KVCache | None) -> Tensor:
        """What the qkv projection gives [M, (H/R + 2 G/R) E] -> o [M, H/R E]"""
        batch, seq = options["batch"], options["seq"]
        qkv = qkv.view(len(qkv), -1, self.heads_per_group, self.head_width)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.split([self.heads_per_group - 2, 1, 1], 2)
            qkv = torch.cat([*normed(self.q_norm, self.k_norm, q, k), v], 2)
        if cache is not None and rope is not None:  # the cache holds keys that are rotated already
            if rope.positions is None:
                raise ValueError("ParallelAttention: with a cache, rope needs positions")
            qkv, rope = _rotated(qkv, rope, rope.positions), None
        if cache is not None and cache.length > 0:
            positions = len(qkv) // batch if seq is None else seq
            o = cache.attend(qkv, batch, positions, Seeing(self.window, self.scale, self.softcap))
        else:
            if cache is not None:
                cache.fill(qkv, batch, len(qkv) // batch if seq is None else seq)
            o = attention(qkv, **options, **({} if rope is None else rope._asdict()))
        return o

    def forward(
        self,
        x: Tensor,
        *,
        batch: int,
        seq: int | None = None,
        rng: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        rope: Rope | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """x [m, D] (without sequence parallelism [M, D]) -> [m, D].

        ``seq`` positions: M // batch unless given; rows beyond seq * batch are padding.  ``attention_mask`` [batch,
        seq], nonzero where a key may be seen; ``cu_seqlens`` int32 [N + 1], the bounds of packed documents (batch 1).
        ``rng`` where dropout is on.  ``cache``: of generation.  ValueError for an x of other dimensions, or rows that
        do not fit ``batch``.
        """
        check_rows("ParallelAttention", x, self.width, tp=self.tp, batch=batch, seq=seq)
        attending: dict[str, Any] = dict(
            batch=batch,
            seq=seq,
            rng=rng,
            key_mask=as_key_mask("ParallelAttention: attention_mask", attention_mask),
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
        )
        if hooked(self):
            o: Tensor = self._attend(self.qkv(x), self._attending(**attending), rope=rope, cache=cache)
            summed: Tensor = self.out(o)
            return summed
        parts = self.parts(x, rope=rope, cache=cache, **attending)
        (bias,) = replicated(self.tp, self.out.bias)
        return reduce_bias_dropout_add_norm(parts, bias)[0]


def _rotated(qkv: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """Rotates q and k by their positions, without a gradient; rows beyond the positions are padding."""
    rows = len(positions)
    heads = qkv[:rows, :, :-1]
    rotated = rotate(heads.flatten(1, 2), rope.cos, rope.sin, positions=positions, interleaved=rope.interleaved)
    out = qkv.clone()
    out[:rows, :, :-1] = rotated.view(heads.shape)
    return out


def _kv_heads_error(heads: int, groups: int, size: int) -> str:
    works = [r for r in range(1, heads + 1) if heads % r == 0 and (groups % r == 0 or r % groups == 0)]
    return (
        f"ParallelAttention: num_kv_heads={groups} and tensor-parallel size {size}: one must divide the other;"
        f" use size {', '.join(map(str, works))}"
    )
