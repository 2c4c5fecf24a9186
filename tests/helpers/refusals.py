"""Returns the message of a refusal."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_toolkit import UserError, load_drafter


def refusal(load: Callable[..., object], *args: object, **how: object) -> str:
    """Returns the one-line message of a refusal."""
    with pytest.raises(UserError) as caught:
        load(*args, **how)
    message = str(caught.value)
    assert "\n" not in message and message
    return message


def drafter_refusal(path: Path) -> str:
    """Returns the message of a refused drafter, which begins with its path."""
    message = refusal(load_drafter, str(path))
    assert message.startswith(f"drafter {path}: ")
    return message
