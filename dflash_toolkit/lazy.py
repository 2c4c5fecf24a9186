"""Names of a package that are imported when somebody asks for them: torch and transformers take seconds."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for a package (PEP 562). The package's own modules are found without being listed.

    Args:
        package: its `__name__`.
        modules: relative module, as an import statement has it -> the names that come from it.
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name in homes:
            value = getattr(importlib.import_module(homes[name], package), name)
        elif importlib.util.find_spec(f"{package}.{name}"):
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)  # not asked for again
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return find, names
