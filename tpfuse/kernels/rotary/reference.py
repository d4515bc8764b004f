"""The rotation of pairs of columns in plain torch, of attention and of the op alone; on a CPU in memory that stays in
the cache.  The equations stand in op.py."""

import torch
from torch import Tensor

from ..runtime.op import has_numbers

ROTATED = 1 << 16  # elements that a thread of a CPU rotates at a time


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates the first 2F columns of x [..., E]: column i with i + F, interleaved 2i with 2i + 1.

    cos and sin [..., F] have as many dimensions as x, of the same size or 1.  The arithmetic is in their dtype; the
    result is rounded once, to x's dtype.
    """
    W = 2 * cos.shape[-1]
    if x.is_cpu and x.numel() > ROTATED and has_numbers(x) and not x.requires_grad:
        return _rotate_in_cache(x, cos, sin, interleaved)
    a, b = _pairs(x[..., :W].to(cos.dtype), W, interleaved)
    both = a * cos - b * sin, b * cos + a * sin
    rotated = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    return torch.cat([rotated.to(x.dtype), x[..., W:]], -1)


def _pairs(x: Tensor, W: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Returns the columns of x that are rotated with one another, views."""
    return (x[..., :W:2], x[..., 1:W:2]) if interleaved else (x[..., : W // 2], x[..., W // 2 : W])


def _rotate_in_cache(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Does what :func:`rotate` does, with its bits, a few positions at a time."""
    W, y = 2 * cos.shape[-1], x.new_empty(x.shape)
    y[..., W:] = x[..., W:]
    dim = max(range(x.dim() - 1), key=lambda i: (cos.shape[i] == x.shape[i]) * x.shape[i])  # of positions
    step = max(1, ROTATED * torch.get_num_threads() * x.shape[dim] // x.numel())
    rooms = x.new_empty(0)
    for x_rows, y_rows, c, s in zip(*(t.split(step, dim) for t in (x, y, cos, sin)), strict=True):
        (xa, xb), (ya, yb) = (_pairs(t, W, interleaved) for t in (x_rows, y_rows))
        if rooms.shape[1:] != xa.shape:
            rooms = torch.empty(4, *xa.shape, dtype=cos.dtype)
        a, b, by_cos, by_sin = rooms
        a.copy_(xa)
        b.copy_(xb)
        ya.copy_(torch.mul(a, c, out=by_cos).sub_(torch.mul(b, s, out=by_sin)))
        yb.copy_(torch.mul(b, c, out=by_cos).add_(torch.mul(a, s, out=by_sin)))
    return y
