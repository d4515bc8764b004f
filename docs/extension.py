"""What mkdocstrings needs to know about this package."""

import re

from griffe import Alias, Extension, Module, Object

ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")  # Sphinx's :class:`~a.b.C`


class Exported(Extension):
    """A package that exports an object with the name of its module (``from .rope import rope``) has the object under
    that name, as it has for Python; Sphinx's roles become plain code; a package's list of its files is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.shadowed: list[tuple[Module, str, Object]] = []

    def on_object(self, *, obj: Object, **_) -> None:
        if obj.docstring is not None:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            is_package = isinstance(obj, Module) and obj.is_init_module
            obj.docstring.value = text.partition("\n\n")[0] if is_package else text

    def on_package(self, *, pkg: Module, **_) -> None:
        packages = pkg, *(member for member in pkg.members.values() if isinstance(member, Module))
        for package in packages:
            for name in set(package.exports or ()) & set(package.imports):
                if isinstance(package.members.get(name), Module):
                    path = package.imports[name].removeprefix(f"{pkg.name}.")
                    self.shadowed.append((package, name, pkg[path]))
        for (
            package,
            name,
            exported,
        ) in self.shadowed:  # after all have been found, since a path may lead through another
            package.members[name] = Alias(name, exported, parent=package)
