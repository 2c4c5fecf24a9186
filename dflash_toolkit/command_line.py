"""Reads command lines into the dataclasses of `config.py`, and runs a program's body.

Every command has the same form: `command [--option VALUE ...] [--config FILE] [key=value ...]`. The later source
wins: defaults, then the file, then flags, then overrides. An option of a group has the key `group.option` and the flag
`--group.option VALUE`. An error is one line that names the option as the user typed it.
"""

import argparse
import dataclasses
import difflib
import io
import logging
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import yaml

from .config import UserError, _is_bool, from_mapping, read_yaml
from .version import __version__

C = TypeVar("C")
ON_OFF = "{on,off}"


class Option(NamedTuple):
    """An option of a command."""

    field: Any  # the dataclass's
    hint: Any  # its type


def list_options(cls: Any, prefix: str = "") -> Iterator[tuple[str, Option]]:
    """Every option of a command, by its dotted key."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from list_options(hints[field.name], prefix + ("" if field.metadata["flat"] else f"{field.name}."))
        elif "help" in field.metadata:
            yield prefix + field.name, Option(field, hints[field.name])


def parse_cli(cls: type[C], argv: Sequence[str] | None, prog: str, description: str, example: str = "") -> C:
    """Parses flags, `--config FILE` and `key=value` overrides into `cls`.

    Args:
        example: a command line that `--help` shows at its end.

    Raises:
        UserError: see `from_mapping` and `read_yaml`; also an unknown flag, a flag without its value, or an override
            without `=`.
        SystemExit: code 0 for `--help` and `--version`.
    """
    return from_mapping(cls, *given_values(cls, argv, prog, description, example))


def given_values(
    cls: Any, argv: Sequence[str] | None, prog: str, description: str, example: str = ""
) -> tuple[dict[str, Any], str]:
    """Returns what `parse_cli` builds from: the given values, unchecked and nested, and the config file, if any."""
    known = dict(list_options(cls))
    parser = _parser(known, prog, description, example)
    words = [_dashed(word) for word in (sys.argv[1:] if argv is None else argv)]
    found, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        raise UserError(_unknown_flag(unknown[0].partition("=")[0], parser, prog))
    given = vars(found)
    config_file = given.pop("config", None)
    overrides = given.pop("overrides", [])
    for key, value in list(given.items()):
        # `--data a.jsonl b.jsonl steps=10`, `--resume steps=10`: argparse gives the override to the flag before it
        option = known[key]
        items = value if isinstance(value, list) else [value] if _is_bool(option.hint) else []
        strays = [item for item in items if _is_override(item, list(known), option.field.metadata["named"])]
        if strays:
            given[key] = [item for item in value if item not in strays] if isinstance(value, list) else "on"
            overrides = [*strays, *overrides]
    place = {word: i for i, word in enumerate(words)}
    overrides.sort(key=lambda override: place.get(override, -1))  # the last one on the command line wins
    values: dict[str, Any] = read_yaml(config_file) if config_file else {}
    for override in overrides:
        if "=" not in override:
            raise UserError(f"{override!r}: expected key=value (see {prog} --help)")
    for key, text in [*given.items(), *(override.split("=", 1) for override in overrides)]:
        _assign(values, key, _from_text(known[key].hint if key in known else None, text))
    _flags.clear()
    for key, option in known.items():
        if key in given or ("." not in key and "_" in key and key not in values):  # else it is in the file or key=value
            short = "" if "." in key else option.field.metadata["flag"]
            _flags[key] = f"--{(short or key).replace('_', '-')}"
    return values, config_file or ""


_flags: dict[str, str] = {}  # by key, of the last command line: what `_as_typed` writes for it


def _as_typed(message: str) -> str:
    """Replaces the keys of options by their flags, unless they were given as `key=value`."""

    def flag(found: re.Match[str]) -> str:
        key = found[0]
        prose = "_" not in key and "." not in key and found.start() > 0  # `target` inside a sentence is a word
        return key if prose else _flags.get(key, key)

    return re.sub(r"(?<![\w./'\"-])[a-z]\w*(?:\.\w+)?(?![\w./=(-]|\.\w)", flag, message)


def _assign(values: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise UserError(f"{dotted}: `{parent}` holds a value, not a group")
    values[last] = value


class _Parser(argparse.ArgumentParser):
    """One line for a mistake, like all others of the command, instead of the usage and an exit."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))


def _parser(known: Mapping[str, Option], prog: str, description: str, example: str) -> _Parser:
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [--option VALUE ...] [--config PATH] [key=value ...]",
        description=description,
        epilog=f"example:\n  {example}" if example else None,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32),
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
    )
    common = parser.add_argument_group("common options")
    places: dict[str, Any] = {}
    for key, option in known.items():
        metadata, group = option.field.metadata, key.rpartition(".")[0]
        if metadata["common"]:
            place = common
        else:
            title = f"advanced options: {group}" if group else "advanced options"
            place = places[group] = places.get(group) or parser.add_argument_group(title)
        names, short = [f"--{key.replace('_', '-')}"], metadata["flag"]
        if short:
            names = [*(names if group else []), f"--{short}"]
        _add(place, names, key, option, metadata["help"].replace("%", "%%") + default_note(option.field))
    common.add_argument("--config", metavar="PATH", help="YAML file with any of the options, by their keys")
    common.add_argument(
        "overrides", nargs="*", metavar="key=value", help="any option by its key, as group.option=VALUE"
    )
    common.add_argument("-h", "--help", action="help", help="print this help and exit")
    common.add_argument(
        "--version", action="version", version=f"{prog} {__version__}", help="print the version and exit"
    )
    return parser


def _add(parser: Any, names: list[str], key: str, option: Option, text: str) -> None:
    several, metadata = typing.get_origin(option.hint) is tuple, option.field.metadata
    off: Any = None
    if _is_bool(option.hint):
        off = ["off"] if several else "off"
        # a flag without a value means on
        how: dict[str, Any] = {"nargs": "*"} if several else {"nargs": "?", "const": "on"}
        parser.add_argument(*names, dest=key, metavar=ON_OFF, help=text, **how)
    else:
        action = "extend" if metadata["repeatable"] else "store"
        nargs = "+" if several else None
        parser.add_argument(*names, dest=key, action=action, nargs=nargs, metavar=kind_of(option), help=text)
        off = "0" if metadata["off"] else None
    if off is not None:
        no = [f"--no-{name[2:]}" for name in names]
        parser.add_argument(*no, dest=key, action="store_const", const=off, help=argparse.SUPPRESS)


def kind_of(option: Option) -> str:
    """Returns what `--help` shows as the value of an option: INT, FLOAT, PATH, NAME, on or off, or the choices."""
    if _is_bool(option.hint):
        return ON_OFF
    if choices := option.field.metadata["choices"]():
        return "{" + ",".join(choices) + "}"
    inner = {option.hint, *typing.get_args(option.hint)}
    number = "INT" if int in inner else "FLOAT" if float in inner else None
    return number or str(option.field.metadata["metavar"])


def _dashed(word: str) -> str:
    """Returns `--a_b=c_d` as `--a-b=c_d`, so that flags have both spellings."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _unknown_flag(flag: str, parser: argparse.ArgumentParser, prog: str) -> str:
    """Returns the error for an unknown flag, with the flag that was meant: `--epochs 3` means `--optim.epochs 3`."""
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    flags = [name for action in shown for name in action.option_strings]
    flags += [f"--no-{name[2:]}" for action in shown if action.metavar == ON_OFF for name in action.option_strings]
    last = {name: name.lstrip("-").rpartition(".")[2] for name in flags if "." in name and name[:5] != "--no-"}
    word = flag.lstrip("-")
    meant = [name for name in last if last[name] == word] or difflib.get_close_matches(flag, flags, n=1)
    if not meant and (close := difflib.get_close_matches(word, list(last.values()), n=1)):
        meant = [name for name in last if last[name] == close[0]]
    return f"{flag}: unknown flag; " + (f"did you mean {' or '.join(meant)}?" if meant else f"see {prog} --help")


def _from_text(hint: Any, text: Any) -> Any:
    """Returns a typed text read as YAML unless the option wants text: `--port 8000` is an int, `--target 7` a name."""
    if isinstance(text, list):  # a list flag, one item a word
        item = typing.get_args(hint)[0]
        return [_from_text(item, each) for each in text or (["on"] if item is bool else [])]
    wants_text = hint is str or (typing.get_origin(hint) is not tuple and str in typing.get_args(hint))
    if not isinstance(text, str) or (wants_text and (hint is str or text != "null")):
        return text
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that is none, lists in lists
        raise UserError(f"{text[:80]!r}: not a value ({' '.join(str(error).split())})") from error


def _is_override(item: str, keys: Sequence[str], dotted: bool) -> bool:
    """Whether an item of a list is `key=value`; the key may be a group."""
    key, equals, _ = item.partition("=")
    return (
        bool(equals)
        and ("." in key or not dotted)
        and any(known == key or known.startswith(f"{key}.") for known in keys)
    )


def default_note(field: Any) -> str:
    """Returns the end of a help text: the default, unless the text itself has it."""
    if field.default is dataclasses.MISSING:
        return " (required)"
    if field.default is None or field.default == () or field.default == "" or "(default:" in field.metadata["help"]:
        return ""
    values = field.default if isinstance(field.default, tuple) else (field.default,)
    words = [("off", "on")[value] if isinstance(value, bool) else str(value) for value in values]
    return f" (default: {' '.join(words)})"


def one_line(error: Exception) -> str | None:
    """Returns the line to print for a UserError or too little memory instead of a traceback; None for other errors."""
    if isinstance(error, UserError):
        return str(error)
    said = " ".join(str(error).split())
    if type(error).__name__ == "OutOfMemoryError":  # PyTorch's, which this module does without
        said = said.partition(" Of the allocated")[0].partition(" Including")[0]
        return f"{said} Take a larger GPU, or a smaller model, batch or context"
    if "DefaultCPUAllocator: " in said:  # on a CPU it has no class of its own
        said = said.partition("DefaultCPUAllocator: ")[2]
        return (
            f"this machine's memory does not suffice ({said}). "
            f"Take a larger machine, or a smaller model, batch or context"
        )
    return None


def run_command(command: Callable[[], int | None]) -> int:
    """Runs a program's body: a UserError or too little memory prints one line and returns 2, Ctrl-C returns 130.

    A KeyboardInterrupt with a message prints that message.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no Greek ends no run
    # the hub's client would log each of its retries; their result is one line
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    try:
        return command() or 0
    except (UserError, RuntimeError) as error:
        if (said := one_line(error)) is None:
            raise
        print(f"error: {_as_typed(said)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(str(error) or "interrupted; run the same command again to resume", file=sys.stderr)
        return 130
