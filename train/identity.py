"""Which weights a name stands for: another fine-tune under the same name writes other answers."""

import hashlib
from pathlib import Path

from dflash_toolkit.config import UserError

CHUNK = 1 << 16  # bytes


def target_digest(name: str) -> str | None:
    """Of a directory: its configuration, and each file of weights by name, size, start, middle and end.

    None for a name on the Hub. Raises UserError for a file that cannot be read.
    """
    folder = Path(name)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    try:
        for path in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors"), *folder.glob("*.bin")]):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with open(path, "rb") as handle:
                for start in (0, size // 2, max(0, size - CHUNK)):
                    handle.seek(start)
                    digest.update(handle.read(CHUNK))
    except OSError as error:
        raise UserError(f"target {name}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()
