"""The base of the models that parse request bodies."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A body, or an object in a body. Keeps undeclared fields for `unknown.py`."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, extra="allow")

    open: ClassVar[bool] = False  # every undeclared field has a meaning
    ignored: ClassVar[frozenset[str]] = frozenset()  # undeclared fields that many clients send and that change nothing
    # undeclared field -> values that have no effect; any other value is refused
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
