"""The target's hidden states for the rows of a step, computed or read from a store.

On a CPU every row runs through the target alone, so its features do not depend on other rows: a run that resumes at any
step, with any store, sees bit-identical numbers. On a GPU, rows are concatenated in one forward, and each attends only
to itself; a target that cannot separate them gets one row at a time on a GPU too.

Processes that share a target (`Processes.peers`) exchange their missing rows and compute all of them together; each
keeps its own.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash_toolkit.fingerprint import model_digest, sample_digest, tokens_digest
from dflash_toolkit.models.packed import separable
from dflash_toolkit.models.target import Target
from dflash_toolkit.preflight import size
from dflash_toolkit.progress import Progress

from ..config import TrainConfig
from ..distributed.parallel import Processes
from ..objective.blocks import TILE, Features
from ..objective.loss import use_flex
from ..optim.schedule import packing
from ..responses.corpus import Corpus, lengths_of
from ..responses.rows import Row
from .batch import batch_of
from .gpu_memory import enough_memory, memory_use, room_after_step
from .served import ServedTarget
from .store import FP8, GIB, DiskStore, MemoryStore, Stored

FORWARD_TOKENS = 16384  # tokens of one forward on a GPU
R = TypeVar("R")
READERS = 4  # threads that read the next step's rows


def device_room(target: Target, share: float) -> int:
    """Returns the bytes of a GPU's memory that features may use; 0 on a CPU."""
    if target.device.type != "cuda":
        return 0
    return int(share * torch.cuda.mem_get_info(target.device)[0])


class FeatureSource:
    """Turns rows into `Features`.

    Args:
        pad_to: the common length of a step's rows is a multiple of this.
        packed: concatenate all rows into one of this many tokens; 0 keeps them separate.
        final: also keep the target's last hidden state, after the taps; every layer of the target runs then.
        dtype: dtype of stored hidden states. Others are rounded to it too, so that a run does not depend on what a
            store holds. None is the target's own.
        store: where they are kept; None keeps none.
        peers: processes that share the target with this one; they all make the same calls.
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
        final: bool = False,
        peers: Processes | None = None,
    ) -> None:
        self._target = target
        self._peers = peers or Processes()
        self._taps = taps
        self._final = final
        self._max_length = min(max_length, packed) if packed else max_length
        self._pad_to = pad_to
        self._packed = packed
        self._dtype = dtype or target.dtype
        self.store = store or MemoryStore(0, 0)
        # several rows in one forward
        self._several = isinstance(target, ServedTarget) or (target.device.type == "cuda" and separable(target.model))
        self._readers = ThreadPoolExecutor(READERS)
        self._coming: dict[bytes, Future[Stored]] = {}
        self._put_off: Callable[[int, Progress | None], None] | None = None

    @property
    def width(self) -> int:
        """Values per token."""
        return (len(self._taps) + self._final) * int(self._target.config.hidden_size)

    def nbytes(self, rows: Sequence[Row]) -> int:
        """Returns the bytes of the hidden states of `rows`."""
        a_token = self.width * self._dtype.itemsize + (4 if self._dtype == FP8 else 0)
        return a_token * int(np.minimum(lengths_of(rows), self._max_length).sum())

    def put_off(self, keep: Callable[[int, Progress | None], None]) -> None:
        """Defers `keep` until `take_memory`."""
        self._put_off = keep

    @property
    def waits(self) -> bool:
        """Whether the source waits for a measured step before it uses the GPU's memory."""
        return self._put_off is not None

    def take_memory(self, aside: int, bar: Progress | None = None) -> None:
        """Reserves and fills memory after a measured step; every process must call it.

        Args:
            aside: bytes of the GPU to keep free for work other than steps.
            bar: the progress bar of the paused work.

        Raises:
            UserError: `run.features=memory`, and the memory is too small.
        """
        keep, self._put_off = self._put_off, None
        if keep is not None:
            keep(aside, bar)

    def missing(self, rows: Iterable[Row]) -> list[Row]:
        """Returns the rows that are not stored, one for each distinct text."""
        return self._missing((self._key(row), row) for row in rows)

    def _missing(self, keyed: Iterable[tuple[bytes, Row]]) -> list[Row]:
        found: dict[bytes, Row] = {}
        for key, row in keyed:
            if key not in self.store:
                found.setdefault(key, row)
        return list(found.values())

    def _length(self, row: Row) -> int:
        return min(len(row.tokens), self._max_length)

    def _key(self, row: Row) -> bytes:
        return tokens_digest(row.tokens[: self._max_length])

    def __call__(self, rows: list[Row]) -> Features:
        """Returns features of `rows` on the target's device: packed, or padded on the right to a common length."""
        hidden = self._hidden(rows)
        split = len(self._taps) * self._target.config.hidden_size
        return batch_of(rows, hidden, split, self._target.device, self._packed, self._pad_to)

    def fill(self, rows: Sequence[Row], bar: Progress | None = None) -> None:
        """Computes and stores the missing rows of `rows`. Raises UserError when a disk fails."""
        missing = self.missing(rows)
        if not any(self._peers.all_gather(len(missing))):
            return
        self.store.expect(len(missing))
        with Progress("features", sum(map(self._length, missing)), unit="tok", under=bar) as progress:
            for found in self._computed(missing):
                for key, hidden in found.items():
                    self.store.add(key, Stored.of(hidden, self._dtype))
                if any(self._peers.all_gather(self.store.failed)):
                    break
                progress.advance(sum(map(len, found.values())))
        self.store.check()

    def flush(self) -> None:
        """Writes computed rows that are not on disk yet. Raises UserError when a disk fails."""
        self.store.flush()

    def check(self) -> None:
        """Raises UserError if features could not be written or read since training began.

        `__call__` continues without the failed disk, so that processes can stop together.
        """
        self.store.check()

    @property
    def reads_ahead(self) -> bool:
        """Whether `ahead` speeds up the next call."""
        return self.store.reads_ahead

    def ahead(self, rows: list[Row]) -> None:
        """Starts to read the rows of the next call."""
        keys = {self._key(row) for row in rows}
        self._coming = {key: self._readers.submit(self._read, key) for key in keys if key in self.store}

    def _read(self, key: bytes) -> Stored:
        stored = self.store.get(key)
        if stored.data.is_cuda:
            return stored
        # either copy reads the memory map
        return stored.each(Tensor.clone if self._target.device.type == "cpu" else Tensor.pin_memory)

    def _hidden(self, rows: list[Row]) -> list[Tensor]:
        """Returns the hidden states [n, W] of each row."""
        coming, self._coming = self._coming, {}
        fresh: dict[bytes, Stored] = {}
        keys = [self._key(row) for row in rows]
        for found in self._computed(self._missing(zip(keys, rows, strict=True))):
            for key, hidden in found.items():
                fresh[key] = Stored.of(hidden, self._dtype)
                self.store.add(key, fresh[key])

        def stored(key: bytes) -> Stored:
            if key in fresh:
                return fresh[key]
            return coming[key].result() if key in coming else self.store.get(key)

        return [stored(key).restore(self._target.device, self._target.dtype) for key in keys]

    def _computed(self, rows: list[Row]) -> Iterator[dict[bytes, Tensor]]:
        """Yields the hidden states [n, W] by row key, one forward at a time; all peers run the same number."""
        groups = list(fitting(rows, self._length)) if self._several else [[row] for row in rows]
        for i in itertools.count():
            group = groups[i] if i < len(groups) else []
            texts = [np.asarray(row.tokens[: self._length(row)], np.int32) for row in group]
            everyone = self._peers.all_gather((texts, i + 1 < len(groups)))
            found: dict[bytes, Tensor] = {}
            for peer, (theirs, _) in enumerate(everyone):
                hidden = self._forward(theirs) if theirs else ()
                if peer == self._peers.rank:
                    # autograd needs an ordinary tensor, not one of inference mode
                    found = {self._key(row): h.clone() for row, h in zip(group, hidden, strict=True)}
            yield found
            if not any(more for _, more in everyone):
                return

    def _forward(self, texts: list[npt.NDArray[np.int32]]) -> tuple[Tensor, ...]:
        """Returns the hidden states [n, W] of texts, concatenated in one forward."""
        lengths = [len(text) for text in texts]
        ids = torch.as_tensor(np.concatenate(texts), dtype=torch.long)[None].to(self._target.device)
        documents = lengths if len(texts) > 1 else None
        out = self._target.forward(ids, taps=self._taps, final=self._final, lengths=documents)
        features = out.features
        assert features is not None
        if out.final is not None:
            features = torch.cat([features, out.final], dim=-1)
        return features[0].split(lengths)


def fitting(rows: Iterable[R], length_of: Callable[[R], int], most: int = FORWARD_TOKENS) -> Iterator[list[R]]:
    """Yields the rows in order, in groups of at most `most` tokens; a longer row is its own group."""
    group: list[R] = []
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


# ---- the source of a run ---------------------------------------------------------------------------------------


def open_features(
    config: TrainConfig,
    target: Target,
    taps: tuple[int, ...],
    rows: Sequence[Row],
    work: Path,
    mine: Sequence[int] | None = None,
    processes: Processes | None = None,
    after_step: bool = False,
) -> FeatureSource:
    """Returns the source for `config.run.features`, filled if it is filled before training.

    Args:
        mine: indices of the rows that this process will use and store; None is all.
        processes: the processes that train together; each of them must call this.
        after_step: use a GPU's memory only in `take_memory`, which is called after a measured step; without it, use a
            share of the memory that is free now.

    Raises:
        UserError: memory or disk is too small, or `run.feature_dir` holds other features.
    """
    processes = processes or Processes()
    source = processes.barrier(_opened, config, target, taps, work, processes)
    own = rows
    if mine is not None:
        own = rows.take(mine) if isinstance(rows, Corpus) else [rows[i] for i in mine]
    with enough_memory(config):
        if not (after_step and isinstance(source.store, MemoryStore) and memory_use(target.device)):
            _keep(config, source, own, processes)
            return source
    if config.run.features == "memory":  # more than is free now will not be free then
        _keep(config, source, own, processes, fill=False)
    store = source.store
    store.give(0)

    def keep(aside: int, bar: Progress | None) -> None:
        use = memory_use(target.device)
        if use:
            store.give(room_after_step(use, config.run.feature_gpu_share, aside))
        _keep(config, source, own, processes, bar=bar)

    if config.run.features != "online":
        source.put_off(keep)
    return source


def _opened(
    config: TrainConfig, target: Target, taps: tuple[int, ...], work: Path, processes: Processes
) -> FeatureSource:
    """Returns the source before anything is computed."""
    run, final = config.run, config.loss.distribution
    packed, _ = packing(config, target.device)
    dtype = {"auto": target.dtype, "bfloat16": torch.bfloat16, "float8": FP8}[run.feature_dtype]
    store: MemoryStore | DiskStore
    if run.features in ("disk", "hybrid"):
        folder = Path(run.feature_dir) if run.feature_dir else work / "features"
        store = DiskStore(folder, _fingerprint(target, taps, final, dtype, processes.peers))
    elif run.features == "online":
        store = MemoryStore(0, 0)
    else:
        host = int(run.feature_cache_gb * GIB) // processes.here
        store = MemoryStore(device_room(target, run.feature_gpu_share), host)
    return FeatureSource(
        target, taps, config.prompts.row_tokens, packed=packed, dtype=dtype, store=store, final=final,
        pad_to=TILE if use_flex(run.attention, target.device) else 1, peers=processes.peers,
    )  # fmt: skip


def _keep(
    config: TrainConfig, source: FeatureSource, own: Sequence[Row], processes: Processes, fill: bool = True,
    bar: Progress | None = None,
) -> None:  # fmt: skip
    """Fills the store with `own` rows if that happens before training; refuses or reports rows without room."""
    run, store = config.run, source.store
    if run.features == "online" or (run.features == "auto" and config.optim.steps):
        return  # auto fills memory only before a run over all rows
    if run.features == "auto" and not any(processes.all_gather(store.room[0])):
        return  # and only a GPU's memory; one process may have none left while others have some
    missing = source.missing(own)
    shares = processes.all_gather((len(missing), source.nbytes(missing), *store.room))
    count, needed, device, host = (sum(values) for values in zip(*shares, strict=True))  # sums over all processes
    several = f" (of all {processes.world} processes)" if processes.world > 1 else ""
    room = f"{size(device)} of GPU memory and {size(host)} of host memory{several}"
    if isinstance(store, DiskStore):
        reserved = processes.rank_zero(store.reserve, needed) if count else None
        if reserved:
            print(f"features of {count} rows: {reserved}", file=sys.stderr)
        store.expect(len(missing))
        if run.features == "disk":
            processes.barrier(source.fill, missing)
            processes.barrier(source.flush)
    elif run.features == "memory":
        if any(of_one > on_device + on_host for _, of_one, on_device, on_host in shares):
            raise processes.mistake(
                f"run.features=memory needs {size(needed)}, but {room} may be used "
                f"(run.feature_gpu_share, run.feature_cache_gb); give run.feature_dtype=float8, "
                f"fewer drafter.taps or run.features=disk"
            )
        if fill:
            source.fill(missing, bar)
    elif all(of_one <= on_device for _, of_one, on_device, _ in shares):
        source.fill(missing, bar)
    elif processes.main:
        say = bar.print if bar else functools.partial(print, file=sys.stderr)
        say(
            f"features of {count} rows: {size(needed)}; {room} hold a part, the rest is computed in every "
            f"epoch (run.feature_dtype=float8 halves them)"
        )


def features_key(config: TrainConfig, target: Target, taps: tuple[int, ...]) -> tuple[object, ...]:
    """Returns a key that is equal for configurations whose runs over the same rows can share a source."""
    flex = use_flex(config.run.attention, target.device)
    shape = (config.prompts.row_tokens, config.prompts.join_to, packing(config, target.device), flex)
    return taps, config.loss.distribution, *shape, config.run.feature_dtype


def _fingerprint(
    target: Target, taps: tuple[int, ...], final: bool, dtype: torch.dtype, peers: Processes
) -> dict[str, Any]:
    """Returns the settings on which the features of given tokens depend."""
    held = [(name, tensor) for name, tensor in target.local_parameters() if not tensor.is_meta]
    slices = peers.all_gather(sample_digest(held))
    where = "by vLLM" if isinstance(target, ServedTarget) else f"on {target.device.type}"
    return ({"slices": peers.world} if peers.world > 1 else {}) | {
        "target": model_digest(target.name),  # None: not a folder or a cached name
        "weights": "/".join(slices),
        "computed": f"{str(target.dtype).removeprefix('torch.')} {where}",
        "taps": list(taps),
        "final": final,
        "dtype": str(dtype).removeprefix("torch."),
    }
