"""API keys: from a file or the environment, never from a command line, which everybody on the machine can list."""

import hmac
import os
from collections.abc import Sequence
from pathlib import Path

from dflash_toolkit.config import UserError

VARIABLE = "DFLASH_API_KEY"


def read_keys(file: str | None) -> tuple[str, ...]:
    """The keys of a file, one a line, and those of the environment, separated by commas; none: nobody is asked for one.

    Raises:
        UserError: a file that cannot be read or holds no key, or a key that no header can carry.
    """
    keys = []
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"api_key_file {file}: cannot be read ({error})") from error
        keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
        if not keys:
            raise UserError(f"api_key_file {file}: holds no key; give one a line, or leave the option out")
    if VARIABLE in os.environ:
        given = [key.strip() for key in os.environ[VARIABLE].split(",")]
        if not all(given):
            raise UserError(f"{VARIABLE} holds an empty key; separate keys by single commas, or unset it")
        keys += given
    if wrong := next((key for key in keys if not (key.isascii() and key.isprintable()) or " " in key), None):
        raise UserError(
            f"an API key of {len(wrong)} characters holds a space or one outside ASCII, which no header carries"
        )
    return tuple(keys)


def matching(keys: Sequence[str], given: str) -> int | None:
    """Which of the keys was given, in a time that does not tell how much of one was right; None: none of them."""
    raw = given.encode("latin-1")  # as headers are decoded
    found = None
    for number, key in enumerate(keys):
        if hmac.compare_digest(raw, key.encode()):
            found = number
    return found
