"""Strict configuration: frozen dataclasses filled from a YAML file, flags and `key=value` overrides.

Every command has the same form: `command [--flag VALUE ...] [--config FILE] [key=value ...]`. The later source
wins: defaults, then the file, then flags, then overrides. A typo is one line that names the key and its nearest
neighbour. This file knows nothing of drafters; each program declares its own dataclasses.
"""

import argparse
import dataclasses
import difflib
import io
import logging
import math
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

C = TypeVar("C")


class UserError(Exception):
    """A mistake the user can mend. The message is one line that names the value and the way out."""


def knob(
    default: Any = dataclasses.MISSING,
    help: str = "",
    choices: Sequence[str] = (),
    flag: str | None = None,
    named: bool = False,
) -> Any:
    """A dataclass field.

    Args:
        choices: for strings, the values allowed.
        flag: if it is not the field's name.
        named: the items of the list are NAME=VALUE, so behind its flag only dotted keys are overrides.
    """
    metadata = {"help": help, "choices": tuple(choices), "flag": flag, "named": named}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def group(cls: type[C], help: str = "") -> Any:
    """A nested group of knobs with the group's own defaults."""
    return dataclasses.field(default_factory=cls, metadata={"help": help, "choices": ()})


def from_mapping(cls: type[C], values: dict[str, Any], where: str = "config") -> C:
    """Build the dataclass `cls` from nested plain values.

    Raises:
        UserError: unknown key, wrong type, value outside the choices, missing required key, or a `ValueError`
            raised by the dataclass's own `__post_init__` (an impossible combination).
    """
    if not isinstance(values, dict):
        raise UserError(f"{where}: expected a mapping of keys to values, got {values!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    built: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            raise UserError(f"{where}.{key}: unknown key{_nearest(str(key), fields)}")
        built[key] = _coerce(hints[key], value, f"{where}.{key}", fields[key].metadata.get("choices", ()))
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in built:
            raise UserError(f"{where}.{name}: required, but not given")
    try:
        return cls(**built)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


def _nearest(key: str, known: Any) -> str:
    close = difflib.get_close_matches(key, list(known), n=1)
    return f"; did you mean `{close[0]}`?" if close else f"; known keys: {', '.join(sorted(known))}"


def _coerce(hint: Any, value: Any, where: str, choices: Sequence[str] = ()) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [h for h in typing.get_args(hint) if h is not type(None)]
        return None if value is None else _coerce(inner[0], value, where, choices)
    if dataclasses.is_dataclass(hint):
        return from_mapping(hint, value, where)  # type: ignore[arg-type]
    if origin is tuple:
        item = typing.get_args(hint)[0]
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
        raise UserError(f"{where}: expected {hint.__name__}, got {value!r}")
    if choices and value not in choices:
        raise UserError(f"{where}: {value!r} is not one of {', '.join(choices)}")
    return value


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML mapping; an empty file is an empty mapping. Raises UserError."""
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


def _assign(values: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise UserError(f"{dotted}: `{parent}` holds a value, not a group")
    values[last] = value


def parse_cli(cls: type[C], argv: Sequence[str] | None, prog: str, description: str) -> C:
    """Parse `--flag`s for the top-level knobs, `--config FILE`, and `key=value` overrides into `cls`.

    Raises:
        UserError: whatever `from_mapping` and `read_yaml` raise, an unknown flag, a flag without its value, or an
            override without `=`.
        SystemExit: code 0 for `--help`.
    """
    return from_mapping(cls, *given_values(cls, argv, prog, description))


def given_values(cls: Any, argv: Sequence[str] | None, prog: str, description: str) -> tuple[dict[str, Any], str]:
    """What `parse_cli` builds from: the values given, unchecked and nested, and a name for their source."""
    parser = _Parser(
        prog=prog,
        description=description,
        epilog=_describe_keys(cls),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            continue
        flag = "--" + (field.metadata.get("flag") or field.name.replace("_", "-"))
        text = field.metadata.get("help", "").replace("%", "%%") + _default_note(field)
        hint = hints[field.name]
        if typing.get_origin(hint) is tuple:
            parser.add_argument(flag, dest=field.name, nargs="+", metavar="VALUE", help=text)
        elif bool in (hint, *typing.get_args(hint)):
            parser.add_argument(flag, dest=field.name, action=argparse.BooleanOptionalAction, help=text)
        else:
            parser.add_argument(flag, dest=field.name, metavar="VALUE", help=text)
    parser.add_argument("--config", metavar="YAML", help="file with any of the keys below")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="any key below, dots for groups")
    found, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        raise UserError(_unknown_flag(unknown[0].partition("=")[0], parser, cls, prog))
    given = vars(found)

    config_file = given.pop("config", None)
    overrides = given.pop("overrides", [])
    named = {field.name for field in dataclasses.fields(cls) if field.metadata.get("named")}
    for name in [n for n in given if typing.get_origin(hints[n]) is tuple]:
        # `--data a.jsonl b.jsonl steps=10`: argparse gives the override to the list flag before it
        strays = [v for v in given[name] if _is_override(cls, v, dotted=name in named)]
        given[name] = [v for v in given[name] if v not in strays]
        overrides = [*strays, *overrides]
    values: dict[str, Any] = read_yaml(config_file) if config_file else {}
    for name, value in given.items():
        values[name] = _from_text(hints[name], value)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise UserError(f"{override!r}: expected key=value (see {prog} --help)")
        _assign(values, key, _from_text(_hint_of(cls, key), text))
    return values, config_file or prog


class _Parser(argparse.ArgumentParser):
    """One line for a mistake, like all others of the command, instead of the usage and an exit."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))


def _unknown_flag(flag: str, parser: argparse.ArgumentParser, cls: Any, prog: str) -> str:
    """What is wrong with a flag that is none, and which was meant: another, or a key of a group."""
    flags = [option for action in parser._actions for option in action.option_strings]
    keys = [key for key, _ in _grouped(cls)]
    word = flag.lstrip("-").replace("-", "_")
    # `--epochs 3` means optim.epochs=3, `--optim.epochs 3` too
    names = {key: key if "." in word else key.rpartition(".")[2] for key in keys}
    meant: list[str] = []
    if word not in names.values():
        meant = difflib.get_close_matches(flag, flags, n=1)
    if not meant and (close := difflib.get_close_matches(word, list(names.values()), n=1)):
        meant = [f"{key}=VALUE" for key in keys if names[key] == close[0]]
    return f"{flag}: unknown flag; " + (f"did you mean {' or '.join(meant)}?" if meant else f"see {prog} --help")


def _from_text(hint: Any, text: Any) -> Any:
    """What was typed, read as YAML unless the knob wants text: `--port 8000` is an int, `--target 7` is a name."""
    if isinstance(text, list):  # a list flag, one item a word
        return [_from_text(typing.get_args(hint)[0], item) for item in text]
    wants_text = hint is str or (typing.get_origin(hint) is not tuple and str in typing.get_args(hint))
    if not isinstance(text, str) or (wants_text and (hint is str or text != "null")):
        return text
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that is none, lists in lists
        raise UserError(f"{text[:80]!r}: not a value ({' '.join(str(error).split())})") from error


def _is_override(cls: Any, item: str, dotted: bool) -> bool:
    key, equals, _ = item.partition("=")
    return bool(equals) and ("." in key or not dotted) and _hint_of(cls, key) is not None


def _hint_of(cls: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        if not dataclasses.is_dataclass(cls):
            return None
        cls = typing.get_type_hints(cls).get(part)
    return cls


def _default_note(field: Any) -> str:
    if field.default is dataclasses.MISSING:
        return " (required)"
    unset = field.default is None or field.default == () or field.default is False
    return "" if unset else f" (default: {field.default})"


def _describe_keys(cls: Any) -> str:
    lines = ["keys for --config and key=value:"]
    for key, field in _grouped(cls):
        note = _default_note(field) or " (default: none)"
        lines.append(f"  {key:<30} {field.metadata['help']}{note}")
    return "\n".join(lines) if len(lines) > 1 else ""


def _grouped(cls: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of groups, dotted, each with its field."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _grouped(hints[field.name], f"{prefix}{field.name}.")
        elif prefix:
            yield f"{prefix}{field.name}", field


def to_mapping(config: Any) -> dict[str, Any]:
    """The resolved configuration as plain nested values (tuples become lists), ready for JSON or YAML.

    What a class works out by itself, and does not take, is left out.
    """

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list | tuple) else value

    return plain(config)


def run_command(command: Callable[[], int | None]) -> int:
    """Run a program's body: a UserError, or too little memory, is one line and exit code 2, Ctrl-C is 130."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no Greek ends no run
    # the hub's client would say each of its tries; what comes of them is one line
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    try:
        return command() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        said = " ".join(str(error).split())
        if type(error).__name__ == "OutOfMemoryError":  # PyTorch's, which this module does without
            said = said.partition(" Of the allocated")[0].partition(" Including")[0]
            way_out = "Take a larger GPU, or a smaller model, batch or context"
        elif "DefaultCPUAllocator" in said:  # on a CPU it has no class of its own
            said = f"this machine's memory does not suffice ({said.partition('DefaultCPUAllocator: ')[2]})."
            way_out = "Take a larger machine, or a smaller model, batch or context"
        else:
            raise
        print(f"error: {said} {way_out}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run the same command again to resume", file=sys.stderr)
        return 130
