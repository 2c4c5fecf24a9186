"""The target's hidden states for the rows of a step, computed online or read from where they are kept.

On a CPU every row goes through the target alone, so its features do not depend on the rows beside it: a run resumed at
any step, wherever its features are kept, sees bit-identical numbers. On a GPU rows go through together, one behind the
other, each seeing itself alone; those of a target that cannot keep them apart go through it alone there too.

Processes that hold one target together (`Processes.peers`) tell each other what is missing and run all of it, each
keeping what is its own.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash_toolkit.fingerprint import sample_digest, tokens_digest
from dflash_toolkit.models.packed import separable
from dflash_toolkit.models.target import Target
from dflash_toolkit.progress import Progress

from ..config import TrainConfig
from ..distributed.parallel import Processes
from ..objective.blocks import PADDING, TILE, Features, sent
from ..objective.loss import use_flex
from ..optim.schedule import packing
from ..responses.corpus import Corpus, lengths_of
from ..responses.rows import Row
from .memory import enough_memory, memory_use, room_behind_step
from .served import ServedTarget
from .store import FP8, GIB, DiskStore, MemoryStore, Stored

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
        peers: the processes that hold the target together with this one: what is called here they all call.
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
        # rows in one forward
        self._several = isinstance(target, ServedTarget) or (target.device.type == "cuda" and separable(target.model))
        self._readers = ThreadPoolExecutor(READERS)
        self._coming: dict[bytes, Future[Stored]] = {}
        self._put_off: Callable[[int, Progress | None], None] | None = None

    @property
    def width(self) -> int:
        """Values a token."""
        return (len(self._taps) + self._final) * int(self._target.config.hidden_size)

    def nbytes(self, rows: Sequence[Row]) -> int:
        """What keeping `rows` takes."""
        a_token = self.width * self._dtype.itemsize + (4 if self._dtype == FP8 else 0)
        return a_token * int(np.minimum(lengths_of(rows), self._max_length).sum())

    def put_off(self, keep: Callable[[int, Progress | None], None]) -> None:
        """What `take_memory` has to do."""
        self._put_off = keep

    @property
    def waits(self) -> bool:
        """Whether a measured step is waited for, to see what of a GPU features may take."""
        return self._put_off is not None

    def take_memory(self, aside: int, beside: Progress | None = None) -> None:
        """Take memory and fill it, once a step was measured; every process must call this.

        Args:
            aside: bytes of the GPU that are kept free for what is no step.
            beside: the bar of what waits meanwhile.

        Raises:
            UserError: `run.features=memory`, and there is too little.
        """
        keep, self._put_off = self._put_off, None
        if keep is not None:
            keep(aside, beside)

    def missing(self, rows: Iterable[Row]) -> list[Row]:
        """Those of `rows` that are not kept; of rows with the same tokens the first."""
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
            sent(tokens, device), stacked[..., :split], sent(supervised, device), sent(document, device),
            sent(positions, device), stacked[..., split:] if self._final else None,
        )  # fmt: skip

    def fill(self, rows: Sequence[Row], beside: Progress | None = None) -> None:
        """Compute and keep what is missing of `rows`. Raises UserError when a disk fails."""
        missing = self.missing(rows)
        if not any(self._peers.all_gather(len(missing))):
            return
        self.store.expect(len(missing))
        with Progress("features", sum(map(self._length, missing)), unit="tok", under=beside) as progress:
            for found in self._computed(missing):
                for key, hidden in found.items():
                    self.store.add(key, Stored.of(hidden, self._dtype))
                if any(self._peers.all_gather(self.store.failed)):
                    break
                progress.advance(sum(map(len, found.values())))
        self.store.check()

    def flush(self) -> None:
        """Write what is computed and not yet written. Raises UserError when a disk fails."""
        self.store.flush()

    def check(self) -> None:
        """Raises UserError when features could not be written, or not be read, since training began to ask for them.
        `__call__` itself goes on without what failed, so that processes can stop together."""
        self.store.check()

    @property
    def reads_ahead(self) -> bool:
        """Whether it helps to announce rows with `ahead`."""
        return self.store.reads_ahead

    def ahead(self, rows: list[Row]) -> None:
        """Begin to read what the next call will want."""
        keys = {self._key(row) for row in rows}
        self._coming = {key: self._readers.submit(self._read, key) for key in keys if key in self.store}

    def _read(self, key: bytes) -> Stored:
        stored = self.store.get(key)
        if stored.data.is_cuda:
            return stored
        # both read what is only mapped
        return stored.each(Tensor.clone if self._target.device.type == "cpu" else Tensor.pin_memory)

    def _hidden(self, rows: list[Row]) -> list[Tensor]:
        """The hidden states [n, W] of each row."""
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
        """The hidden states [n, W] of rows by their keys, forward by forward, of which all peers run as many."""
        groups = list(fitting(rows, self._length)) if self._several else [[row] for row in rows]
        for i in itertools.count():
            group = groups[i] if i < len(groups) else []
            texts = [np.asarray(row.tokens[: self._length(row)], np.int32) for row in group]
            everyone = self._peers.all_gather((texts, i + 1 < len(groups)))
            found: dict[bytes, Tensor] = {}
            for peer, (theirs, _) in enumerate(everyone):
                hidden = self._forward(theirs) if theirs else ()
                if peer == self._peers.rank:
                    # made under inference mode; autograd wants an ordinary tensor
                    found = {self._key(row): h.clone() for row, h in zip(group, hidden, strict=True)}
            yield found
            if not any(more for _, more in everyone):
                return

    def _forward(self, texts: list[npt.NDArray[np.int32]]) -> tuple[Tensor, ...]:
        """The hidden states [n, W] of texts that stand one behind the other in one forward."""
        lengths = [len(text) for text in texts]
        ids = torch.as_tensor(np.concatenate(texts), dtype=torch.long)[None].to(self._target.device)
        documents = lengths if len(texts) > 1 else None
        out = self._target.forward(ids, taps=self._taps, final=self._final, lengths=documents)
        features = out.features
        assert features is not None
        if out.final is not None:
            features = torch.cat([features, out.final], dim=-1)
        return features[0].split(lengths)


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
    mine: Sequence[int] | None = None,
    processes: Processes | None = None,
    after_step: bool = False,
) -> FeatureSource:
    """The source that `config.run.features` asks for, filled where that is done before training.

    Args:
        mine: indices of the rows that this process will ask for, and keeps; None is all.
        processes: that train together; each of them must call this.
        after_step: take a GPU's memory only in `take_memory`, which is called when a step was measured; without it, a
            share of what is free now.

    Raises:
        UserError: memory or disk cannot hold the features, or `run.feature_dir` holds others.
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

    def keep(aside: int, beside: Progress | None) -> None:
        use = memory_use(target.device)
        if use:
            store.give(room_behind_step(use, config.run.feature_gpu_share, aside))
        _keep(config, source, own, processes, beside=beside)

    if config.run.features != "online":
        source.put_off(keep)
    return source


def _opened(
    config: TrainConfig, target: Target, taps: tuple[int, ...], work: Path, processes: Processes
) -> FeatureSource:
    """Nothing is computed yet."""
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
        target, taps, config.prompts.max_length, packed=packed, dtype=dtype, store=store, final=final,
        pad_to=TILE if use_flex(run.attention, target.device) else 1, peers=processes.peers,
    )  # fmt: skip


def _keep(
    config: TrainConfig, source: FeatureSource, own: Sequence[Row], processes: Processes, fill: bool = True,
    beside: Progress | None = None,
) -> None:  # fmt: skip
    """Compute and keep what of this process's `own` rows is kept before training; refuse, or say, what cannot be."""
    run, store = config.run, source.store
    if run.features == "online" or (run.features == "auto" and config.optim.steps):
        return  # auto fills memory before a run over all rows only
    if run.features == "auto" and not any(processes.all_gather(store.room[0])):
        return  # and only a GPU's; one process may have none left where the others have some
    missing = source.missing(own)
    shares = processes.all_gather((len(missing), source.nbytes(missing), *store.room))
    count, needed, device, host = (sum(values) for values in zip(*shares, strict=True))  # of all processes together
    several = f", of {processes.world} processes together," if processes.world > 1 else ""
    room = f"{device / GIB:.1f} GiB of GPU memory and {host / GIB:.1f} GiB of host memory{several}"
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
                f"run.features=memory: {needed / GIB:.1f} GiB are needed; {room} may be used "
                f"(run.feature_gpu_share, run.feature_cache_gb); run.feature_dtype=float8 or fewer drafter.taps need "
                f"less, run.features=disk needs none"
            )
        if fill:
            source.fill(missing, beside)
    elif all(of_one <= on_device for _, of_one, on_device, _ in shares):
        source.fill(missing, beside)
    elif processes.main:
        say = beside.print if beside else functools.partial(print, file=sys.stderr)
        say(
            f"features of {count} rows: {needed / GIB:.1f} GiB; {room} hold a part, the rest is computed in every "
            f"epoch (run.feature_dtype=float8 halves them)"
        )


def features_key(config: TrainConfig, target: Target, taps: tuple[int, ...]) -> tuple[object, ...]:
    """Equal for configurations whose runs over the same rows can share a source."""
    flex = use_flex(config.run.attention, target.device)
    shape = (config.prompts.max_length, packing(config, target.device), flex)
    return taps, config.loss.distribution, *shape, config.run.feature_dtype


def _fingerprint(
    target: Target, taps: tuple[int, ...], final: bool, dtype: torch.dtype, peers: Processes
) -> dict[str, Any]:
    """What tells the features of a row from others of the same tokens."""
    held = [(name, tensor) for name, tensor in target.local_parameters() if not tensor.is_meta]
    slices = peers.all_gather(sample_digest(held))
    where = "by vLLM" if isinstance(target, ServedTarget) else f"on {target.device.type}"
    return ({"slices": peers.world} if peers.world > 1 else {}) | {
        "weights": "/".join(slices),
        "computed": f"{str(target.dtype).removeprefix('torch.')} {where}",
        "taps": list(taps),
        "final": final,
        "dtype": str(dtype).removeprefix("torch."),
    }
