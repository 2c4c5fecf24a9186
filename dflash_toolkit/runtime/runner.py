"""The device's side: state of the batch, the prefill, and the whole decoding step, captured as one CUDA graph.

A step is: prepare block -> draft -> head argmax -> verify (taps captured) -> accept -> context K/V of the committed
tokens, which plain steps leave for later (`context.py`). Everything it reads and writes lives on the device, so the
host launches it without waiting for the one before and reads its results from pinned memory when it likes. Shapes are
fixed: rows that stand for no request are inactive, have length 0 and write to the trash page.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.ops import Ops
from .capture import Captures, PinnedBuffers, to_device
from .context import ContextWriter
from .request import Committed, Request
from .sampler import Mode, Sampler, mode_of, unpack_logprobs
from .stack import Decoder, Rows
from .weights import DrafterWeights, TargetWeights

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
# tokens that a chunk of a prompt is padded to; of longer ones the device has more to do than the host has to launch
PREFILL_SIZES = tuple(range(64, 513, 64))


def buckets_up_to(max_batch: int) -> list[int]:
    """Batch sizes that steps are captured for."""
    return [*(b for b in BUCKETS if b < max_batch), max_batch]


def bucket_of(max_batch: int, rows: int) -> int:
    """Rows that are computed for a batch of `rows`."""
    return next(b for b in buckets_up_to(max_batch) if b >= rows)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Results on their way to the host."""

    tokens: Tensor  # int64 [rows, 1 + S] on the host: how many were committed, then the tokens
    logprobs: Tensor | None  # fp64 [rows, S, ...], see `Sampler.choose`
    wanted: tuple[int | None, ...]  # SamplingParams.logprobs by row
    done: torch.cuda.Event | None
    buffer: Tensor | None = None  # pinned memory that `tokens` is a view of, to be given back


class StepRunner:
    """Runs prefills and steps for up to `max_batch` requests; a `scheduler.Device`.

    Args:
        num_pages: of the cache, the trash page included.
        max_context: tokens of prompt and answer; the page table is wide enough for overshoot too.
        max_block: S of the longest block.
        scratch: bytes that graphs have for what a pass makes, from the first capture on.
        forced: int32 [steps, max_batch], drafted tokens to accept at each step whatever they are (synthetic
            acceptance); they are cut to the block.
    """

    def __init__(
        self,
        target: TargetWeights,
        drafter: DrafterWeights | None,
        ops: Ops,
        *,
        num_pages: int,
        page_size: int,
        max_batch: int,
        max_context: int,
        max_block: int,
        scratch: int = 0,
        forced: Tensor | None = None,
    ) -> None:
        self.target, self.drafter, self.ops = target, drafter, ops
        self.device, self.dtype = target.embedding.device, target.embedding.dtype
        self.lag = 1 if self.device.type == "cuda" else 0
        self.max_batch, self.max_block, self.page_size = max_batch, max_block, page_size
        reach = max_context + (self.lag + 2) * max_block

        def new(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.lengths = new(max_batch, dtype=torch.int32)
        self.last_token = new(max_batch, dtype=torch.int64)
        self.active = new(max_batch, dtype=torch.bool)
        self.pages_per_request = -(-reach // page_size)
        self.page_table = new(max_batch, self.pages_per_request, dtype=torch.int32)
        self.sampler = Sampler(max_batch, target.spec.vocab_size, self.device, ops)
        self._forced, self._steps = forced, new(1, dtype=torch.int64)

        def decoder(weights: TargetWeights | DrafterWeights) -> Decoder:
            spec = weights.spec
            shape = (spec.num_layers, 2, num_pages * page_size, spec.num_kv_heads, spec.head_dim)
            # as far as the pages go: a chunk may fill the last one
            rope = spec.rope_table(self.pages_per_request * page_size, self.device)
            cache = new(*shape, dtype=self.dtype)
            return Decoder(spec, weights.layers, weights.norm, rope, cache, ops)

        self._verifier = decoder(target)
        self._proposer = decoder(drafter) if drafter else None
        self._graphs: dict[tuple[int, int, Mode], tuple[torch.cuda.CUDAGraph, Tensor, Tensor | None]] = {}
        self._captured = Captures(self.device, scratch)
        self._results = PinnedBuffers(max_batch * (1 + max_block))
        self.bucket = functools.partial(bucket_of, max_batch)  # a method would make a cycle with those that get it
        self._context: ContextWriter | None = None
        if drafter and self._proposer and max_block > 1:
            self._context = ContextWriter(
                drafter,
                self._proposer,
                self.lengths,
                self.page_table,
                page_size,
                max_block,
                self.bucket,
                self._captured,
            )
        self._last_hidden: Tensor | None = None  # [1, D] of the newest prefill chunk
        # what a captured prefill reads: tokens, and where they stand: start, count, pages
        self._reach = reach
        self._prompt = new(PREFILL_SIZES[-1], dtype=torch.int64)
        self._place = new(2 + self.pages_per_request, dtype=torch.int32)
        self._prefills: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    # ---- prefill -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], start: int, pages: Sequence[int]) -> None:
        """Write keys and values of target and drafter for `ids`, which stand at `start`, `start` + 1, ...

        A short chunk is a captured graph, padded: launching its hundreds of kernels would take the host longer than
        they take the device.
        """
        size = next((s for s in PREFILL_SIZES if s >= len(ids)), None)
        if self.device.type != "cuda" or size is None or start + size > self._reach:
            return self.prefill_eagerly(ids, start, pages)
        self.place(ids, start, pages)
        graph, self._last_hidden = self._prefill_graph(size)
        graph.replay()

    @torch.inference_mode()
    def prefill_eagerly(self, ids: Sequence[int], start: int, pages: Sequence[int]) -> None:
        """The same without a graph, unpadded."""
        tokens = to_device(ids, torch.int64, self.device)
        table = to_device(pages, torch.int32, self.device)[None]
        rows = Rows(to_device([start], torch.int32, self.device), table, self.page_size)
        self._last_hidden = self._prefill(tokens, rows, to_device([len(ids)], torch.int32, self.device))

    def place(self, ids: Sequence[int], start: int, pages: Sequence[int]) -> None:
        """Put a chunk where `padded_prefill` finds it; what stands behind its pages goes into the trash page."""
        self._prompt[: len(ids)].copy_(to_device(ids, torch.int64, self.device))
        rest = [0] * (self.pages_per_request - len(pages))
        self._place.copy_(to_device([start, len(ids), *pages, *rest], torch.int32, self.device))

    def padded_prefill(self, size: int) -> Tensor:
        """Prefill the placed chunk, padded to `size` tokens. Returns the state [1, D] of its last token.

        The padding writes keys and values behind the chunk, where nothing is read before it is written again.
        """
        rows = Rows(self._place[:1], self._place[None, 2:], self.page_size)
        return self._prefill(self._prompt[:size], rows, self._place[1:2])

    def _prefill(self, tokens: Tensor, rows: Rows, count: Tensor) -> Tensor:
        """Prefill `tokens`, of which only the first `count` [1] are text; the state [1, D] of the last of these."""
        features, taps = self._features(len(tokens))
        hidden = self._verifier.forward(F.embedding(tokens, self.target.embedding), rows, taps)
        if self._context and features is not None:
            self._context.write(features, rows, count)
        return hidden.index_select(0, (count.long() - 1).clamp(min=0))

    def _prefill_graph(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The captured prefill of a chunk of that size, captured now if it was not yet."""
        if size not in self._prefills:
            self._prefills[size] = self._captured(lambda: self.padded_prefill(size))
        return self._prefills[size]

    @torch.inference_mode()
    def join(self, row: int, request: Request) -> Ticket | None:
        """Put a prefilled request into the batch; the prefill chooses its first token if it has none yet."""
        params = request.params
        mode = mode_of(params)
        self.sampler.set(row, params, request.prompt_ids, request.tokens)
        length = len(request.known_ids)
        self.lengths[row] = length
        self.active[row] = True
        self.set_pages(row, request.pages)
        if request.tokens:
            self.last_token[row] = request.tokens[-1]
            return None
        assert self._last_hidden is not None
        rows = slice(row, row + 1)
        before = self.lengths[rows] - 1  # the choice stands behind the last token of the prompt
        no_draft = self.last_token.new_empty(1, 0)
        choice, logprobs = self.sampler.choose(self._last_hidden, self.target.head, rows, no_draft, before, mode)
        self.last_token[rows] = choice[0]
        counts = torch.ones_like(before)
        if mode == Mode.FULL:
            self.sampler.count(rows, choice, counts)
        return self._ticket(torch.cat([counts[:, None], choice], dim=1), logprobs, [request])

    # ---- rows --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        self.page_table[row, : len(pages)].copy_(to_device(pages, torch.int32, self.device))

    @torch.inference_mode()
    def settle(self, rows: Sequence[int]) -> bool:
        """Write the drafter's context that plain steps of these rows left for later; False for want of memory."""
        try:
            if self._context:
                self._context.settle(rows)
        except torch.OutOfMemoryError:  # who ends must end: it only leaves nothing behind for others
            return False
        return True

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        if self._context:
            self._context.move(source, target)
        for field in (self.lengths, self.last_token, self.page_table):
            field[target].copy_(field[source])
        self.sampler.move(source, target)

    @torch.inference_mode()
    def leave(self, row: int) -> None:
        if self._context:
            self._context.forget(row)
        for field in (self.lengths, self.last_token, self.active, self.page_table):
            field[row].zero_()

    @torch.inference_mode()
    def check(self) -> None:
        """Use the device once. Raises what it raises at every use once it has failed."""
        self.lengths[:1].add_(0)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---- the step ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def decode(self, requests: Sequence[Request], block: int) -> Ticket:
        """Launch one step of rows 0..len(requests) - 1 with blocks of `block` tokens; 1 is plain decoding."""
        mode = max(mode_of(request.params) for request in requests)
        if self._context:
            self._context.before_step(len(requests), block)
        if self.device.type != "cuda":
            return self._ticket(*self._step(len(requests), block, mode), requests)
        graph, tokens, logprobs = self.graph(self.bucket(len(requests)), block, mode)
        graph.replay()
        return self._ticket(tokens, logprobs, requests)

    def launcher(self, rows: int, block: int) -> Callable[[], object]:
        """A greedy step of that shape as a function, for timing; on an empty batch it changes nothing."""
        if self.device.type == "cuda":
            return self.graph(rows, block, Mode.GREEDY)[0].replay
        return lambda: self.run_eagerly(rows, block)

    @torch.inference_mode()
    def run_eagerly(self, rows: int, block: int, mode: Mode = Mode.GREEDY) -> None:
        """A step of that shape without a graph."""
        self._step(rows, block, mode)

    def read(self, ticket: Ticket) -> list[Committed]:
        """Wait for a ticket."""
        if ticket.done is not None:
            ticket.done.synchronize()
        found = []
        for row, (count, *tokens) in enumerate(ticket.tokens.tolist()):
            best = ticket.wanted[row]
            logprobs = None
            if best is not None and ticket.logprobs is not None:
                logprobs = unpack_logprobs(ticket.logprobs[row, :count], best)
            found.append(Committed(tokens[:count], logprobs))
        if ticket.buffer is not None:
            self._results.give_back(ticket.buffer)
        return found

    @torch.inference_mode()
    def graph(self, rows: int, block: int, mode: Mode) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor | None]:
        """The captured step for a shape, captured now if it was not yet."""
        key = (rows, block, mode)
        if key not in self._graphs:
            saved = [field.clone() for field in self._mutable()]
            try:
                graph, (tokens, logprobs) = self._captured(lambda: self._step(rows, block, mode))
            finally:  # a step has run, also where its capture failed
                for field, value in zip(self._mutable(), saved, strict=True):
                    field.copy_(value)
            self._graphs[key] = (graph, tokens, logprobs)
        return self._graphs[key]

    def prepare(self, blocks: Sequence[int]) -> bool:
        """Capture the next prefill or step, greedy ones first, that is not there for these blocks; False if none."""
        if self.device.type != "cuda":
            return False
        for size in PREFILL_SIZES:
            if size not in self._prefills and size <= self._reach:
                self._place.zero_()  # all of it goes into the trash page
                self._prefill_graph(size)
                return True
        if self._context and 1 in blocks and self._context.prepare(buckets_up_to(self.max_batch)):
            return True
        shapes = itertools.product(Mode, buckets_up_to(self.max_batch), sorted(blocks, reverse=True))
        for mode, rows, block in shapes:
            if (rows, block, mode) not in self._graphs:
                self.graph(rows, block, mode)
                return True
        return False

    def _mutable(self) -> list[Tensor]:
        owed = [self._context.counts] if self._context else []
        return [self.lengths, self.last_token, self._steps, self.sampler.counts, *owed]

    def _step(self, batch: int, block: int, mode: Mode) -> tuple[Tensor, Tensor | None]:
        """One step of the first `batch` rows: int64 [batch, 1 + S] and the log-probabilities, see `Ticket`."""
        head = self.target.head
        lengths = self.lengths[:batch].clone()  # `accept` advances the state's own
        last = self.last_token[:batch]
        rows = Rows(lengths, self.page_table[:batch], self.page_size)

        draft = self._propose(last, rows, block) if block > 1 else last.new_empty(batch, 0)
        ids = torch.cat([last[:, None], draft], dim=1)
        features, taps = self._features(batch * block)
        hidden = self._verifier.forward(F.embedding(ids.flatten(), self.target.embedding), rows, taps)
        choice, logprobs = self.sampler.choose(hidden, head, slice(0, batch), draft, lengths, mode)
        counts, tokens = self.ops.accept(
            draft, choice, self.active[:batch], self.lengths[:batch], last, self._forced_now(batch, block)
        )
        if mode == Mode.FULL:
            self.sampler.count(slice(0, batch), tokens, counts)
        if self._context and features is not None:
            if block > 1:
                self._context.write(features, rows, counts)
            else:
                self._context.keep(features, counts)
        return torch.cat([counts[:, None].long(), tokens], dim=1), logprobs

    def _propose(self, last: Tensor, rows: Rows, block: int) -> Tensor:
        """Drafted tokens int64 [B, S - 1] behind `last` [B]: one non-causal pass over the context and the block."""
        assert self.drafter is not None and self._proposer is not None
        masks = last.new_full((len(last), block - 1), self.drafter.config.mask_token_id)
        ids = torch.cat([last[:, None], masks], dim=1)
        hidden = self._proposer.forward(F.embedding(ids.flatten(), self.target.embedding), rows)
        head = self.target.head if self.drafter.head is None else self.drafter.head
        return self.ops.linear_argmax(hidden, head).view(-1, block)[:, 1:]  # slot 0 predicts nothing

    def _features(self, rows: int) -> tuple[Tensor | None, dict[int, Tensor]]:
        """Room for the tapped layers' outputs [rows, K * D] and the view of each."""
        if self.drafter is None or self._context is None:
            return None, {}
        ids, width = self.drafter.config.target_layer_ids, self.target.spec.hidden_size
        features = torch.empty(rows, len(ids) * width, dtype=self.dtype, device=self.device)
        return features, dict(zip(ids, features.split(width, dim=1), strict=True))

    def _forced_now(self, batch: int, block: int) -> Tensor | None:
        if self._forced is None:
            return None
        now = self._forced.index_select(0, self._steps)[0, :batch].clamp(max=block - 1)
        self._steps.add_(1).remainder_(len(self._forced))
        return now

    # ---- host and device -----------------------------------------------------------------------------------

    def _ticket(self, tokens: Tensor, logprobs: Tensor | None, requests: Sequence[Request]) -> Ticket:
        rows = len(requests)
        wanted = tuple(request.params.logprobs for request in requests)
        if all(best is None for best in wanted):
            logprobs = None
        if self.device.type != "cuda":
            return Ticket(tokens[:rows], None if logprobs is None else logprobs[:rows], wanted, None)
        buffer = self._results.take()
        # contiguous, as else the copy would be waited for
        host = buffer[: rows * tokens.shape[1]].view(rows, -1).copy_(tokens[:rows], non_blocking=True)
        if logprobs is not None:
            pinned = torch.empty(logprobs[:rows].shape, dtype=logprobs.dtype, pin_memory=True)
            logprobs = pinned.copy_(logprobs[:rows], non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Ticket(host, logprobs, wanted, done, buffer)
