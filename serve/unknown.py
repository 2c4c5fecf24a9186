"""Handles the fields of a request body that its model does not declare, at every level of nesting.

An unsupported field that would change the answer is a 400. Any other is ignored: the response lists it in a header, and
the log names it once. With `--strict-parameters` it is a 400 too.
"""

import difflib
import logging
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from .body import Strict
from .protocol import ApiError

HEADER = b"x-dflash-ignored-parameters"
MAX_LISTED = 16  # names in a header
MAX_LOGGED = 256  # names in the log of a process
MAX_NAME = 64  # characters of a name in a header or in the log
log = logging.getLogger("dflash_toolkit.serve")


class Undeclared(NamedTuple):
    """A field that its model does not declare."""

    owner: type[Strict]
    path: str  # of the owner, with a dot at its end; empty for the body
    name: str
    value: Any

    @property
    def shown(self) -> str:
        """Returns the name with its path, safe for headers and logs."""
        return re.sub(r"[^\w.-]", "_", self.path + self.name[:MAX_NAME], flags=re.ASCII)[-MAX_NAME:]

    def refusal(self) -> ApiError | None:
        """Returns the error of an unsupported field, unless its value has no effect."""
        harmless = self.owner.unsupported.get(self.name)
        # compare types too, because 1 == True in Python
        if (
            harmless is None
            or self.value is None
            or any(self.value == v and type(self.value) is type(v) for v in harmless)
        ):
            return None
        message = f"`{self.path}{self.name}` is not supported by this server; omit it"
        return ApiError(400, message, param=self.path + self.name, code="unsupported_parameter")

    @property
    def unknown(self) -> bool:
        return self.name not in self.owner.unsupported and self.name not in self.owner.ignored

    def hint(self, otherwise: str) -> str:
        """Returns which declared name is meant, if one is similar."""
        near = difflib.get_close_matches(self.name[:100], self.owner.model_fields, 1)
        return f"did you mean `{near[0]}`?" if near else otherwise


class UnknownFields:
    """Checks the undeclared fields of bodies.

    Args:
        strict: refuse unknown fields.
    """

    def __init__(self, strict: bool = False) -> None:
        self._strict = strict
        self._logged = set[str]()

    def check(self, body: Strict) -> list[str]:
        """Returns the names of ignored fields, at most `MAX_LISTED`. Raises ApiError (400) if one is refused."""
        ignored = dict[str, Undeclared]()
        for field in undeclared(body):
            if (error := field.refusal()) is not None:
                raise error
            if self._strict and field.unknown:
                name = field.path + field.name[:100]
                message = f"`{name}` is not a parameter of this server; {field.hint('omit it')}"
                raise ApiError(400, message, param=name, code="unknown_parameter")
            if field.unknown and field.value is not None and len(ignored) < MAX_LISTED:
                ignored.setdefault(field.shown, field)
        for name, field in ignored.items():
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(name)
                hint = field.hint("the answer does not depend on it")
                log.warning("requests have the unknown parameter `%s`, which is ignored; %s", name, hint)
        return [*ignored]


def undeclared(model: Strict, path: str = "") -> Iterator[Undeclared]:
    """Yields the undeclared fields of a model and of the models in it."""
    if not model.open:
        yield from (Undeclared(type(model), path, *each) for each in (model.model_extra or {}).items())
    for name, value in vars(model).items():
        items = value if isinstance(value, list) and value and isinstance(value[0], Strict) else [value]
        for item in items:
            if isinstance(item, Strict):
                yield from undeclared(item, f"{path}{name}.")
