"""Self-attention with the heads split over the ranks.

x [m, D] -> qkv [M, G/R, Q + 2, E] -> o [M, H/R E] -> parts [R, m, D] -> sum + bias [m, D]
"""

from torch import Tensor

from ..kernels._op import check
from ..kernels.attention import attention
from ..kernels.norm import Remake
from ..kernels.reduce_bias_dropout_add_norm import reduce_bias_dropout_add_norm
from ..parallel import TensorParallel
from ..sequence_parallel import gather_linear, linear_exchange
from ._cache import KVCache
from ._module import ParallelModule, local, replicated
from .linear import ColumnParallelLinear, RowParallelLinear


class ParallelAttention(ParallelModule):
    """Multi-head (or, with fewer ``num_kv_heads``, grouped-query) attention on rows s * batch + b.

    ``dropout`` is on the probabilities; ``layer`` numbers its masks.  ValueError where heads cannot be split over the ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        tp: TensorParallel | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        layer: int = 0,
        init_std: float = 0.02,
        out_init_std: float | None = None,
        **factory,
    ):
        super().__init__(tp)
        groups = num_heads if num_kv_heads is None else num_kv_heads
        check(hidden_size % num_heads == 0, f"ParallelAttention: hidden_size={hidden_size} is not divisible by num_heads={num_heads}")
        check(num_heads % groups == 0, f"ParallelAttention: num_heads={num_heads} is not divisible by num_kv_heads={groups}")
        self.head_width = hidden_size // num_heads
        self.first_head = self.tp.rank * self.tp.divide(num_heads, "ParallelAttention: num_heads")
        self.tp.divide(groups, "ParallelAttention: num_kv_heads")
        self.causal, self.dropout, self.site = causal, dropout, 3 * layer + 1
        shared = dict(bias=bias, tp=self.tp, **factory)
        self.qkv = ColumnParallelLinear(hidden_size, (groups, num_heads // groups + 2, self.head_width), init_std=init_std, **shared)
        self.out = RowParallelLinear(hidden_size, hidden_size, init_std=init_std if out_init_std is None else out_init_std, **shared)

    def parts(
        self,
        n: Tensor,
        *,
        batch: int,
        seq: int | None = None,
        rng: Tensor | None = None,
        key_mask: Tensor | None = None,
        remake: Remake | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """n [m, D] or expanded [R, m, D] -> parts [R, m, D], to be summed over R and given the bias."""
        qkv = gather_linear(n, *self.qkv.flat(), tp=self.tp, remake=remake)
        qkv = qkv.view(len(qkv), -1, *self.qkv.weight.shape[1:-1])  # a DTensor's first dimension is the whole's
        if cache is not None and cache.length > 0:
            o = cache.attend(qkv, batch)
        else:
            if cache is not None:
                cache.fill(qkv, batch, len(qkv) // batch if seq is None else seq)
            p = self.dropout if self.training else 0.0
            o = attention(
                qkv, batch=batch, seq=seq, causal=self.causal, key_mask=key_mask, p=p, rng=rng, site=self.site, first_head=self.first_head
            )
        return linear_exchange(o, local(self.out.weight), tp=self.tp)

    def forward(
        self, x: Tensor, *, batch: int, seq: int | None = None, rng: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """x [m, D] (without sequence parallelism [M, D]) -> [m, D].

        ``seq`` positions: M // batch unless given; rows beyond seq * batch are padding.  ``attention_mask`` [batch, seq], nonzero where a
        key may be seen.  ``rng`` where dropout is on.
        """
        mask = None if attention_mask is None else attention_mask.bool()
        parts = self.parts(x, batch=batch, seq=seq, rng=rng, key_mask=mask)
        return reduce_bias_dropout_add_norm(parts, *replicated(self.tp, self.out.bias))[0]
