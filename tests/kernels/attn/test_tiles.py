"""Attention in tiles: the definition's values, gradients, and bits that hang on a query's own keys alone.

Spans: tpfuse/kernels/attn/tiles.py.
"""

import pytest
import torch

from tpfuse.kernels.attn.op import attend, attention_fwd
from tpfuse.kernels.attn.options import Options
from tpfuse.kernels.attn.reference import attention_fwd_ref

S, E = 75, 8  # of width 6 products have rows of unequal bits on some processors, which is refused
MASK = torch.arange(S)[None] >= torch.tensor([[3], [0]])
RNG = torch.tensor([5, 2, 0])
FEATURES = {
    "causal": dict(batch=2, causal=True),
    "both sides": dict(batch=2, window=9),
    "window, cap": dict(batch=2, causal=True, window=20, softcap=2.0),
    "padding, dropout": dict(batch=2, causal=True, key_mask=MASK, rng=RNG, p=0.3),
    "packed": dict(cu_seqlens=torch.tensor([2, 5, 70], dtype=torch.int32), causal=True),
}


def qkv_of(batch, seq=S, dtype=torch.float64):
    return torch.randn(seq * batch + 1, 2, 4, E, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("name", FEATURES)
def test_it_is_attention(name):
    options = Options(seq=S, scale=0.4, **FEATURES[name])
    qkv = qkv_of(options.batch)
    for x, right in zip(attention_fwd(qkv, options._replace(tile=12)), attention_fwd_ref(qkv, options), strict=True):
        torch.testing.assert_close(x, right, rtol=1e-12, atol=1e-12)


def test_gradients():
    """In tiles of 12: those of 4 with AVX2 alone, and of 2 with SSE4, have rows of unequal bits and are refused."""
    options = Options(batch=2, seq=13, scale=0.4, causal=True, rng=RNG, p=0.3, leaves=2, tile=12)
    assert torch.autograd.gradcheck(lambda x: attend(x, options), qkv_of(2, 13).requires_grad_(), fast_mode=True)


def test_a_document_is_as_alone():
    options = Options(seq=S, scale=0.4, causal=True, tile=12, cu_seqlens=torch.tensor([2, 70], dtype=torch.int32))
    qkv = qkv_of(1, dtype=torch.float32)
    packed, _ = attention_fwd(qkv, options)
    alone, _ = attention_fwd(qkv[2:70], Options(seq=68, scale=0.4, causal=True, tile=12))
    assert torch.equal(packed[2:70], alone)


def test_a_bias_is_refused():
    with pytest.raises(ValueError, match="attention: an additive bias is not built for batch_invariant"):
        attention_fwd(qkv_of(1), Options(seq=S, tile=12, bias=torch.zeros(1, S, S)))
