"""Attention on the fused qkv."""

from .op import attention

__all__ = ["attention"]
