"""Where the hidden states of a run's rows are kept: in memory, or on disk in shards that survive any kill.

A row is known by what it consists of (`tokens_digest`), so rows that appear twice share, and a directory may serve runs
over other data.
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

from ..run.state import first_difference

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max  # 448
GIB = 2**30
SHARD_BYTES = GIB // 2
STALE_S = 600.0  # a partial file that nobody has touched for so long was left by a kill
FORM = 2  # of what a directory holds; the first knew rows by their number in the data


@dataclass(frozen=True, slots=True)
class Stored:
    """Hidden states of one row as they are kept: in a float type as they are, or in FP8 with one scale a token."""

    data: Tensor  # [n, W]
    scale: Tensor | None = None  # [n] fp32, of FP8

    @classmethod
    def of(cls, hidden: Tensor, dtype: torch.dtype) -> "Stored":
        """Keep hidden states [n, W] in `dtype`. FP8 (e4m3) rounds a value x of a token whose largest is m by at most
        max(|x| / 16, m / 448 / 1024)."""
        if dtype != FP8:
            return cls(hidden.to(dtype))
        scale = (hidden.abs().amax(-1).float() / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
        # the quotient may round to a little more than the largest value, which the bare cast would make NaN
        scaled = (hidden.float() / scale[:, None]).clamp(-FP8_MAX, FP8_MAX)
        return cls(scaled.to(FP8), scale)

    def restore(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The hidden states [n, W] on `device`."""
        data = self.data.to(device, non_blocking=True)
        if self.scale is None:
            return data.to(dtype)
        return (data.float() * self.scale.to(device, non_blocking=True)[:, None]).to(dtype)

    def each(self, change: Callable[[Tensor], Tensor]) -> "Stored":
        """The same with `change` applied to its tensors."""
        return Stored(change(self.data), None if self.scale is None else change(self.scale))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)


class MemoryStore:
    """Rows where they were computed while there is room, then in host memory while there is room, then none.

    Args:
        device_room, host_room: bytes.
    """

    failed = False  # nothing can

    def __init__(self, device_room: int, host_room: int) -> None:
        self._device_room, self._host_room = device_room, host_room
        self._kept: dict[bytes, Stored] = {}
        self.reads_ahead = False  # whether rows may have to come from afar

    @property
    def room(self) -> tuple[int, int]:
        """Bytes left on the device and in host memory."""
        return self._device_room, self._host_room

    def give(self, device_room: int) -> None:
        """So many bytes of the device from now on, beside what is kept there."""
        self._device_room = device_room

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def get(self, key: bytes) -> Stored:
        return self._kept[key]

    def add(self, key: bytes, stored: Stored) -> None:
        """Keep a row if there is room for it."""
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
        """There is nothing to write."""

    def flush(self) -> None:
        """There is nothing to write."""

    def check(self) -> None:
        """Nothing can have failed."""


class DiskStore:
    """Rows in a directory of safetensors files, read by memory map.

    `index.json` says how they were computed (`fingerprint`). A shard holds `hidden` [T, W], with FP8 `scale` [T], and
    the `keys` [R, 16] and `lengths` [R] of the rows it consists of; it has a random name, so that several processes may
    write side by side, and is whole if it is there: it is written under another name first. What a kill can lose is
    what was not yet a shard.

    Of processes that train together one whose disk fails must not end alone, for the others would wait for it: reading
    and keeping rows goes on without the disk, until all of them ask at the same place what `check` has to say.

    Args:
        fingerprint: JSON values; what must be equal for the features of a row to be the same.

    Raises:
        UserError: the directory holds the features of something else, or is not ours, or cannot be made.
    """

    reads_ahead = True
    room = (0, 0)  # bytes of memory

    def __init__(self, folder: Path, fingerprint: dict[str, Any], shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._shard_bytes = folder, shard_bytes
        self._expected: int | None = None  # rows that are still to come, if that is known
        self._places: dict[bytes, tuple[Path, int, int]] = {}  # shard, first and last + 1 of its tokens
        self._shards: dict[Path, Any] = {}
        self._buffer: dict[bytes, Stored] = {}
        self._buffered = 0  # bytes
        self._writing: dict[bytes, Stored] = {}
        self._writer = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None
        self._mistake: UserError | None = None  # the first; nothing more is kept after it
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._claim(json.loads(json.dumps(fingerprint)))
            for partial in folder.glob("*.partial"):
                with contextlib.suppress(FileNotFoundError):  # another process has just given it its name
                    if time.time() - partial.stat().st_mtime > STALE_S:
                        partial.unlink()
        except OSError as error:
            raise UserError(f"features {folder}: cannot be written ({error.strerror}); see run.feature_dir") from error
        self.refresh()
        self.check()

    def _claim(self, fingerprint: dict[str, Any]) -> None:
        index = self._folder / "index.json"
        if not index.exists():
            if any(self._folder.glob("*.safetensors")) and not index.exists():  # nor has another process made it
                raise UserError(
                    f"features {self._folder}: shards without an index.json; choose another run.feature_dir"
                )
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
                f"features {self._folder}: written by another version, which kept them in another form; "
                f"remove it or choose another run.feature_dir"
            )
        if difference := first_difference(found, fingerprint):
            raise UserError(
                f"features {self._folder}: of another run ({difference}); choose another run.feature_dir or remove it"
            )

    def refresh(self) -> None:
        """Find the shards that others have written. One that cannot be read is for `check` to tell."""
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
        """Whether `check` has something to say."""
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
        """What writing so many more bytes means, in words. Raises UserError where the disk cannot hold them."""
        needed, free = nbytes / GIB, shutil.disk_usage(self._folder).free / GIB
        if needed > free:
            raise UserError(
                f"features {self._folder}: {needed:.1f} GiB are needed and {free:.1f} GiB are free; "
                f"run.feature_dtype=float8, fewer drafter.taps or a smaller prompts.max_length need less, "
                f"run.feature_dir is another disk, run.features=online needs none"
            )
        return f"{needed:.2f} GiB to {self._folder}, where {free:.1f} GiB are free"

    def expect(self, count: int) -> None:
        """So many rows are still to be added here; the last of them is not held back until a shard is full."""
        self._expected = count

    def __contains__(self, key: bytes) -> bool:
        # in the order in which a row moves on
        return key in self._buffer or key in self._writing or key in self._places

    def get(self, key: bytes) -> Stored:
        """A kept row, mapped; its bytes are read when they are used. May be called from any thread."""
        # in the order in which a row moves on, so that it is found whenever it moves
        for held in (self._buffer, self._writing):
            if (stored := held.get(key)) is not None:
                return stored
        path, start, end = self._places[key]
        shard = self._shards[path]
        scale = shard.get_slice("scale")[start:end] if "scale" in shard.keys() else None  # noqa: SIM118 - no mapping
        return Stored(shard.get_slice("hidden")[start:end], scale)

    def add(self, key: bytes, stored: Stored) -> None:
        """Keep a row; full shards are written in the background. After a failure, which `check` tells, nothing is."""
        if key in self or self._mistake:
            return
        self._buffer[key] = stored.each(Tensor.cpu)
        self._buffered += stored.nbytes
        if self._expected is not None:
            self._expected -= 1
        if self._buffered >= self._shard_bytes or self._expected == 0:
            self._start_writing()

    def flush(self) -> None:
        """Write what is not yet written, and wait for it. Raises UserError."""
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
            if not self._mistake:  # else they are nowhere but here
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
                f"{path}: cannot be written ({error}); free some space and run again, the shards before it are kept"
            )
            return
        self._learn(path, list(held), lengths)
