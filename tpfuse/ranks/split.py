"""Calls for the moment when parameters are first split over ranks."""

from collections.abc import Callable

ON_SPLIT: list[Callable[[], None]] = []  # called when a parameter of which ranks hold slices is made or unpickled
