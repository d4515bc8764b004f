"""Models of transformers that compute in their parameters' dtype throughout: norms, softmax and the scale of an
embedding are fp32 there, whatever the rest is."""

import functools

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.masking_utils import eager_mask

EXACT = "tpfuse_exact"  # an attention of transformers' own table


def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **options):
    """softmax(cap(q k') + mask) v in the tensors' dtype: [B, H, S, E] -> [B, S, H, E], and no probabilities."""
    softcap = options.get("softcap")
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * scaling
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = scores if mask is None else scores + mask
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register(EXACT, attend)
transformers.AttentionMaskInterface.register(EXACT, eager_mask)


def make_exact(model: nn.Module) -> None:
    """A norm's weight, to which Gemma's adds 1, and the scale, as they are in the parameters' dtype."""
    for part in model.modules():
        name = type(part).__name__
        if name.endswith("RMSNorm"):
            part.register_forward_hook(functools.partial(_norm, 1.0 if name.startswith("Gemma") else 0.0))
        if name.endswith("ScaledWordEmbedding"):
            part.embed_scale.fill_(part.scalar_embed_scale)


def _norm(offset: float, norm: nn.Module, args: tuple[Tensor], rounded: Tensor) -> Tensor:
    (x,) = args
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return F.rms_norm(x, norm.weight.shape, norm.weight + offset, eps)
