"""Handles the fields of a request body that its model does not declare, at every level of nesting.

An unsupported field that would change the answer is a 400. Any other is ignored: the response lists it in a header, and
the log names it once. With `--strict-parameters` it is a 400 too.
"""

import difflib
import functools
import itertools
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .body import Strict
from .protocol import ApiError, clipped

HEADER = b"x-dflash-ignored-parameters"
MAX_LISTED = 16  # names in a header
MAX_LOGGED = 256  # names in the log of a process
MAX_NAME = 64  # characters of a name in a header or in the log
log = logging.getLogger("dflash_toolkit.serve")


class Undeclared(NamedTuple):
    """A field that its model does not declare."""

    owner: type[Strict]
    path: str  # path of the owner, with a dot at its end; empty for the body
    name: str
    value: Any

    def refusal(self) -> ApiError | None:
        """Returns the error of an unsupported field, unless its value has no effect."""
        value, harmless = self.value, self.owner.unsupported.get(self.name)
        # compare types too, because 1 == True in Python
        if harmless is None or value is None or any(value == v and type(value) is type(v) for v in harmless):
            return None
        message = f"`{self.path}{self.name}` is not supported by this server; omit it"
        return ApiError(400, message, param=self.path + self.name, code="unsupported_parameter")

    @property
    def unknown(self) -> bool:
        return self.name not in self.owner.unsupported and self.name not in self.owner.ignored

    @property
    def reason(self) -> str:
        return _reason(self.owner, self.name[:MAX_NAME])


class UnknownFields:
    """Refuses or ignores the fields that have no effect.

    Args:
        strict: refuse them.
    """

    def __init__(self, strict: bool = False) -> None:
        self._strict = strict
        self._logged = set[str]()

    def check(self, body: Strict) -> list[str]:
        """Returns the unknown fields of a body, see `report`. Raises ApiError (400) if one is refused."""
        unknown = dict[str, Undeclared]()
        for field in undeclared(body):
            if (error := field.refusal()) is not None:
                raise error
            if field.unknown and (self._strict or field.value is not None) and len(unknown) < MAX_LISTED:
                unknown.setdefault(field.path + field.name[:MAX_NAME], field)
        return self.report({name: field.reason for name, field in unknown.items()})

    def report(self, fields: Mapping[str, str]) -> list[str]:
        """Logs the names of fields without effect, each once, and returns those that the response lists.

        Args:
            fields: names with the reason.

        Raises:
            ApiError: (400) there is one, and the server is strict.
        """
        listed = []
        for name, reason in itertools.islice(fields.items(), MAX_LISTED):
            if self._strict:
                raise ApiError(400, f"`{name}` {reason}", param=name, code="unknown_parameter")
            listed.append(re.sub(r"[^\w.-]", "_", clipped(name, MAX_NAME), flags=re.ASCII))
            if listed[-1] not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(listed[-1])
                log.warning("ignored in requests: `%s` %s", listed[-1], reason)
        return listed


@functools.lru_cache(1024)
def _reason(owner: type[Strict], name: str) -> str:
    near = difflib.get_close_matches(name, owner.model_fields, 1)
    return f"is not a parameter of this server; {f'did you mean `{near[0]}`?' if near else 'omit it'}"


def undeclared(model: Strict, path: str = "") -> Iterator[Undeclared]:
    """Yields the undeclared fields of a model and of the models in it."""
    if not model.open:
        yield from (Undeclared(type(model), path, *each) for each in (model.model_extra or {}).items())
    given = model.model_fields_set
    for name, value in vars(model).items():
        if name not in given:  # a default has no fields
            continue
        items = value if isinstance(value, list) and value and isinstance(value[0], Strict) else [value]
        for item in items:
            if isinstance(item, Strict):
                yield from undeclared(item, f"{path}{name}.")
