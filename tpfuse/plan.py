"""The public address of :mod:`tpfuse.tools.plan`."""

from .tools.plan import *  # noqa: F403
from .tools.plan import __all__ as __all__
