"""The public address of :mod:`tpfuse.tools.ledger`."""

from .tools.ledger import *  # noqa: F403
from .tools.ledger import __all__ as __all__
