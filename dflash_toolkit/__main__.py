"""Starts the commands: `python -m dflash_toolkit` lists them, `python -m dflash_toolkit train ...` runs one.

Imports nothing at the top, so that Ctrl-C while a command's modules are imported ends it in one line, too.
"""

import importlib
import sys

COMMANDS = {
    "train": ("dflash_toolkit.train.cli", "trains a drafter for a target and exports it"),
    "data": ("dflash_toolkit.train.data_cli", "writes the target's responses to prompts, for dflash-train"),
    "eval": ("dflash_toolkit.evaluation.cli", "measures acceptance, speed-up and identity of a drafter"),
    "serve": ("dflash_toolkit.serve.cli", "serves a target and its drafter over OpenAI's API"),
    "doctor": ("dflash_toolkit.doctor.cli", "diagnoses low acceptance of a drafter"),
}


def train() -> int:
    """dflash-train."""
    return _run("train")


def data() -> int:
    """dflash-data."""
    return _run("data")


def evaluate() -> int:
    """dflash-eval."""
    return _run("eval")


def serve() -> int:
    """dflash-serve."""
    return _run("serve")


def doctor() -> int:
    """dflash-doctor."""
    return _run("doctor")


def _run(name: str) -> int:
    try:
        return int(importlib.import_module(COMMANDS[name][0]).main())
    except KeyboardInterrupt:  # during an import; `run_command` catches the others
        print("interrupted", file=sys.stderr)
        return 130


def main() -> int:
    """Runs the command that the first word names; lists all commands if there is no word."""
    name = sys.argv[1].removeprefix("dflash-") if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        del sys.argv[1]
        return _run(name)
    for command, (_, does) in COMMANDS.items():
        print(f"dflash-{command:<8}{does}")
    print("Each has its own --help.")
    if name in ("--help", "-h"):
        return 0
    print(f"error: {name}: unknown command", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
