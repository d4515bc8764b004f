"""Make Triton's interpreter (TRITON_INTERPRET=1) patch ``triton.language`` once a launch. For the tests only.

The interpreter replaces the language's functions by its own before a launch and puts them back after it. It also does
so at every call of a device function, where it finds them replaced already: eight milliseconds that change nothing,
half of the time of a kernel made of small functions. Here the second patching of a module in a launch is skipped, and
the functions to replace are listed once rather than found anew among all members of a module.
"""

import functools
import inspect

import triton.language as tl
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang


@functools.cache
def _languages(fn) -> frozenset:
    """The modules that the interpreter patches for ``fn``: those that its file has imported."""
    return frozenset(value for value in fn.__globals__.values() if value is tl or value is tl.core)


@functools.cache
def _builtins(owner) -> tuple[tuple[str, object], ...]:
    return tuple((name, member) for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member))


def install() -> None:
    if not hasattr(interpreter, "_LangPatchScope"):  # an older Triton, which never puts the functions back
        return
    scope_type, patched = interpreter._LangPatchScope, set()

    class Scope(scope_type):
        def restore(self) -> None:
            patched.clear()  # only a launch restores, so it has ended
            super().restore()

    def patch_lang(fn):
        languages = _languages(fn)
        if languages and languages <= patched:
            return Scope()
        patched.update(languages)
        return _patch_lang(fn)

    def patch_builtin(owner, builder, scope) -> None:
        for name, member in _builtins(owner):
            if getattr(owner, name) is member:
                interpreter._patch_attr(owner, name, member, builder, scope)

    interpreter._LangPatchScope, interpreter._patch_lang, interpreter._patch_builtin = Scope, patch_lang, patch_builtin
