"""Bytes, flops, memory and step times, counted and predicted.  The code is in ``tpfuse/tools/ledger/``."""

from .tools.ledger import *  # noqa: F403
from .tools.ledger import __all__ as __all__
