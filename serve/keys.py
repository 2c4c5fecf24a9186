"""Reads API keys from a file or the environment; a command line would show them in the list of processes."""

import hmac
import os
from collections.abc import Sequence
from pathlib import Path

from dflash_toolkit.config import UserError

VARIABLE = "DFLASH_API_KEY"
ADMIN_VARIABLE = "DFLASH_ADMIN_KEY"


def read_keys(file: str | None, option: str = "api_key_file", variable: str = VARIABLE) -> tuple[str, ...]:
    """Returns the keys in a file, one a line, and in the environment, separated by commas.

    Without any key, requests need none.

    Raises:
        UserError: the file cannot be read or holds no key, or an HTTP header cannot carry a key.
    """
    keys = []
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{option} {file}: cannot be read ({error})") from error
        keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
        if not keys:
            raise UserError(f"{option} {file}: holds no key; write one a line, or remove the option")
    if variable in os.environ:
        given = [key.strip() for key in os.environ[variable].split(",")]
        if not all(given):
            raise UserError(f"{variable} holds an empty key; separate keys by single commas, or unset it")
        keys += given
    if wrong := next((key for key in keys if not (key.isascii() and key.isprintable()) or " " in key), None):
        raise UserError(
            f"an API key of {len(wrong)} characters contains a space, a control or a non-ASCII character; replace it, "
            "because an HTTP header cannot carry it"
        )
    return tuple(keys)


def matching(keys: Sequence[str], given: str) -> int | None:
    """Returns the index of the key that was sent, or None; compares in constant time."""
    raw = given.encode("latin-1")  # the encoding of headers
    found = None
    for number, key in enumerate(keys):
        if hmac.compare_digest(raw, key.encode()):
            found = number
    return found


def excluded_keys(file: str | None, keys: Sequence[str]) -> frozenset[str]:
    """Returns the numbers of the API keys in a file, as requests carry them.

    Raises:
        UserError: as `read_keys`, or for a key that is no API key of the server.
    """
    if file is None:
        return frozenset()
    listed = read_keys(file, "adapt_exclude_key_file", "")
    if unknown := sum(key not in keys for key in listed):
        raise UserError(
            f"adapt_exclude_key_file {file}: {unknown} of {len(listed)} keys are no API keys of this server; add them "
            f"to --api-key-file or ${VARIABLE}"
        )
    return frozenset(str(number) for number, key in enumerate(keys) if key in listed)


def read_admin_keys(file: str | None) -> tuple[str, ...]:
    """Returns the admin keys, from a file and the environment. Raises UserError as `read_keys`."""
    return read_keys(file, "admin_key_file", ADMIN_VARIABLE)
