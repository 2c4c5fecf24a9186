"""Damages checkpoints."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file


def damage(file: Path, change: Any) -> None:
    """Replaces a file by `change` (text or bytes), deletes it (None), cuts it in half ("half"), or sets JSON values.

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
