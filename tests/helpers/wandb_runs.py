"""Reads the files that Weights & Biases writes for runs without a network."""

import struct
from pathlib import Path
from typing import Any


def wandb_records(folder: Path) -> list[Any]:
    """Returns the records of the offline runs in `folder`: LevelDB's log format after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    found, whole = [], b""
    for file in sorted(folder.glob("offline-run-*/*.wandb")):
        content, at = file.read_bytes(), 7
        while at + 7 < len(content):
            if 32768 - at % 32768 < 7:  # too little for a header: the block is filled up with zeros
                at += 32768 - at % 32768
            length, kind = struct.unpack_from("<HB", content, at + 4)
            whole += content[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # full, last
                record, whole = Record.FromString(whole), b""
                found.append(record)
    return found
