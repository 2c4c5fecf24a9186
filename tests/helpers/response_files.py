"""Files of responses."""

from pathlib import Path
from typing import Any

from conftest import VOCAB
from programs import write


def eight_responses(path: Path, **changes: Any) -> Path:
    """Writes eight rows of responses, with changes."""
    row = {"prompt_tokens": 2, "spans": [[2, 4]], "target": "t", "vocab_size": VOCAB, "template_hash": "h",
           "sampler": {"temperature": 0.0, "thinking": None}}  # fmt: skip
    return write(path, [row | {"index": i, "tokens": [10 + i, 20, 30, 40]} | changes for i in range(8)])
