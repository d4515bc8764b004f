"""tpfuse: fused, tensor-parallel transformer layers that give the same answer however they are split.

The names of :mod:`tpfuse.api` are imported when one of them is first used, so that ``python -m tpfuse`` lists its
commands without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .ranks.split import ON_SPLIT as _ON_SPLIT

if TYPE_CHECKING:
    from .api import *  # noqa: F403
    from .api import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        api = import_module(".api", __name__)
        globals().update(__all__=api.__all__, **{public: getattr(api, public) for public in api.__all__})
        try:
            return globals()[name]
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})


def _replace_in_torch() -> None:
    from .training.foreign.guard import install

    install()


_ON_SPLIT.append(_replace_in_torch)
