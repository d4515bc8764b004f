"""The public address of :mod:`tpfuse.tools.bench`: what a user's own benchmark of an op imports."""

from .tools.bench import *  # noqa: F403
from .tools.bench import __all__ as __all__
