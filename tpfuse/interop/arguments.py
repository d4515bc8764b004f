"""The arguments of a call of a class of transformers, by their names."""

import functools
import inspect
from typing import Any, NamedTuple


class ForwardSignature(NamedTuple):
    """The signature of a forward, and the name of its ``**kwargs``; "" for none."""

    signature: inspect.Signature
    kwargs_name: str

    @staticmethod
    @functools.cache
    def of(original: Any) -> "ForwardSignature":
        """Returns that of a class's forward."""
        signature = inspect.signature(original.forward)
        kwargs = (p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD)
        return ForwardSignature(signature, next(kwargs, ""))

    def bind(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Returns the arguments of a call by name; TypeError, Python's own, for ones that do not fit."""
        arguments = dict(self.signature.bind(module, *args, **kwargs).arguments)
        del arguments[next(iter(self.signature.parameters))]
        return arguments | arguments.pop(self.kwargs_name, {})
