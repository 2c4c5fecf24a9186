"""Imports names of a package at their first use: torch and transformers take seconds."""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` (PEP 562) of a package for the names under its `if TYPE_CHECKING`.

    Args:
        package: its `__name__`.
    """
    own = sys.modules[package]
    loader: Any = own.__loader__
    lines = re.findall(r"^    from (\S+) import (.+)$", loader.get_source(package), flags=re.MULTILINE)
    homes = {name: module for module, names in lines for name in names.split(", ")}

    def find(name: str) -> Any:
        if name in homes:
            value = getattr(importlib.import_module(homes[name], package), name)
        elif importlib.util.find_spec(f"{package}.{name}"):
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(own, name, value)  # found without a lookup from now on
        return value

    return find, lambda: sorted({*vars(own), *homes})
