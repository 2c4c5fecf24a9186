"""Checkpoints that something has happened to."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file


def damage(file: Path, change: Any) -> None:
    """Let a file hold `change` instead (text or bytes), be gone (None), half as long ("half"), or have these values.

    A mapping changes the keys of JSON or the tensors of safetensors; None takes one out.
    """
    if change is None:
        file.unlink()
    elif change == "half":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif isinstance(change, str | bytes):
        file.write_bytes(change if isinstance(change, bytes) else change.encode())
    else:
        tensors = file.suffix == ".safetensors"
        held = (load_file(file) if tensors else json.loads(file.read_text())) | change
        held = {key: value for key, value in held.items() if value is not None}
        save_file(held, file, metadata={"format": "pt"}) if tensors else file.write_text(json.dumps(held))
