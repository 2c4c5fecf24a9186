"""JSON by a schema of the project."""

import functools
from collections.abc import Callable
from typing import Any

from jsonschema import Draft202012Validator


@functools.cache
def _validator(schema: Callable[[], dict[str, Any]]) -> Draft202012Validator:
    Draft202012Validator.check_schema(schema())  # a tenth of a second
    return Draft202012Validator(schema())


def validate(values: Any, schema: Callable[[], dict[str, Any]]) -> None:
    """Raises jsonschema.ValidationError."""
    _validator(schema).validate(values)
