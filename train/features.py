"""The target's hidden states for the rows of a step, computed online or read from where they are kept.

On a CPU every row goes through the target alone, so its features do not depend on the rows beside it: a run resumed at
any step, wherever its features are kept, sees bit-identical numbers. On a GPU rows go through together, one behind the
other, each seeing itself alone.
"""

import hashlib
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_toolkit.config import UserError
from dflash_toolkit.evaluation.runtimes import sample_hash
from dflash_toolkit.progress import Progress
from dflash_toolkit.prompts import template_hash
from dflash_toolkit.target import Target

from .answers import Row
from .blocks import PADDING, TILE, Features
from .config import TrainConfig
from .feature_store import FP8, GIB, DiskStore, MemoryStore, Stored
from .schedule import packing
from .step import use_flex

FORWARD_TOKENS = 16384  # of one forward on a GPU
READERS = 4  # threads that read the next step's rows


def device_room(target: Target, share: float) -> int:
    """Bytes of a GPU's memory that features may take; 0 on a CPU."""
    if target.device.type != "cuda":
        return 0
    return int(share * torch.cuda.mem_get_info(target.device)[0])


class FeatureSource:
    """Turns rows into `Features`.

    Args:
        pad_to: the common length of a step's rows is a multiple of this.
        packed: put all rows one behind the other into a single one of so many tokens; 0 keeps them apart.
        final: also keep the target's last hidden state, behind the taps; every layer of the target runs then.
        dtype: what hidden states are kept in, and rounded to even where none is kept: a run must not depend on which
            rows a store happens to hold. None is the target's own.
        store: where they are kept; None keeps none.
        shared: other processes write to the store too.
    """

    def __init__(
        self,
        target: Target,
        taps: tuple[int, ...],
        max_length: int,
        pad_to: int = 1,
        packed: int = 0,
        *,
        dtype: torch.dtype | None = None,
        store: MemoryStore | DiskStore | None = None,
        shared: bool = False,
        final: bool = False,
    ) -> None:
        self._target = target
        self._taps = taps
        self._final = final
        self._max_length = min(max_length, packed) if packed else max_length
        self._pad_to = pad_to
        self._packed = packed
        self._dtype = dtype or target.dtype
        self._store = store or MemoryStore(0, 0)
        self._shared = shared
        self._several = target.device.type == "cuda"  # rows in one forward
        self._readers = ThreadPoolExecutor(READERS)
        self._coming: dict[int, Future[Stored]] = {}

    @property
    def width(self) -> int:
        """Values a token."""
        return (len(self._taps) + self._final) * int(self._target.config.hidden_size)

    def nbytes(self, rows: list[Row]) -> int:
        """What keeping `rows` takes."""
        a_token = self.width * self._dtype.itemsize + (4 if self._dtype == FP8 else 0)
        return a_token * sum(map(self._length, rows))

    def _length(self, row: Row) -> int:
        return min(len(row.tokens), self._max_length)

    def __call__(self, rows: list[Row]) -> Features:
        """Features of `rows`, packed, or padded on the right to a common length; on the target's device."""
        hidden = self._hidden(rows)
        ends = [len(h) for h in hidden]
        if self._packed:
            shape, places, end = (1, self._packed), [], 0
            for n in ends:
                places.append((0, end))
                end += n
        else:
            longest = max(ends)
            shape, places = (len(rows), longest + -longest % self._pad_to), [(i, 0) for i in range(len(rows))]
        device = self._target.device
        tokens = torch.zeros(shape, dtype=torch.long)
        document = torch.full_like(tokens, PADDING)
        supervised = torch.zeros_like(tokens, dtype=torch.bool)
        positions = torch.arange(shape[1]).expand(shape).clone()
        stacked = torch.zeros(*shape, hidden[0].shape[1], dtype=hidden[0].dtype, device=device)
        for i, (row, h, (at, start)) in enumerate(zip(rows, hidden, places, strict=True)):
            span = slice(start, start + len(h))
            tokens[at, span] = torch.tensor(row.tokens[: len(h)])
            document[at, span] = i
            for begin, end in row.supervised:
                supervised[at, start + begin : start + min(end, len(h))] = True
            positions[at, span] = torch.arange(len(h))
            stacked[at, span] = h
        split = len(self._taps) * self._target.config.hidden_size
        return Features(
            tokens.to(device), stacked[..., :split], supervised.to(device), document.to(device), positions.to(device),
            stacked[..., split:] if self._final else None,
        )  # fmt: skip

    def fill(self, rows: Sequence[Row]) -> None:
        """Compute and keep what is missing of `rows`. Raises UserError when a disk fails."""
        missing = [row for row in rows if row.index not in self._store]
        if not missing:
            return
        with Progress("features", sum(map(self._length, missing)), unit="tok") as progress:
            for group in self._together(missing):
                for index, hidden in self._computed(group).items():
                    self._store.add(index, Stored.of(hidden, self._dtype))
                self._store.check()
                progress.advance(sum(map(self._length, group)))

    def flush(self) -> None:
        """Write what is computed and not yet written. Raises UserError when a disk fails."""
        self._store.flush()

    def check(self) -> None:
        """Raises UserError when features could not be written, or not be read, since training began to ask for them.
        `__call__` itself goes on without what failed, so that processes can stop together."""
        self._store.check()

    @property
    def reads_ahead(self) -> bool:
        """Whether it helps to announce rows with `ahead`."""
        return self._store.reads_ahead

    def ahead(self, rows: list[Row]) -> None:
        """Begin to read what the next call will want."""
        self._coming = {
            row.index: self._readers.submit(self._read, row.index) for row in rows if row.index in self._store
        }

    def _read(self, index: int) -> Stored:
        stored = self._store.get(index)
        if stored.data.is_cuda:
            return stored
        # both read what is only mapped
        return stored.each(Tensor.clone if self._target.device.type == "cpu" else Tensor.pin_memory)

    def _hidden(self, rows: list[Row]) -> list[Tensor]:
        """The hidden states [n, W] of each row."""
        coming, self._coming = self._coming, {}
        missing = [row for row in rows if row.index not in self._store]
        if missing and self._shared:
            self._store.refresh()
            missing = [row for row in missing if row.index not in self._store]
        fresh: dict[int, Stored] = {}
        for group in self._together(missing):
            for index, hidden in self._computed(group).items():
                fresh[index] = Stored.of(hidden, self._dtype)
                self._store.add(index, fresh[index])

        def stored(index: int) -> Stored:
            if index in fresh:
                return fresh[index]
            return coming[index].result() if index in coming else self._store.get(index)

        return [stored(row.index).restore(self._target.device, self._target.dtype) for row in rows]

    def _together(self, rows: list[Row]) -> Iterator[list[Row]]:
        """Rows for one forward each."""
        if self._several:
            yield from fitting(rows, self._length)
        else:
            yield from ([row] for row in rows)

    def _computed(self, rows: list[Row]) -> dict[int, Tensor]:
        """One forward of rows one behind the other."""
        lengths = [self._length(row) for row in rows]
        tokens = [token for row, n in zip(rows, lengths, strict=True) for token in row.tokens[:n]]
        ids = torch.tensor([tokens], device=self._target.device)
        documents = lengths if len(rows) > 1 else None
        out = self._target.forward(ids, taps=self._taps, final=self._final, lengths=documents)
        features = out.features
        assert features is not None
        if out.final is not None:
            features = torch.cat([features, out.final], dim=-1)
        # made under inference mode; autograd wants an ordinary tensor
        return {row.index: h.clone() for row, h in zip(rows, features[0].split(lengths), strict=True)}


def fitting(rows: list[Row], length_of: Callable[[Row], int], most: int = FORWARD_TOKENS) -> Iterator[list[Row]]:
    """The rows in their order, in groups of at most `most` tokens; a longer row is a group by itself."""
    group: list[Row] = []
    tokens = 0
    for row in rows:
        n = length_of(row)
        if group and tokens + n > most:
            yield group
            group, tokens = [], 0
        group.append(row)
        tokens += n
    if group:
        yield group


# ---- what a run asks for ---------------------------------------------------------------------------------------


def open_features(
    config: TrainConfig,
    target: Target,
    taps: tuple[int, ...],
    rows: Sequence[Row],
    work: Path,
    rank: int = 0,
    world: int = 1,
) -> FeatureSource:
    """The source that `config.run.features` asks for, filled where that is done before training.

    Args:
        rank, world: this process among those that train together. Each writes its share of what goes to disk; all must
            be done before the first asks for features.

    Raises:
        UserError: memory or disk cannot hold the features, or `run.feature_dir` holds others.
    """
    run, max_length, final = config.run, config.prompts.max_length, config.loss.distribution
    packed, _ = packing(config, target.device)
    pad_to = TILE if use_flex(run.attention, target.device) else 1
    dtype = {"auto": target.dtype, "bfloat16": torch.bfloat16, "float8": FP8}[run.feature_dtype]
    store: MemoryStore | DiskStore
    if run.features in ("disk", "hybrid"):
        folder = Path(run.feature_dir) if run.feature_dir else work / "features"
        store = DiskStore(
            folder, _fingerprint(target, taps, final, min(max_length, packed or max_length), dtype, rows), len(rows)
        )
    elif run.features == "online":
        store = MemoryStore(0, 0)
    else:
        store = MemoryStore(device_room(target, run.feature_gpu_share), int(run.feature_cache_gb * GIB))
    source = FeatureSource(
        target, taps, max_length, pad_to=pad_to, packed=packed, dtype=dtype, store=store, shared=world > 1,
        final=final,
    )  # fmt: skip
    missing = [row for row in rows if row.index not in store]
    needed = source.nbytes(missing)
    if isinstance(store, DiskStore):
        if missing and rank == 0:
            print(f"features of {len(missing)} rows: {store.reserve(needed)}", file=sys.stderr)
        if run.features == "disk":
            source.fill(rows[rank::world])
            source.flush()
    elif run.features == "memory":
        if needed > sum(store.room):
            device, host = (room / GIB for room in store.room)
            raise UserError(
                f"run.features=memory: {needed / GIB:.1f} GiB are needed; {device:.1f} GiB of GPU memory and "
                f"{host:.1f} GiB of host memory may be used (run.feature_gpu_share, run.feature_cache_gb); "
                f"run.feature_dtype=float8 or fewer drafter.taps need less, run.features=disk needs none"
            )
        source.fill(missing)
    elif run.features == "auto" and not config.optim.steps and store.room[0]:  # a run over all rows
        if needed <= store.room[0]:
            source.fill(missing)
        elif rank == 0:
            device, host = (room / GIB for room in store.room)
            print(
                f"features of {len(missing)} rows: {needed / GIB:.1f} GiB; {device:.1f} GiB of GPU memory and "
                f"{host:.1f} GiB of host memory hold a part, the rest is computed in every epoch "
                f"(run.feature_dtype=float8 halves them)",
                file=sys.stderr,
            )
    return source


def features_key(config: TrainConfig, target: Target, taps: tuple[int, ...]) -> tuple[object, ...]:
    """Equal for configurations whose runs over the same rows can share a source."""
    flex = use_flex(config.run.attention, target.device)
    shape = (config.prompts.max_length, packing(config, target.device), flex)
    return taps, config.loss.distribution, *shape, config.run.feature_dtype


def _fingerprint(
    target: Target, taps: tuple[int, ...], final: bool, max_length: int, dtype: torch.dtype, rows: Sequence[Row]
) -> dict[str, Any]:
    """What tells these features from others."""
    data = hashlib.sha256()
    for row in rows:
        data.update(array("q", [row.index, len(row.tokens), *row.tokens[:max_length]]).tobytes())
    return {
        "weights": sample_hash(target.model.named_parameters()),
        "computed": f"{str(target.dtype).removeprefix('torch.')} on {target.device.type}",
        "taps": list(taps),
        "final": final,
        "max_length": max_length,
        "dtype": str(dtype).removeprefix("torch."),
        "template": template_hash(target.tokenizer),
        "data": data.hexdigest(),
    }
