"""What a split of a model over machines would take: the collectives and the networks that it runs on."""

from .collectives import ALL_REDUCE, OWN, Link, Message, cheapest, seconds

__all__ = ["ALL_REDUCE", "OWN", "Link", "Message", "cheapest", "seconds"]
