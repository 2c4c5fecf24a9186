"""Reads what a launcher (torchrun, deepspeed) gives a process. Without torch: command lines are checked before it."""

import os


def speaks() -> bool:
    """Returns whether this process prints an error that all processes of its machine have."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def without_local_rank(argv: list[str]) -> list[str]:
    """Returns the command line without deepspeed's `--local_rank`; the environment has the same number."""
    return [word for word in argv if not word.startswith("--local_rank=")]
