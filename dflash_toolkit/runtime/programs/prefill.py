"""Passes of one chunk of a prompt or of several.

Short chunks are padded and captured; others run without a graph, in slices (`prefill_pass.py`).
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.tree import TreeRows
from ..exact import EXACT_BATCH
from ..graphs import Captures, download, to_device
from ..pace import Pace
from ..prefill_job import PrefillJob, PrefillLimits, ScoredTokens
from ..prompt_logprobs import score
from ..stack import Rows, Slices, States, exhaust
from .context import StepContext
from .prefill_pass import PrefillPass, operations_of

# sizes that a chunk is padded to; a longer chunk takes the device more time than the host needs for its launches
PREFILL_SIZES = tuple(range(64, 513, 64))
PREFILL_LIMITS = PrefillLimits(most=8, sizes=(64, 128, 256), rows=1024)
PREFILL_COUNTS = (2, 4, 8)  # batches of chunks are padded to these counts
# passes without a graph that launch all kernels of others: tokens of a chunk alone; chunks of a pass, and their tokens
ALONE = (513, 768, 1024, 1536, 2048, 3072)
PACKED_COUNTS = (2, PREFILL_LIMITS.most + 1, *(1 << n for n in range(5, 11)))
PACKED_SIZES = (1, 4, 16, 32, 64, 128, 256, 512, 1024)
COLUMNS = 16  # page tables have a multiple of this, as kernels are compiled once more for others


class PrefillPrograms:
    """Computes chunks of prompts: keys, values and recurrent states of target and drafter.

    Args:
        reach: maximum tokens of a request in the page table.
        packed: maximum rows of a pass with several chunks of any length.

    Attributes:
        last_hidden: [chunks, D], states of the last tokens of the newest prefill.
        captured: graphs of single chunks, by size.
        captured_batches: graphs of batches, by size and count.
    """

    def __init__(
        self, context: StepContext, capture: Captures, page_size: int, pages: int, reach: int, packed: int, pace: Pace
    ) -> None:
        self._context, self._capture = context, capture
        self._page_size, self._pages, self._reach = page_size, pages, reach
        device, target = context.device, context.target
        # recurrent layers take chunks of one length
        packs = len(context.modes) > EXACT_BATCH and not target.spec.recurrent
        self.limits, self._pace = replace(PREFILL_LIMITS, packed=packed if packs else 0), pace
        self.last_hidden: Tensor | None = None
        # inputs of a captured prefill: tokens; start, count, slot of states, pages
        self._tokens = torch.zeros(PREFILL_SIZES[-1], dtype=torch.int64, device=device)
        self._place = torch.zeros(3 + pages, dtype=torch.int32, device=device)
        width, dtype = target.spec.hidden_size, target.embedding.dtype
        self._hidden = torch.zeros(PREFILL_SIZES[-1], width, dtype=dtype, device=device)  # its output
        self.captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        # inputs of a captured batch: tokens of all chunks; starts, counts, slots and pages of all chunks
        self._batch_tokens = torch.zeros(PREFILL_LIMITS.rows, dtype=torch.int64, device=device)
        kinds = [*3 * [PREFILL_LIMITS.most], PREFILL_LIMITS.most * pages]
        self._batch_places = torch.zeros(sum(kinds), dtype=torch.int32, device=device)
        *self._starts_counts_slots, tables = self._batch_places.split(kinds)
        self._tables = tables.view(PREFILL_LIMITS.most, -1)
        self.captured_batches: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._not_run = self.uncaptured_shapes
        self._others: Any = {}, {}, self.uncaptured_shapes

    def exchange(self) -> None:
        """Hides the graphs, and shows those that were hidden before."""
        own = self.captured, self.captured_batches, self._not_run
        (self.captured, self.captured_batches, self._not_run), self._others = self._others, own

    def capture_next(self) -> bool:
        """Captures one prefill that has no graph yet; returns False if there is none."""
        for size in PREFILL_SIZES:
            if size not in self.captured and size <= self._reach:
                self.graph(size)
                return True
        for shape in self.batch_shapes:
            if shape not in self.captured_batches:
                self._capture_batch(*shape)
                return True
        return False

    def load_next(self) -> bool:
        """Runs a pass that loads kernels which passes without a graph may need; returns False if all are loaded."""
        if not self._not_run:
            return False
        self.run_empty(*self._not_run.pop())
        return True

    def start(self, jobs: Sequence[PrefillJob]) -> PrefillPass:
        """Returns a pass of these chunks. Nothing of it is launched yet.

        A short chunk is padded and replays a captured graph, as do several: launching their hundreds of kernels would
        take the host longer than they take the device. Longer chunks are packed.
        """
        sizes = [len(job.ids) for job in jobs]
        if len(jobs) > 1:
            size = self.limits.padded(sizes)
        elif self._context.device.type == "cuda":
            size = next((size for size in PREFILL_SIZES if size >= sizes[0]), None)
        else:
            size = None
        if size is not None and max(job.start for job in jobs) + size > self._reach:  # the padding would have no pages
            size = None
        if len(jobs) == 1:
            return self.unpadded(jobs[0]) if size is None else self._at_once(jobs, self._replay, jobs[0], size)
        if size is not None:
            return self._at_once(jobs, self._launch_batch, jobs, size)
        return self.packed(jobs) if self.limits.packed else self._at_once(jobs, self._launch_in_turn, jobs)

    def _at_once(self, jobs: Sequence[PrefillJob], launch: Callable[..., Tensor | None], *args: Any) -> PrefillPass:
        """Returns a pass in one slice."""

        def slices() -> Slices[Tensor | None]:
            return launch(*args)
            yield

        return PrefillPass(slices(), [sum(self._operations(jobs))], self._pace, jobs)

    def _operations(self, jobs: Sequence[PrefillJob]) -> list[float]:
        proposer = self._context.proposer
        return operations_of(self._context.target.spec, proposer.weights.config if proposer else None, jobs)

    # ---- one chunk -------------------------------------------------------------------------------------

    def _replay(self, job: PrefillJob, size: int) -> Tensor | None:
        self.place(job)
        graph, self.last_hidden = self.graph(size)
        graph.replay()
        return self._score(self._hidden, job.scores)

    def unpadded(self, job: PrefillJob) -> PrefillPass:
        """Returns a pass of one chunk without a graph."""
        device = self._context.device
        tokens = to_device(job.ids, torch.int64, device)
        start, count, state, pages = aligned([[job.start], [len(job.ids)], [job.state], table_of([job])], device)
        wanted = None if job.scores else count.long() - 1
        rows = Rows(start, pages[None], self._page_size, states=self._states(state, count), wanted=wanted)

        def slices() -> Slices[Tensor | None]:
            hidden = yield from self._slices(tokens, rows, count)
            self.last_hidden = hidden[-1:]
            return self._score(hidden, job.scores)

        return PrefillPass(slices(), self._operations([job]), self._pace, [job])

    def place(self, job: PrefillJob) -> None:
        """Copies a chunk to the inputs of `padded`."""
        device = self._context.device
        self._tokens[: len(job.ids)].copy_(to_device(job.ids, torch.int64, device))
        rest = [0] * (self._pages - len(job.pages))
        self._place.copy_(to_device([job.start, len(job.ids), job.state, *job.pages, *rest], torch.int32, device))

    def padded(self, size: int) -> Tensor:
        """Prefills the placed chunk, padded to `size` tokens. Returns the state [1, D] of its last token."""
        count = self._place[1:2]
        states = self._states(self._place[2:3], count)
        rows = Rows(self._place[:1], self._place[None, 3:], self._page_size, count, states)
        hidden = exhaust(self._slices(self._tokens[:size], rows, count))
        last = _last_of(hidden, count)
        self._hidden[:size].copy_(hidden)
        return last

    def graph(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Returns the graph of a chunk of that size and the state it writes; captures it first if necessary."""
        if size not in self.captured:
            placed = self._place.clone()
            self._place.zero_()  # the chunk runs twice: it writes to the null block and to unused states
            self._place[1:2].fill_(1)
            try:
                self.captured[size] = self._capture(lambda: self.padded(size))
            finally:
                self._place.copy_(placed)
        return self.captured[size]

    def _slices(
        self, tokens: Tensor, rows: Rows, counts: Tensor, packed: Sequence[int] | None = None
    ) -> Slices[Tensor]:
        """Prefills the first `counts` tokens of each row; the others are padding. Returns the wanted states.

        Args:
            packed: tokens of each chunk, if they follow each other without padding.
        """
        slices, features = self._context.verifier.slices(tokens, rows)
        hidden = yield from slices
        if (proposer := self._context.proposer) and features is not None:
            if packed is None:
                proposer.write_context(features, rows, counts)
            else:
                proposer.write_packed_context(features, rows, counts, packed)
        return hidden

    def _states(self, slots: Tensor, counts: Tensor) -> States | None:
        return States(slots=slots, counts=counts) if self._context.state.recurrent else None

    def _score(self, hidden: Tensor, scores: ScoredTokens | None) -> Tensor | None:
        """Runs without a graph: few requests need scores, and they have many rows."""
        if scores is None:
            return None
        context = self._context
        tokens = to_device(scores.ids, torch.int64, context.device)
        found = score(
            hidden[: len(tokens)], context.target.head, tokens, scores.top, context.ops, context.target.spec.logit_scale
        )
        return download(found) if context.device.type == "cuda" else found

    # ---- several chunks --------------------------------------------------------------------------------

    @property
    def batch_shapes(self) -> list[tuple[int, int]]:
        """Tokens of a chunk and number of chunks of the batches that are captured."""
        return batch_shapes(len(self._context.modes), self._reach)

    @property
    def uncaptured_shapes(self) -> list[tuple[int, int]]:
        """Returns the chunks, and the tokens of each, of passes without a graph that together launch all kernels."""
        counts = [count for count in PACKED_COUNTS if count <= len(self._context.modes)]
        packed = [(n, size) for n, size in itertools.product(counts, PACKED_SIZES) if n * size <= self.limits.packed]
        return [(n, size) for n, size in [(1, size) for size in ALONE] + packed if size <= self._reach]

    @torch.inference_mode()
    def run_empty(self, count: int, size: int) -> None:
        """Runs a pass without a graph that writes to the null block."""
        job = PrefillJob([0] * size, 0, [0] * -(-size // self._page_size))
        (self.packed([job] * count) if count > 1 else self.unpadded(job)).run()

    def packed(self, jobs: Sequence[PrefillJob]) -> PrefillPass:
        """Returns a pass of chunks of any lengths without padding and without a graph; not for recurrent layers."""
        counts, starts = [len(job.ids) for job in jobs], [job.start for job in jobs]
        firsts = list(itertools.accumulate(counts, initial=0))
        device, batch, m = self._context.device, len(jobs), sum(counts)
        tokens = to_device([token for job in jobs for token in job.ids], torch.int64, device)
        first, lengths, count, pages = aligned([firsts, starts, counts, table_of(jobs)], device)
        table = pages.view(batch, -1)
        requests = torch.repeat_interleave(count, output_size=m)
        at = torch.arange(m, dtype=torch.int32, device=device)
        depths = at - first[requests]
        positions = lengths[requests] + depths
        page = table[requests, positions // self._page_size]
        slots = page * self._page_size + positions % self._page_size
        nothing = torch.zeros(m, device=device)
        # a chunk is a chain after its context
        chains = TreeRows(
            first, requests.int(), torch.where(depths > 0, at - 1, at), depths, tokens, positions, slots, nothing,
            nothing.long(),
        )  # fmt: skip
        paths = at[:1].expand(batch, max(counts), max(counts))  # only its shape is used
        rows = Rows(lengths, table, self._page_size, tree=chains, paths=paths, chains=True, wanted=first[1:].long() - 1)

        def slices() -> Slices[None]:
            self.last_hidden = yield from self._slices(tokens, rows, count, counts)

        return PrefillPass(slices(), self._operations(jobs), self._pace, jobs, (table, slots))

    def _launch_batch(self, jobs: Sequence[PrefillJob], size: int) -> None:
        """Prefills chunks of several requests in one pass, padded to one length and to one of PREFILL_COUNTS."""
        count = next(each for each in PREFILL_COUNTS if each >= len(jobs))
        self.place_batch(jobs, size)
        if self._context.device.type != "cuda":
            self.last_hidden = self.padded_batch(size, count)
            return
        if (size, count) not in self.captured_batches:
            self._capture_batch(size, count)
            self.place_batch(jobs, size)
        graph, self.last_hidden = self.captured_batches[size, count]
        graph.replay()

    def _launch_in_turn(self, jobs: Sequence[PrefillJob]) -> None:
        last = []
        for job in jobs:
            self.start([job]).run()
            assert self.last_hidden is not None
            last.append(self.last_hidden.clone())  # the next replay overwrites the graph's output
        self.last_hidden = torch.cat(last)

    def place_batch(self, jobs: Sequence[PrefillJob], size: int) -> None:
        """Copies chunks to the inputs of `padded_batch`; the padding goes to the null block."""
        device, unused = self._context.device, self.limits.most - len(jobs)
        tokens = [token for job in jobs for token in (*job.ids, *[0] * (size - len(job.ids)))]
        places = [*[job.start for job in jobs], *[0] * unused]
        places += [*[len(job.ids) for job in jobs], *[1] * unused]
        places += [*[job.state for job in jobs], *[0] * unused]
        for job in jobs:
            places += [*job.pages, *[0] * (self._pages - len(job.pages))]
        places += [0] * (unused * self._pages)
        self._batch_tokens[: len(tokens)].copy_(to_device(tokens, torch.int64, device))
        self._batch_places.copy_(to_device(places, torch.int32, device))

    def padded_batch(self, size: int, count: int) -> Tensor:
        """Prefills the placed chunks. Returns the states [count, D] of their last tokens."""
        starts, counts, slots = (each[:count] for each in self._starts_counts_slots)
        rows = Rows(starts, self._tables[:count], self._page_size, counts, self._states(slots, counts))
        hidden = exhaust(self._slices(self._batch_tokens[: size * count], rows, counts))
        last = torch.arange(count, device=self._context.device) * size + counts.long() - 1
        return hidden.index_select(0, last)

    @torch.inference_mode()
    def run_empty_batch(self, size: int, count: int) -> None:
        """Runs a batch of empty chunks, without a graph."""
        self._place_empty_batch()
        self.padded_batch(size, count)

    def _place_empty_batch(self) -> None:
        """Places chunks that write to the null block and to unused states."""
        self._batch_places.zero_()
        self._starts_counts_slots[1].fill_(1)

    def _capture_batch(self, size: int, count: int) -> None:
        self._place_empty_batch()
        self.captured_batches[size, count] = self._capture(lambda: self.padded_batch(size, count))


def table_of(jobs: Sequence[PrefillJob]) -> list[int]:
    """Returns the pages of chunks, each in as many columns, a multiple of COLUMNS."""
    wide = -(-max(len(job.pages) for job in jobs) // COLUMNS) * COLUMNS
    return [page for job in jobs for page in (*job.pages, *[0] * (wide - len(job.pages)))]


def aligned(parts: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Returns vectors in int32, in one copy to the device. Each begins at a multiple of 16 bytes, as kernels are
    compiled once more for each pointer that does not."""
    sizes = [-(-len(part) // 4) * 4 for part in parts]
    padded = [value for part, size in zip(parts, sizes, strict=True) for value in (*part, *[0] * (size - len(part)))]
    every = to_device(padded, torch.int32, device).split(sizes)
    return [one[: len(part)] for one, part in zip(every, parts, strict=True)]


def _last_of(hidden: Tensor, count: Tensor) -> Tensor:
    """Returns the state [1, D] of the last of the first `count` [1] tokens."""
    return hidden.index_select(0, (count.long() - 1).clamp(min=0))


def batch_shapes(max_num_seqs: int, reach: int) -> list[tuple[int, int]]:
    """Returns the tokens of a chunk and the number of chunks of the padded batches, which are captured."""
    if max_num_seqs <= EXACT_BATCH:
        return []
    shapes = itertools.product(PREFILL_LIMITS.sizes, PREFILL_COUNTS)
    return [(size, n) for size, n in shapes if PREFILL_LIMITS.fits([size] * n) and size <= reach]
