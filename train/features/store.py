"""Storage of the hidden states of a run's rows: in memory, or on disk in shards that survive a kill at any time.

A row's key is the digest of its tokens (`tokens_digest`), so equal rows share an entry, and runs over other data can
share a directory.
"""

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_toolkit.config import UserError
from dflash_toolkit.fingerprint import TOKENS_BYTES
from dflash_toolkit.preflight import size

from ..run.settings import first_difference

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max  # 448
GIB = 2**30
SHARD_BYTES = GIB // 2
STALE_S = 600.0  # age at which a partial file counts as left by a kill
FORM = 2  # version of a directory's layout; version 1 numbered rows by their place in the data


@dataclass(frozen=True, slots=True)
class Stored:
    """Stored hidden states of one row: in a float type, or in FP8 with one scale per token."""

    data: Tensor  # [n, W]
    scale: Tensor | None = None  # [n] fp32, of FP8

    @classmethod
    def of(cls, hidden: Tensor, dtype: torch.dtype) -> "Stored":
        """Stores hidden states [n, W] in `dtype`. FP8 (e4m3) rounds a value x, in a token with maximum m, by at most
        max(|x| / 16, m / 448 / 1024)."""
        if dtype != FP8:
            return cls(hidden.to(dtype))
        scale = (hidden.abs().amax(-1).float() / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
        # rounding can make the quotient exceed the maximum, which the bare cast would turn into NaN
        scaled = (hidden.float() / scale[:, None]).clamp(-FP8_MAX, FP8_MAX)
        return cls(scaled.to(FP8), scale)

    def restore(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns the hidden states [n, W] on `device`."""
        data = self.data.to(device, non_blocking=True)
        if self.scale is None:
            return data.to(dtype)
        return (data.float() * self.scale.to(device, non_blocking=True)[:, None]).to(dtype)

    def each(self, change: Callable[[Tensor], Tensor]) -> "Stored":
        """Returns a copy with `change` applied to its tensors."""
        return Stored(change(self.data), None if self.scale is None else change(self.scale))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)


class MemoryStore:
    """Keeps rows on the device while it has room, then in host memory while it has room, then not at all.

    Args:
        device_room, host_room: bytes.
    """

    failed = False  # writes cannot fail

    def __init__(self, device_room: int, host_room: int) -> None:
        self._device_room, self._host_room = device_room, host_room
        self._kept: dict[bytes, Stored] = {}
        self.reads_ahead = False  # whether rows are in host memory

    @property
    def room(self) -> tuple[int, int]:
        """Bytes left on the device and in host memory."""
        return self._device_room, self._host_room

    def give(self, device_room: int) -> None:
        """Sets the bytes of the device that further rows may use."""
        self._device_room = device_room

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def get(self, key: bytes) -> Stored:
        return self._kept[key]

    def add(self, key: bytes, stored: Stored) -> None:
        """Stores a row if there is room for it."""
        if key in self._kept:
            return
        if stored.nbytes <= self._device_room:
            self._device_room -= stored.nbytes
            self._kept[key] = stored
        elif stored.nbytes <= self._host_room:
            self._host_room -= stored.nbytes
            self._kept[key] = stored.each(Tensor.cpu)
            self.reads_ahead = True

    def expect(self, count: int) -> None:
        """Does nothing; memory needs no writes."""

    def flush(self) -> None:
        """Does nothing; memory needs no writes."""

    def check(self) -> None:
        """Does nothing; memory cannot fail."""


class DiskStore:
    """Keeps rows in a directory of safetensors files, read by memory map.

    `index.json` holds the `fingerprint` of the computation. A shard holds `hidden` [T, W], in FP8 also `scale` [T], and
    the `keys` [R, 16] and `lengths` [R] of its rows. Shards have random names, so several processes can write at the
    same time, and are written under a temporary name first, so an existing shard is complete. A kill loses only rows
    that were not yet in a shard.

    If the disk of one process fails, that process must not end alone, because the others would wait for it. It goes on
    without the disk until all processes call `check`.

    Args:
        fingerprint: JSON values on which the features of given tokens depend.

    Raises:
        UserError: the directory holds other features or other files, or cannot be created.
    """

    reads_ahead = True
    room = (0, 0)  # memory for rows

    def __init__(self, folder: Path, fingerprint: dict[str, Any], shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._shard_bytes = folder, shard_bytes
        self._expected: int | None = None  # rows still to come, if known
        self._places: dict[bytes, tuple[Path, int, int]] = {}  # shard, first and last + 1 of its tokens
        self._shards: dict[Path, Any] = {}
        self._buffer: dict[bytes, Stored] = {}
        self._buffered = 0  #  bytes
        self._writing: dict[bytes, Stored] = {}
        self._writer = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None
        self._mistake: UserError | None = None  # the first error; nothing is stored after it
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._claim(json.loads(json.dumps(fingerprint)))
            for partial in folder.glob("*.partial"):
                with contextlib.suppress(FileNotFoundError):  # another process has renamed it
                    if time.time() - partial.stat().st_mtime > STALE_S:
                        partial.unlink()
        except OSError as error:
            raise UserError(f"features {folder}: cannot be written ({error.strerror}); see run.feature_dir") from error
        self.refresh()
        self.check()

    def _claim(self, fingerprint: dict[str, Any]) -> None:
        index = self._folder / "index.json"
        if not index.exists():
            if any(self._folder.glob("*.safetensors")) and not index.exists():  # and no other process has just made it
                raise UserError(f"features {self._folder}: shards without an index.json; give another run.feature_dir")
            partial = index.with_suffix(f".{secrets.token_hex(4)}.partial")
            partial.write_text(json.dumps({"form": FORM, "fingerprint": fingerprint}, indent=1) + "\n")
            os.replace(partial, index)
        try:
            content = json.loads(index.read_text())
            found, form = content["fingerprint"], content.get("form", 1)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{index}: not an index of features; choose another run.feature_dir") from error
        if form != FORM:
            raise UserError(
                f"features {self._folder}: written by another version in another layout; "
                f"remove it or give another run.feature_dir"
            )
        if difference := first_difference(found, fingerprint):
            raise UserError(
                f"features {self._folder}: of another run ({difference}); give another run.feature_dir or remove it"
            )

    def refresh(self) -> None:
        """Finds shards of other processes. `check` raises the error of an unreadable one."""
        for path in sorted(self._folder.glob("*.safetensors")):
            if path not in self._shards:
                try:
                    with safe_open(path, "pt") as shard:
                        packed, lengths = shard.get_tensor("keys"), shard.get_tensor("lengths").tolist()
                        tokens = shard.get_slice("hidden").get_shape()[0]
                    right = packed.dtype == torch.uint8 and packed.shape == (len(lengths), TOKENS_BYTES)
                    if not right or sum(lengths) != tokens or min(lengths, default=0) < 0:
                        raise ValueError("keys, lengths and hidden states do not fit one another")
                except (OSError, SafetensorError, ValueError, TypeError) as error:
                    self._mistake = UserError(f"{path}: not a shard of features ({error}); remove it and run again")
                    return
                self._learn(path, [bytes(key) for key in packed.numpy()], lengths)

    @property
    def failed(self) -> bool:
        """Whether `check` would raise."""
        return self._mistake is not None

    def check(self) -> None:
        """Raises UserError when a shard could not be written or read."""
        if self._mistake:
            raise self._mistake

    def _learn(self, path: Path, keys: list[bytes], lengths: list[int]) -> None:
        self._shards[path] = safe_open(path, "pt")  # a memory map
        end = 0
        for key, length in zip(keys, lengths, strict=True):
            self._places[key] = path, end, end + length
            end += length

    def reserve(self, nbytes: int) -> str:
        """Returns a sentence on writing `nbytes` more. Raises UserError if the disk is too full."""
        free = shutil.disk_usage(self._folder).free
        if nbytes > free:
            raise UserError(
                f"features {self._folder}: {size(nbytes)} are needed, but {size(free)} are free; give "
                f"run.feature_dtype=float8, fewer drafter.taps or a smaller prompts.max_length, run.feature_dir on "
                f"another disk, or run.features=online"
            )
        return f"{size(nbytes)} to {self._folder}, where {size(free)} are free"

    def expect(self, count: int) -> None:
        """Announces `count` rows to come; the last one completes a shard even if that is not full."""
        self._expected = count

    def __contains__(self, key: bytes) -> bool:
        # in the order in which a row moves
        return key in self._buffer or key in self._writing or key in self._places

    def get(self, key: bytes) -> Stored:
        """Returns a stored row as a memory map; its bytes are read when they are used. Thread-safe."""
        # in the order in which a row moves, so that it is found during a move
        for held in (self._buffer, self._writing):
            if (stored := held.get(key)) is not None:
                return stored
        path, start, end = self._places[key]
        shard = self._shards[path]
        scale = shard.get_slice("scale")[start:end] if "scale" in shard.keys() else None  # noqa: SIM118 - no mapping
        return Stored(shard.get_slice("hidden")[start:end], scale)

    def add(self, key: bytes, stored: Stored) -> None:
        """Stores a row; full shards are written in the background. Does nothing after an error, see `check`."""
        if key in self or self._mistake:
            return
        self._buffer[key] = stored.each(Tensor.cpu)
        self._buffered += stored.nbytes
        if self._expected is not None:
            self._expected -= 1
        if self._buffered >= self._shard_bytes or self._expected == 0:
            self._start_writing()

    def flush(self) -> None:
        """Writes all rows that are not on disk yet, and waits. Raises UserError."""
        if self._buffer:
            self._start_writing()
        self._finish_writing()
        self.check()

    def _start_writing(self) -> None:
        self._finish_writing()
        if self._mistake:
            return
        self._writing, self._buffer, self._buffered = self._buffer, {}, 0
        self._written = self._writer.submit(self._write, self._writing)

    def _finish_writing(self) -> None:
        if self._written is not None:
            self._written.result()
            self._written = None
            if not self._mistake:  # after an error they are only here
                self._writing = {}

    def _write(self, held: dict[bytes, Stored]) -> None:
        path = self._folder / f"{secrets.token_hex(8)}.safetensors"
        partial = path.with_suffix(".partial")
        lengths = [len(stored.data) for stored in held.values()]
        tensors = {"hidden": torch.cat([stored.data for stored in held.values()])}
        scales = [stored.scale for stored in held.values() if stored.scale is not None]
        if scales:
            tensors["scale"] = torch.cat(scales)
        keys = torch.frombuffer(bytearray(b"".join(held)), dtype=torch.uint8).view(-1, TOKENS_BYTES)
        tensors |= {"keys": keys, "lengths": torch.tensor(lengths)}
        try:
            save_file(tensors, partial)
            with open(partial, "rb") as handle:
                os.fsync(handle.fileno())
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            self._mistake = UserError(
                f"{path}: cannot be written ({error}); free some space and run again; earlier shards are kept"
            )
            return
        self._learn(path, list(held), lengths)
