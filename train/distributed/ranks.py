"""Reads the environment of a launcher (torchrun, deepspeed) without torch, so that command lines are checked first."""

import os


def speaks() -> bool:
    """Returns whether this process prints errors that all processes of its machine have."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def without_local_rank(argv: list[str]) -> list[str]:
    """Returns the command line without deepspeed's `--local_rank`; the environment has the same number."""
    return [word for word in argv if not word.startswith("--local_rank=")]
