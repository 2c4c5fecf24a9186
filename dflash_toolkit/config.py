"""Fills frozen dataclasses of options from nested values, and checks every value.

This file knows nothing about drafters; each program declares its own dataclasses and shares groups of options
(`options.py`). `command_line.py` reads flags.
"""

import dataclasses
import difflib
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

C = TypeVar("C")
WANTED = {int: "a whole number", float: "a number", str: "text", bool: "on or off"}


class UserError(Exception):
    """A mistake that the user can fix. The message is one line that names the value and the way out."""


class UnsupportedModel(UserError):
    """A target or drafter that the engine does not support, or not on this device; vLLM or SGLang may.

    Attributes:
        gpus: how many like this one would hold it; 1 if its size is not the problem.
    """

    def __init__(self, message: str, gpus: int = 1) -> None:
        super().__init__(message)
        self.gpus = gpus


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    choices: Sequence[str] | Callable[[], Sequence[str]] = (),
    flag: str | None = None,
    named: bool = False,
    repeatable: bool = False,
    off: bool = False,
    common: bool = False,
    metavar: str = "NAME",
    within: str = "",
) -> Any:
    """Declares a field of a dataclass that the user can set.

    Args:
        help: starts with a noun or a verb; ends with "(default: ...)" if the default is None, empty or not all of it.
        choices: for strings, the allowed values, or a function that returns them.
        flag: its flag, if that is not its name; for an option of a group, a second, short one.
        named: the items of the list are NAME=VALUE, so after its flag only dotted keys are overrides.
        repeatable: for a list, a repeated flag appends instead of replacing.
        off: for a number, `--no-NAME` means 0.
        common: `--help` shows it first, not under "advanced".
        metavar: for strings, what `--help` shows as the value: PATH, NAME, URL, ...
        within: the range of a number, which `Options` checks: `>= 1`, `> 0`, `in [0, 1)` or `in 1..4096`.
    """
    allowed = choices if callable(choices) else lambda: choices
    metadata = {"help": help, "choices": allowed, "flag": flag, "named": named}
    metadata |= {"repeatable": repeatable, "off": off, "common": common, "metavar": metavar, "within": within}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def options(cls: type[C], flat: bool = False) -> Any:
    """A group of options: a dataclass that has a default for each.

    Args:
        flat: its keys are written without the name of the group.
    """
    return dataclasses.field(default_factory=cls, metadata={"flat": flat})


class Options:
    """Base of options with ranges."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Raises ValueError for a number outside the range of its option, or text that is none of its choices."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, within = getattr(self, field.name), field.metadata.get("within")
            if within and value is not None and not _inside(value, within):
                raise ValueError(f"{field.name} is {value}; it must be {within}")
            choices = field.metadata.get("choices", tuple)()
            if choices and isinstance(value, str) and value not in choices:
                raise ValueError(f"{field.name} is {value!r}; it must be one of {', '.join(choices)}")


def _inside(value: float, within: str) -> bool:
    if within.startswith(">"):
        sign, least = within.split()
        return float(least) <= value < math.inf and (sign == ">=" or value > float(least))
    low, high = json.loads(f"[{within[3:].strip('[]()').replace('..', ',')}]")
    return low <= value <= high and not ("(" in within and value == low) and not (")" in within and value == high)


def from_mapping(cls: type[C], values: Mapping[str, Any], where: str = "config") -> C:
    """Builds the dataclass `cls` from nested plain values.

    Args:
        where: the source of the values, which errors name; empty: they do not.

    Raises:
        UserError: unknown key, wrong type, value outside the choices, missing required key, or a `ValueError`
            raised by the dataclass's own `__post_init__` (an impossible combination). It names the key once.
    """
    try:
        return _build(cls, values, "")
    except UserError as error:
        raise UserError(f"{where}: {error}" if where else str(error)) from error


def _build(cls: type[C], values: Any, prefix: str) -> C:
    """Builds the dataclass of an option group. `prefix` starts the group's keys; it ends in a dot or is empty."""
    if not isinstance(values, Mapping):
        raise UserError(f"{prefix.rstrip('.') or 'options'}: expected a mapping of keys to values, got {values!r}")
    rest, fields = dict(values), {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints, known = typing.get_type_hints(cls), set(fields)
    built: dict[str, Any] = {}
    for name, field in list(fields.items()):
        if field.metadata.get("flat"):
            keys = {f.name for f in dataclasses.fields(hints[name])}
            built[name] = _build(hints[name], {key: rest.pop(key) for key in keys if key in rest}, prefix)
            known = known - {name} | keys
            del fields[name]
    for key, value in rest.items():
        if key not in fields:
            raise UserError(f"{prefix}{key}: unknown key{_nearest(str(key), known)}")
        built[key] = _coerce(hints[key], value, f"{prefix}{key}", fields[key].metadata.get("choices", tuple)())
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in built:
            flag = f"--{prefix}{name}".replace("_", "-")
            raise UserError(f"{prefix}{name} is required; give {flag}")
    try:
        return cls(**built)
    except ValueError as error:
        own = re.match(r"\w+", str(error))
        inside = prefix if own and own[0] in fields else ""  # the class may not know in which group it is
        raise UserError(f"{inside}{error}") from error


def _nearest(key: str, known: Any) -> str:
    close = difflib.get_close_matches(key, list(known), n=1)
    return f"; did you mean `{close[0]}`?" if close else f"; known keys: {', '.join(sorted(known))}"


def _coerce(hint: Any, value: Any, where: str, choices: Sequence[str] = ()) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [h for h in typing.get_args(hint) if h is not type(None)]
        return None if value is None else _coerce(inner[0], value, where, choices)
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, f"{where}.")  # type: ignore[arg-type]
    if origin is tuple:
        item = typing.get_args(hint)[0]
        if item in (int, float, bool) and isinstance(value, int | float | str):
            value = [value]  # one number is a list of it: `temperature=0.6`
        if not isinstance(value, list | tuple):
            raise UserError(f"{where}: expected a list, got {value!r}")
        return tuple(_coerce(item, v, f"{where}[{i}]", choices) for i, v in enumerate(value))
    if hint is float and isinstance(value, str):
        # YAML 1.1 reads 6e-4 as a string
        try:
            value = float(value)
        except ValueError:
            raise UserError(f"{where}: expected a number, got {value!r}") from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1e300 else math.inf
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}: expected a finite number, got {value!r}")
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UserError(f"{where}: expected {WANTED[hint]}, got {value!r}")
    if choices and value not in choices:
        raise UserError(f"{where}: {value!r} is not one of {', '.join(choices)}")
    return value


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Reads a YAML mapping; an empty file is an empty mapping. Raises UserError."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"config file {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # no UTF-8, a date that is none, lists in lists
        raise UserError(f"config file {path}: not valid YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"config file {path}: expected a mapping of keys to values")
    return values


def _is_bool(hint: Any) -> bool:
    return bool in (hint, *typing.get_args(hint))


def to_mapping(config: Any) -> dict[str, Any]:
    """Returns the resolved configuration as plain nested values (tuples become lists), ready for JSON or YAML.

    Fields that a class computes itself are left out.
    """

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            found: dict[str, Any] = {}
            for field in dataclasses.fields(value):
                if field.init:
                    item = plain(getattr(value, field.name))
                    found |= item if field.metadata.get("flat") else {field.name: item}
            return found
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list | tuple) else value

    return plain(config)
