"""Self-attention with the heads split over the ranks.

x [m, D] -> qkv [M, G/R, Q + 2, E] -> o [M, H/R E] -> parts [R, m, D] -> sum + bias [m, D]

Where kv heads are fewer than ranks (G < R), R/G ranks in a row hold the same kv head beside query heads of their own,
and its gradient is summed over them.  With ``tp.bitwise`` the same holds of leaves, V in place of R, at every R: each
has its copy of a kv head, and a rank has V/R leaves.
"""

import torch
from torch import Tensor, nn

from ..kernels.attn.op import attend
from ..kernels.attn.options import Options, as_key_mask
from ..kernels.norm import Recompute, reduce_bias_dropout_add_norm
from ..kernels.rotary.op import rope as rotate
from ..kernels.runtime.main_grad import derived
from ..kernels.runtime.philox import active_rng, threshold
from ..kernels.runtime.rules import POSITIVE, check_numbers
from ..parallel import BITWISE, TensorParallel
from ..sequence_parallel import gather_attention_exchange
from ..sequence_parallel.context import HeadSplit, attend_pieces
from .cache import KVCache, Seeing
from .call import CALL, Call, Rope, required
from .hooks import hooked
from .linear import ColumnParallelLinear, ColumnProjection, RowParallelLinear
from .module import Origin, ParallelModule, check_rows, leaf_slices, local, on_pieces, replicated
from .norm import HeadNorm, RMSNorm, SplitNorm, normed
from .shapes import INIT, AttentionShape, Init, check_heads


class CopiedKV(ColumnProjection):
    """The qkv projection where ``copies`` leaves in a row share a kv head: q [H, E, D], kv [G, 2, E, D] and biases.

    Without ``tp.bitwise`` a rank is a leaf.  ``heads`` query heads share each of ``groups`` kv heads.  Initial values
    are those of qkv [G, Q + 2, E, D], the layout for fewer ranks.
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
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(tp)
        self.in_features = width
        self.copies, whole = copies, (groups, heads + 2, head_width)
        q, kv = (groups * heads, head_width), (groups, 2, head_width)

        def add(leaf: str, name: str, inner: tuple[int, ...], init: float | str) -> None:
            of_q, of_kv = (Origin(leaf, whole + inner, start) for start in (0, heads))
            self.add_parameter(f"q{name}", q + inner, 0, init, origin=of_q, dtype=dtype, device=device)
            self.add_parameter(
                f"kv{name}", kv + inner, 0, init, origin=of_kv, copies=copies, dtype=dtype, device=device
            )

        add("weight", "", (width,), init_std)
        if bias:
            add("bias", "_bias", (), "zeros")
        else:
            self.q_bias = self.kv_bias = None
        self.initialize_alone()

    def flat(self) -> tuple[Tensor, Tensor | None]:
        """Returns weight [(H/R + 2 L) E, D] of the L leaves here, each its query heads, k and v, and the bias."""
        weight = derived(self._joined, local(self.q), local(self.kv))
        if self.q_bias is None or self.kv_bias is None:
            return weight, None
        return weight, self._joined(local(self.q_bias), local(self.kv_bias))

    def _joined(self, q: Tensor, kv: Tensor) -> Tensor:
        q, kv = on_pieces(q, self.tp), on_pieces(kv, self.tp)
        copies = torch.cat(leaf_slices(kv, self.tp, self.copies))
        return torch.cat([q.unflatten(0, (len(copies), -1)), copies], 1).flatten(0, 2)


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

    repr_fields = "head_width", "causal", "window", "scale", "softcap", "dropout"
    has_router = False
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
        causal: bool = True,
        window: int | None = None,
        qk_norm: bool = False,
        eps: float = 1e-5,
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
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(tp)
        shape = AttentionShape(
            hidden_size, num_heads, num_kv_heads, head_width, causal=causal, window=window, qk_norm=qk_norm,
            qk_norm_kind=qk_norm_kind, qk_norm_all=qk_norm_all, eps=eps, scale=scale, softcap=softcap, dropout=dropout,
            bias=bias, out_bias=out_bias,
        )  # fmt: skip
        self._build(shape, layer, Init(init_std, out_init_std, dtype, device))

    @classmethod
    def of(
        cls, shape: AttentionShape, *, tp: TensorParallel | None = None, layer: int = 0, init: Init = INIT
    ) -> "ParallelAttention":
        """Returns the layer of a shape; ``layer`` numbers its dropout masks."""
        attention = cls.__new__(cls)
        ParallelModule.__init__(attention, tp)
        attention._build(shape, layer, init)
        return attention

    def _build(self, shape: AttentionShape, layer: int, init: Init) -> None:
        D, H, tp = shape.hidden_size, shape.num_heads, self.tp
        groups = H if shape.num_kv_heads is None else shape.num_kv_heads
        check_heads("ParallelAttention", D, H, groups, head_width=shape.head_width)
        threshold(shape.dropout)
        numbers = dict(scale=shape.scale, softcap=shape.softcap)
        check_numbers("ParallelAttention", numbers, dict(scale=POSITIVE, softcap=POSITIVE))
        self.scale, self.softcap = shape.scale, shape.softcap
        self.causal, self.window, self.dropout = shape.causal, shape.window, shape.dropout
        self.width, self.layer = D, layer
        self.head_width = E = D // H if shape.head_width is None else shape.head_width
        self.first_head = tp.rank * tp.divide_leaves(H, "ParallelAttention: num_heads")
        heads, dtype, device = H // groups, init.dtype, init.device
        copies = 1
        if groups % tp.all_leaves == 0:
            self.groups, self.heads_per_group = groups // tp.size, heads + 2  # of each: query heads, k and v
            self.qkv = ColumnParallelLinear(
                D, (groups, heads + 2, E), shape.bias, tp=tp, init_std=init.std, dtype=dtype, device=device
            )
        else:
            if tp.all_leaves % groups:
                raise ValueError(_kv_heads_error(H, groups, tp))
            copies = tp.all_leaves // groups
            self.groups, self.heads_per_group = max(tp.leaves, 1), heads // copies + 2
            self.qkv = CopiedKV(
                D, groups=groups, heads=heads, head_width=E, copies=copies, bias=shape.bias, tp=tp, init_std=init.std,
                dtype=dtype, device=device,
            )  # fmt: skip
        if tp.cp_kind != "keys":
            HeadSplit(self.groups, self.heads_per_group - 2, tp.cp_size).check("ParallelAttention")
        self.q_norm = self.k_norm = None
        if shape.qk_norm and shape.qk_norm_all:
            self.q_norm, self.k_norm = (
                SplitNorm(width * E, shape.eps, kind=shape.qk_norm_kind, copies=n, tp=tp, dtype=dtype, device=device)
                for width, n in ((H, 1), (groups, copies))
            )
        elif shape.qk_norm:
            self.q_norm, self.k_norm = (
                HeadNorm(E, shape.eps, kind=shape.qk_norm_kind, tp=tp, dtype=dtype, device=device) for _ in range(2)
            )
        out_bias = shape.bias if shape.out_bias is None else shape.out_bias
        self.out = RowParallelLinear(H * E, D, out_bias, tp=tp, init_std=init.output_std, dtype=dtype, device=device)

    @property
    def copies(self) -> int:
        """The number of gradients of n that come back unsummed."""
        return self.tp.row_shards

    @property
    def in_one(self) -> bool:
        """True if nothing but rotary positions stands between the projections and attention."""
        return self.q_norm is None and self.qkv.adapter is None and self.out.adapter is None

    @property
    def out_bias(self) -> Tensor | None:
        """Bias [D], added once to the sum of the parts."""
        return self.out.bias

    def options(self, rows: int, call: Call) -> Options:
        """Returns attention's options of a call over ``rows`` rows, all ranks' together."""
        p = self.dropout if self.training else 0.0
        options = Options(
            key_mask=call.key_mask, cu_seqlens=call.cu_seqlens, rng=active_rng("attention", p, call.rng),
            batch=call.batch, seq=call.positions(rows, self.tp),
            max_seqlen=call.max_seqlen, causal=self.causal, window=self.window,
            scale=self.head_width**-0.5 if self.scale is None else self.scale, softcap=self.softcap, p=p,
            site=call.site("probabilities", self.layer, p), first_head=self.first_head, leaves=self.tp.leaves,
            tile=self.tp.row_tile,
        )  # fmt: skip
        rope = call.rotation(self.window)
        if rope is None:
            return options
        return options._replace(cos=rope.cos, sin=rope.sin, positions=rope.positions, interleaved=rope.interleaved)

    def parts(self, n: Tensor, recompute: Recompute | None = None, call: Call = CALL) -> Tensor:
        """n [m, D] or expanded [R, m, D] -> parts [R, m, D], to be summed over R and given the bias.

        ``recompute``: n is recomputed in backward.
        """
        if self.in_one and call.cache is None:
            weights = *self.qkv.flat(), on_pieces(self.out.weight, self.tp)
            heads = self.heads_per_group, self.head_width
            options = self.options(n.shape[-2] * self.tp.row_shards, call)
            return gather_attention_exchange(n, *weights, heads=heads, options=options, tp=self.tp, recompute=recompute)
        return self.out.parts(self._attend(self.qkv.project(n, recompute), call))

    def _attend(self, qkv: Tensor, call: Call) -> Tensor:
        """Output of the qkv projection [M, (H/R + 2 G/R) E] -> o [M, H/R E]"""
        qkv = qkv.unflatten(1, (-1, self.heads_per_group, self.head_width))
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.split([self.heads_per_group - 2, 1, 1], 2)
            qkv = torch.cat([*normed(self.q_norm, self.k_norm, q, k), v], 2)
        cache, rope = call.cache, call.rotation(self.window)
        if cache is None:
            return attend_pieces(qkv, self.options(qkv.shape[0], call), self.tp)
        if rope is not None:  # the cache holds keys that are rotated already
            if rope.positions is None:
                raise ValueError("ParallelAttention: with a cache, rope needs positions")
            qkv, call = rotated(qkv, rope, rope.positions), call._replace(rope=None)
        return self.attend_with_cache(qkv, cache, call)

    def attend_with_cache(self, qkv: Tensor, cache: KVCache, call: Call) -> Tensor:
        """Stores the next positions, and attends from them: qkv [M, G/R, Q + 2, E], normed and rotated -> o [M,
        H/R E]."""
        seq = qkv.shape[0] // call.batch if call.seq is None else call.seq
        if cache.length > 0:
            seeing = Seeing(self.window, self.scale, self.softcap)
            return cache.attend(qkv, call.batch, seq, seeing, leaves=self.tp.leaves, tile=self.tp.row_tile)
        cache.fill(qkv, call.batch, seq)
        return attend(qkv, self.options(qkv.shape[0], call))

    def forward(
        self,
        x: Tensor,
        *,
        batch: int | None = None,
        seq: int | None = None,
        rng: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        rope: Rope | None = None,
        cache: KVCache | None = None,
        call: Call | None = None,
    ) -> Tensor:
        """x [m, D] (without sequence parallelism [M, D]) -> [m, D].

        ``seq`` positions: M // batch unless given; rows beyond seq * batch are padding.  ``attention_mask`` [batch,
        seq], nonzero where a key may be seen; ``cu_seqlens`` int32 [N + 1], the bounds of packed documents (batch 1).
        ``rng`` where dropout is on.  ``cache``: of generation.  ``call`` holds all of these instead.  ValueError for an
        x of other dimensions, or rows that do not fit ``batch``.
        """
        if call is None:
            mask = as_key_mask("ParallelAttention: attention_mask", attention_mask)
            call = Call(
                required("ParallelAttention", batch), seq, rng, mask, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen,
                rope=rope, cache=cache,
            )  # fmt: skip
        check_rows("ParallelAttention", x, self.width, tp=self.tp, batch=call.batch, seq=call.seq)
        if hooked(self):
            return self.out(self._attend(self.qkv(x), call))
        (bias,) = replicated(self.tp, self.out.bias)
        return reduce_bias_dropout_add_norm(self.parts(x, call=call), bias, leaves=self.tp.row_leaves)[0]


def rotated(qkv: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """Rotates q and k by their positions, without a gradient; rows beyond the positions are padding."""
    rows = len(positions)
    heads = qkv[:rows, :, :-1]
    turned = rotate(heads.flatten(1, 2), rope.cos, rope.sin, positions=positions, interleaved=rope.interleaved)
    result = qkv.clone()
    result[:rows, :, :-1] = turned.view(heads.shape)
    return result


def _kv_heads_error(heads: int, groups: int, tp: TensorParallel) -> str:
    name, got, sizes = "size", f"tensor-parallel size {tp.size}", [*range(1, min(heads, 4 * tp.size) + 1)]
    if tp.bitwise is not None:
        name, got, sizes = "bitwise", f"bitwise={tp.bitwise}", [*BITWISE]
    works = [r for r in sizes if heads % r == 0 and (groups % r == 0 or r % groups == 0)]
    return (
        f"ParallelAttention: num_kv_heads={groups} and {got}: one must divide the other;"
        f" use {name} {', '.join(map(str, works))}"
    )
