"""The one place that imports Triton.  Where it is absent (macOS, Windows) kernels can still be defined; launching one
raises."""

import copy
from typing import Any, NoReturn

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    AVAILABLE = True
except ImportError:  # pragma: no cover - held by a test that blocks the import
    AVAILABLE = False

    class _Absent:
        """Stands in for ``triton`` and ``triton.language`` while kernels are being defined."""

        constexpr = int

        def jit(self, kernel: Any = None, **options: Any) -> Any:
            return self.jit if kernel is None else _AbsentKernel(kernel.__name__)

        def __getattr__(self, name: str) -> NoReturn:
            raise ImportError(
                f"tpfuse: triton.{name} is needed here, and Triton is not installed; CPU tensors do not need it"
            )

    class _AbsentKernel:
        def __init__(self, name: str):
            self.name = name

        def __getitem__(self, grid: Any) -> NoReturn:
            raise ImportError(
                f"tpfuse: kernel {self.name} needs Triton, which is not installed; CPU tensors do not need it"
            )

    triton = tl = TensorDescriptor = _Absent()


def hooked() -> bool:
    """Returns whether hooks of Triton's, as profilers set them, are to be called at every start of a kernel."""
    runtime = triton.knobs.runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)  # a chain of hooks, or one


def started_by(launcher: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Returns the compiled function that a launcher of Triton's calls for ``args``, and what it calls it with, which
    spares the host a microsecond a start; the launcher itself where a kernel needs memory that it allocates.

    A copy of the launcher is asked, since what it adds to ``args`` differs from one Triton to the next; it hands them
    on as they are, so that anything may stand for an address or a stream.
    """
    if any(getattr(launcher, f"{kind}_scratch_size", True) for kind in ("global", "profile")):
        return launcher, args
    called: list[tuple[Any, ...]] = []
    probe = copy.copy(launcher)
    probe.launch = lambda *parameters: called.append(parameters)
    probe(*args)
    return launcher.launch, called[0]


__all__ = ["AVAILABLE", "TensorDescriptor", "hooked", "started_by", "tl", "triton"]
