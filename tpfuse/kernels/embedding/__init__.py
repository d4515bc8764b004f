"""The lookup in a slice of a table."""

from .op import embedding

__all__ = ["embedding"]
