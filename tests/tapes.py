"""Tapes of launchers between tests, apart from conftest.py: processes whose kernels are compiled import this."""

from tpfuse.kernels.replay import Replayed
from tpfuse.kernels.runtime.op import OPS


def forget() -> None:
    """Launchers run anew: a test may have replaced what they ask, or what they allocate with."""
    for op in OPS.values():
        if isinstance(op.launch, Replayed):
            op.launch.forget()
