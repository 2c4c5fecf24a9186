"""The device's side: prefills, and the whole decoding step, captured as one CUDA graph.

A step is: propose a draft -> verify it (taps captured) -> write the context's keys and values of the committed tokens.
Where not all requests are greedy it is captured in parts (`parts.py`); over draft trees it is another (`tree_step.py`).
Everything it reads and writes lives on the device (`batch_state.py`), so the host launches it without waiting for the
one before and reads its results from pinned memory when it likes. Shapes are fixed: rows without a request and the
padding of a prompt's chunk write to the null block.
"""

import contextlib
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibration import Calibration
from ..draft_tree import WIDTH
from ..generation import TokenLogprobs
from ..grammar import Matcher, masks_of, words_of
from ..kernels.delta import DeltaMemory
from ..kernels.ops import Ops
from .batch_state import BatchState
from .budget import EXACT_BATCH, ROWS, row_buckets
from .capture import Captures, PinnedBuffers, bucket_of, buckets_up_to, to_device, upload
from .parts import Between, Block, Part
from .prefill_job import PrefillJob, PrefillLimits, ScoredTokens
from .prompt_logprobs import packed, score
from .proposer import Draft, Proposer, head_of
from .request import Committed, Request, StepShape
from .sampler import Mode, Sampler, mode_of, unpack_logprobs
from .stack import Rows, Stack, States
from .tree_step import Told, TreeSteps
from .verifier import Verdict, Verifier
from .weights import DrafterWeights, TargetWeights

# tokens that a chunk of a prompt is padded to; of longer ones the device has more to do than the host has to launch
PREFILL_SIZES = tuple(range(64, 513, 64))
PREFILL_LIMITS = PrefillLimits(most=8, sizes=(64, 128, 256), rows=1024)
PREFILL_COUNTS = (2, 4, 8)  # chunks of a batch that there are graphs for


@dataclass(frozen=True, slots=True)
class TreesPending:
    """What tells how to read a step over trees."""

    requests: Sequence[Request]  # of which the first rows are
    batch: int
    shape: StepShape
    calibration: Calibration
    discounts: Sequence[float]


@dataclass(frozen=True, slots=True)
class PendingResult:
    """What rows got, on its way to the host."""

    tokens: Tensor  # int64 [rows, 1 + S] on the host: how many were committed, then the tokens
    logprobs: Tensor | None  # fp64 [F, S, ...], see `Sampler.choose`
    wanted: dict[int, tuple[int, int]]  # row -> its place in `logprobs` and its SamplingParams.logprobs
    done: torch.cuda.Event | None
    buffer: Tensor | None = None  # pinned memory that `tokens` is a view of, to be given back
    scored: list[Tensor] | None = None  # of a first token that asks for its prompt's log-probabilities: `prefill`'s
    trees: TreesPending | None = None  # `tokens` is what a step over trees told, see `TreeSteps.read`

    def logprobs_of(self, row: int, count: int) -> list[TokenLogprobs] | None:
        """Of the first `count` tokens of a row, if they were asked for."""
        if self.logprobs is None or row not in self.wanted:
            return None
        place, best = self.wanted[row]
        return unpack_logprobs(self.logprobs[place, :count], best)


class StepRunner:
    """Runs prefills and steps for up to `max_num_seqs` requests; a `scheduler.Device`.

    Args:
        num_pages: of the cache, the null block included.
        max_context: tokens of prompt and answer; the page table is wide enough for overshoot too.
        max_block: S of the longest block.
        scratch: bytes that graphs have for what a pass makes, from the first capture on.
        forced: int32 [steps, max_num_seqs], see `Verifier`.
        sample_drafts: at the temperatures of their requests; else drafts are the most probable tokens.
        kept_states: slots of recurrent states behind those of requests, for prefixes.
        tree_nodes: of a request's draft tree at most; 0: steps over blocks alone.
        tree_width: children of a node at most.
        tree_blocks: S of steps over trees; none: max_block alone.
        chain_blocks: other S, whose promises steps over trees tell too.
        tell_trees: also say what trees had at the places of committed tokens.

    Attributes:
        step_rows: steps that were launched by the rows that the target reads in them, padding too.
        tree_rows: of them, those over draft trees.
        reach: tokens of a request that the page table has room for.
        observe: told what every step over trees says, when its result is read.
    """

    def __init__(
        self,
        target: TargetWeights,
        drafter: DrafterWeights | None,
        ops: Ops,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_context: int,
        max_block: int,
        scratch: int = 0,
        forced: Tensor | None = None,
        sample_drafts: bool = False,
        kept_states: int = 0,
        tree_nodes: int = 0,
        tree_width: int = WIDTH,
        tree_blocks: Sequence[int] = (),
        chain_blocks: Sequence[int] = (),
        tell_trees: bool = False,
    ) -> None:
        self.target, self.drafter, self.ops = target, drafter, ops
        self.device, self.dtype = target.embedding.device, target.embedding.dtype
        self.depth = 1 if self.device.type == "cuda" else 0
        self.max_num_seqs, self.max_block, self.page_size = max_num_seqs, max_block, page_size
        self.step_rows, self.tree_rows = Counter[int](), Counter[int]()
        self.max_places = max(max_block, tree_nodes + 1)
        self.reach = max_context + (self.depth + 1) * max_block + self.max_places
        self.pages_per_request = -(-self.reach // page_size)
        sampler = Sampler(max_num_seqs, target.spec.vocab_size, self.device, ops)
        self.state = BatchState.empty(
            max_num_seqs, self.pages_per_request, page_size, self.device, sampler, target.spec.recurrent
        )

        def stack(weights: TargetWeights | DrafterWeights) -> Stack:
            spec = weights.spec
            shape = (len(spec.attention), 2, num_pages * page_size, *spec.kv_heads)
            # as far as the pages go: a chunk may fill the last one
            rope = spec.rope_table(self.pages_per_request * page_size, self.device)
            cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
            # the first state is nobody's
            memories = [
                DeltaMemory.empty(
                    1 + max_num_seqs, max_block, net.taps, net.channels, net.num_heads,
                    (net.k_head_dim, net.head_dim), self.dtype, self.device, kept_states,
                )
                for net in spec.delta_nets
            ]  # fmt: skip
            self._memories += memories
            return Stack(spec, weights.layers, weights.norm, rope, cache, ops, memories)

        self._memories: list[DeltaMemory] = []
        taps = drafter.config.target_layer_ids if drafter and max_block > 1 else ()
        self.verifier = Verifier(target, stack(target), taps, forced)
        self.proposer = None
        if drafter is not None:
            head = head_of(drafter, target.head, ops)
            self.proposer = Proposer(drafter, stack(drafter), target.embedding, head)
        self.trees: TreeSteps | None = None
        self.observe: Callable[[Sequence[Request], Told], object] = lambda requests, told: None
        if tree_nodes and self.proposer is not None and max_block > 1:
            blocks = tree_blocks or (max_block,)
            chains = [block for block in chain_blocks if block not in blocks]
            self.trees = TreeSteps(self.proposer, self.verifier, self.state, tree_nodes, tree_width, blocks, chains)
        self._modes = [Mode.GREEDY] * max_num_seqs  # by row
        self._words = words_of(target.spec.vocab_size)
        self._tell_trees = tell_trees
        self._masked = False  # whether a request ever had a grammar
        self._random: Tensor | None = None  # int64, verified instead of what is drafted
        self._numbers = torch.arange(max_num_seqs, device=self.device)
        width = target.spec.hidden_size
        vocab = target.spec.vocab_size
        self._sample_drafts = sample_drafts and drafter is not None and max_block > 1
        candidates = drafter.config.draft_candidates if drafter and self._sample_drafts else 0
        self._between = Between(
            max_num_seqs, max_block, width, len(taps) * width, vocab, self.dtype, self.device, candidates
        )
        self._graphs: dict[Part, tuple[torch.cuda.CUDAGraph, Tensor | None]] = {}
        self._captured = Captures(self.device, scratch)
        widest = self.trees.told(max_num_seqs, max_block, ROWS[-1]) if self.trees else 0
        self._results = PinnedBuffers(max(max_num_seqs * (1 + max_block), widest))
        self.bucket = functools.partial(bucket_of, max_num_seqs)  # a method would make a cycle with those that get it
        self._none = torch.full((), -1, device=self.device)
        self._last_hidden: Tensor | None = None  # [chunks, D] of the newest prefill
        # what a captured prefill reads: tokens, and where they stand: start, count, slot of states, pages
        self._prompt = torch.zeros(PREFILL_SIZES[-1], dtype=torch.int64, device=self.device)
        self._place = torch.zeros(3 + self.pages_per_request, dtype=torch.int32, device=self.device)
        self._states = torch.zeros(PREFILL_SIZES[-1], width, dtype=self.dtype, device=self.device)  # what it leaves
        self._prefills: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.prefill_limits = PREFILL_LIMITS
        # the same of a batch of prefills: tokens, and of each kind of place those of all chunks
        self._prompts = torch.zeros(PREFILL_LIMITS.rows, dtype=torch.int64, device=self.device)
        kinds = [*3 * [PREFILL_LIMITS.most], PREFILL_LIMITS.most * self.pages_per_request]
        self._places = torch.zeros(sum(kinds), dtype=torch.int32, device=self.device)
        *self._each, tables = self._places.split(kinds)
        self._tables = tables.view(PREFILL_LIMITS.most, -1)
        self._batch_prefills: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    # ---- prefill -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, job: PrefillJob) -> Tensor | None:
        """Write the keys and values of target and drafter, and update the recurrent states.

        A short chunk is padded and replays a captured graph: launching its hundreds of kernels would take the host
        longer than they take the device.

        Returns:
            The scores of `job.scores`, see `score`, on their way to the host; None if none are asked for.
        """
        size = next((s for s in PREFILL_SIZES if s >= len(job.ids)), None)
        if self.device.type != "cuda" or size is None or job.start + size > self.reach:
            return self.prefill_eagerly(job)
        self.place(job)
        graph, self._last_hidden = self._prefill_graph(size)
        graph.replay()
        return self._score(self._states, job.scores)

    @torch.inference_mode()
    def prefill_eagerly(self, job: PrefillJob) -> Tensor | None:
        """The same without a graph, unpadded."""
        tokens = to_device(job.ids, torch.int64, self.device)
        table = to_device(job.pages, torch.int32, self.device)[None]
        place = to_device([job.start, len(job.ids), job.state], torch.int32, self.device)
        rows = Rows(place[:1], table, self.page_size, states=self._states_of(place))
        hidden, self._last_hidden = self._prefill(tokens, rows, place[1:2])
        return self._score(hidden, job.scores)

    def _score(self, hidden: Tensor, scores: ScoredTokens | None) -> Tensor | None:
        """Outside of graphs: few requests ask for it, and its rows are many."""
        if scores is None:
            return None
        tokens = to_device(scores.ids, torch.int64, self.device)
        found = score(hidden[: len(tokens)], self.target.head, tokens, scores.top, self.ops)
        return self._on_host(found) if self.device.type == "cuda" else found

    def _states_of(self, place: Tensor) -> States | None:
        return States(slots=place[2:3], counts=place[1:2]) if self.state.recurrent else None

    def place(self, job: PrefillJob) -> None:
        """Put a chunk where `padded_prefill` finds it."""
        self._prompt[: len(job.ids)].copy_(to_device(job.ids, torch.int64, self.device))
        rest = [0] * (self.pages_per_request - len(job.pages))
        place = [job.start, len(job.ids), job.state, *job.pages, *rest]
        self._place.copy_(to_device(place, torch.int32, self.device))

    def padded_prefill(self, size: int) -> Tensor:
        """Prefill the placed chunk, padded to `size` tokens. Returns the state [1, D] of its last token."""
        count = self._place[1:2]
        rows = Rows(self._place[:1], self._place[None, 3:], self.page_size, count, self._states_of(self._place))
        hidden, last = self._prefill(self._prompt[:size], rows, count)
        self._states[:size].copy_(hidden)
        return last

    def _prefill(self, tokens: Tensor, rows: Rows, count: Tensor) -> tuple[Tensor, Tensor]:
        """Prefill `tokens`, of which only the first `count` [1] are text.

        Returns:
            Their states [M, D], and that of the last one that is text, [1, D].
        """
        hidden, features = self.verifier.forward(tokens, rows)
        if self.proposer and features is not None:
            self.proposer.write_context(features, rows, count)
        return hidden, hidden.index_select(0, (count.long() - 1).clamp(min=0))

    def _prefill_graph(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The captured prefill of a chunk of that size, captured now if it was not yet."""
        if size not in self._prefills:
            placed = self._place.clone()
            self._place.zero_()  # all of it goes into the null block and nobody's state, as it runs twice
            self._place[1:2].fill_(1)
            try:
                self._prefills[size] = self._captured(lambda: self.padded_prefill(size))
            finally:
                self._place.copy_(placed)
        return self._prefills[size]

    @torch.inference_mode()
    def prefill_batch(self, chunks: Sequence[PrefillJob]) -> None:
        """`prefill` of several requests' chunks in one pass, padded to one length and one of PREFILL_COUNTS."""
        size = self.prefill_limits.size(max(len(chunk.ids) for chunk in chunks))
        assert size is not None
        if max(chunk.start for chunk in chunks) + size > self.reach:  # padding would have no pages
            self._prefill_in_turn(chunks)
            return
        count = next(each for each in PREFILL_COUNTS if each >= len(chunks))
        self.place_batch(chunks, size, count)
        if self.device.type != "cuda":
            self._last_hidden = self.padded_prefills(size, count)
            return
        if (size, count) not in self._batch_prefills:
            self._capture_batch(size, count)
            self.place_batch(chunks, size, count)
        graph, self._last_hidden = self._batch_prefills[size, count]
        graph.replay()

    def _prefill_in_turn(self, chunks: Sequence[PrefillJob]) -> None:
        last = []
        for chunk in chunks:
            self.prefill(chunk)
            assert self._last_hidden is not None
            last.append(self._last_hidden.clone())  # a graph's own is written by the next
        self._last_hidden = torch.cat(last)

    def place_batch(self, chunks: Sequence[PrefillJob], size: int, count: int) -> None:
        """Put chunks where `padded_prefills` finds them; what is none goes into the null block."""
        most, wide = self.prefill_limits.most, self.pages_per_request
        tokens = [token for chunk in chunks for token in (*chunk.ids, *[0] * (size - len(chunk.ids)))]
        kinds = [
            [chunk.start for chunk in chunks], [len(chunk.ids) for chunk in chunks], [chunk.state for chunk in chunks]
        ]  # fmt: skip
        rest = most - len(chunks)
        places = [each for kind, nothing in zip(kinds, (0, 1, 0), strict=True) for each in (*kind, *[nothing] * rest)]
        for chunk in chunks:
            places += [*chunk.pages, *[0] * (wide - len(chunk.pages))]
        places += [0] * (rest * wide)
        self._prompts[: len(tokens)].copy_(to_device(tokens, torch.int64, self.device))
        self._places.copy_(to_device(places, torch.int32, self.device))

    def padded_prefills(self, size: int, count: int) -> Tensor:
        """Prefill the placed chunks. Returns the states [count, D] of their last tokens."""
        starts, counts, slots = (each[:count] for each in self._each)
        states = States(slots=slots, counts=counts) if self.state.recurrent else None
        rows = Rows(starts, self._tables[:count], self.page_size, counts, states)
        hidden, features = self.verifier.forward(self._prompts[: size * count], rows)
        if self.proposer and features is not None:
            self.proposer.write_context(features, rows, counts)
        last = torch.arange(count, device=self.device) * size + counts.long() - 1
        return hidden.index_select(0, last)

    @property
    def prefill_batch_shapes(self) -> list[tuple[int, int]]:
        """Tokens of a chunk and number of chunks of the batches that there are graphs for."""
        if self.max_num_seqs <= EXACT_BATCH:
            return []
        shapes = itertools.product(self.prefill_limits.sizes, PREFILL_COUNTS)
        return [(size, n) for size, n in shapes if self.prefill_limits.fits([size] * n) and size <= self.reach]

    @torch.inference_mode()
    def run_batch_eagerly(self, size: int, count: int) -> None:
        """A batch of nobody's chunks, without a graph."""
        self._place_nothing()
        self.padded_prefills(size, count)

    def _place_nothing(self) -> None:
        """All of a batch goes into the null block, and into nobody's states."""
        self._places.zero_()
        self._each[1].fill_(1)

    @torch.inference_mode()
    def _capture_batch(self, size: int, count: int) -> None:
        self._place_nothing()
        self._batch_prefills[size, count] = self._captured(lambda: self.padded_prefills(size, count))

    @torch.inference_mode()
    def copy_states(self, source: int, target: int) -> None:
        """Recurrent states in slot `target` become those in slot `source`."""
        for parts in ([m.state for m in self._memories], [m.window for m in self._memories]):
            torch._foreach_copy_([part[target] for part in parts], [part[source] for part in parts])

    # ---- rows --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def add(self, row: int, request: Request, place: int = 0) -> PendingResult | None:
        """Put a prefilled request into the batch; the prefill chooses its first token if it has none yet."""
        state, sampler = self.state, self.state.sampler
        mode = self._modes[row] = mode_of(request.params)
        self._masked |= mode.masked
        state.add(row, request)
        if request.tokens:
            return None
        assert self._last_hidden is not None
        rows, last = slice(row, row + 1), self._last_hidden[place : place + 1]
        before = state.lengths[rows] - 1  # the choice stands behind the last token of the prompt
        no_draft = Draft(state.last_token.new_empty(1, 0))
        masks = None
        if request.matcher:
            allowed, at = masks_of([request.matcher], [[]], self._words)
            masks = upload(allowed, self.device), upload(at, self.device)
        choice, logprobs = sampler.choose(last, self.target.head, self._numbers[rows], no_draft, before, mode, masks)
        state.last_token[rows] = choice[0]
        counts = torch.ones_like(before)
        if mode.full:
            sampler.count(rows, choice, counts)
        scored = request.scored if request.scores_prompt else None
        told = torch.cat([counts[:, None], self._of_finite(choice, last[None])], dim=1)
        return self._pending(told, logprobs, [request], [0], scored)

    @torch.inference_mode()
    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        self.state.set_pages(row, pages)

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        self.state.move(source, target)
        self._modes[target] = self._modes[source]

    @torch.inference_mode()
    def remove(self, row: int) -> None:
        self.state.remove(row)

    @torch.inference_mode()
    def clean(self, pages: Sequence[int]) -> None:
        """Leave zeros in these pages: some kernels multiply what stands behind the last key by zero."""
        at = to_device(pages, torch.int64, self.device)
        for stack in (self.verifier.stack, *([self.proposer.stack] if self.proposer else [])):
            stack.cache.unflatten(2, (-1, self.page_size)).index_fill_(2, at, 0.0)

    @torch.inference_mode()
    def check(self) -> None:
        """Use the device once. Raises what it raises at every use once it has failed."""
        self.state.lengths[:1].add_(0)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---- the step ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def decode(self, requests: Sequence[Request], shape: StepShape) -> PendingResult:
        """Launch one step of rows 0..len(requests) - 1. One over trees is for requests without a grammar."""
        if shape.rows:
            return self._decode_trees(list(requests), shape)
        block = shape.block
        self.step_rows[self._rows(len(requests)) * block] += 1
        tokens, logprobs, full = self._run_step([request.matcher for request in requests], block)
        return self._pending(tokens, logprobs, requests, full)

    def _decode_trees(self, requests: list[Request], shape: StepShape) -> PendingResult:
        assert self.trees is not None
        batch, (block, rows) = self._rows(len(requests)), shape
        if self.device.type == "cuda":  # some may have given way since the shape was chosen
            rows = min(rows, row_buckets(batch)[-1])
        self.step_rows[rows] += 1
        self.tree_rows[rows] += 1
        discounts = [request.trust.log_discount if request.drafts else -math.inf for request in requests]
        self.trees.discount(discounts)
        mode = max(self._modes[: len(requests)])
        told = self._run(Part("tree", batch, block, mode, rows))
        assert told is not None
        wanted = {row: (row, best) for row, one in enumerate(requests) if (best := one.params.logprobs) is not None}
        logprobs = self._between.kept(mode, len(requests), block).clone() if wanted else None
        trees = TreesPending(requests, batch, StepShape(block, rows), self.trees.calibration, discounts)
        if self.device.type != "cuda":
            return PendingResult(told, logprobs, wanted, None, trees=trees)
        buffer = self._results.take()
        host = buffer[: len(told)].copy_(told, non_blocking=True)
        logprobs = None if logprobs is None else self._on_host(logprobs)
        done = torch.cuda.Event()
        done.record()
        return PendingResult(host, logprobs, wanted, done, buffer, trees=trees)

    def launcher(self, rows: int, shape: StepShape) -> Callable[[], object]:
        """A greedy step of that shape as a function, for timing; on an empty batch it changes nothing."""
        part = self._part(rows, shape)
        if self.device.type == "cuda":
            return self.graph(part)[0].replay
        return lambda: self.run_part_eagerly(part)

    @staticmethod
    def _part(rows: int, shape: StepShape) -> Part:
        """The whole of a greedy step."""
        return Part("tree" if shape.rows else "step", rows, shape.block, nodes=shape.rows)

    @contextlib.contextmanager
    def any_tokens(self) -> Iterator[None]:
        """Within, steps of an empty batch begin with random tokens and verify random ones, whatever is drafted: equal
        rows would all go to the same experts, and have one state. Graphs of such steps are dropped at the end."""
        dice = torch.Generator(self.device).manual_seed(0)
        rows, vocab = self.max_num_seqs, self.target.spec.vocab_size
        shape = (rows + max(rows * self.max_block, ROWS[-1]),)
        tokens = torch.randint(vocab, shape, generator=dice, device=self.device)
        graphs, self._graphs = self._graphs, {}
        self._random = tokens[rows:]
        self.state.last_token.copy_(tokens[:rows])
        self.state.states[0].copy_(self._numbers + 1)
        try:
            yield
        finally:
            self.state.last_token.zero_()
            self.state.states.zero_()
            self._graphs, self._random = graphs, None

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Within, an empty batch is full of greedy requests without a context, which have room for whole trees; they
        write to the null block. What steps have advanced is put back at the end."""
        state = self.state
        fields = [*self._mutable(), state.active, state.sampler.ends_at]
        saved = [field.clone() for field in fields]
        state.active.fill_(True)
        state.sampler.ends_at.fill_(self.reach)
        try:
            yield
        finally:
            for field, value in zip(fields, saved, strict=True):
                field.copy_(value)

    @torch.inference_mode()
    def run_eagerly(self, rows: int, block: int, mode: Mode = Mode.GREEDY) -> None:
        """A step of that shape without a graph."""
        if mode == Mode.GREEDY:
            self._step(rows, block)
            return
        self._propose(rows, block)
        self._read(rows, block)
        self._choose(rows, block, mode)
        self._end(rows, block)

    def read(self, pending: PendingResult) -> list[Committed]:
        """Wait for a result."""
        if pending.done is not None:
            pending.done.synchronize()
        if pending.trees is not None:
            return self._read_trees(pending, pending.trees)
        found = []
        prompt = None if pending.scored is None else packed(pending.scored)
        for row, (count, *tokens) in enumerate(pending.tokens.tolist()):
            logprobs = pending.logprobs_of(row, count)
            spoils = -1 in tokens
            found.append(Committed(tokens[:count], logprobs, prompt, not spoils or -1 not in tokens[:count], spoils))
        if pending.buffer is not None:
            self._results.give_back(pending.buffer)
        return found

    def _read_trees(self, pending: PendingResult, trees: TreesPending) -> list[Committed]:
        assert self.trees is not None
        how = trees.batch, trees.shape, trees.calibration, trees.discounts
        told = self.trees.read(pending.tokens, len(trees.requests), *how)
        offered = told.offered() if self._tell_trees else itertools.repeat(())
        if pending.buffer is not None:
            self._results.give_back(pending.buffer)
        self.observe(trees.requests, told)
        return [
            Committed(
                tokens[:count], pending.logprobs_of(row, count), finite=-1 not in tokens[:count], spoils=spoils > 0,
                depth=depth, offered=each,
            )
            for row, ((count, depth, spoils, *tokens), each) in enumerate(zip(told.answers, offered, strict=False))
        ]  # fmt: skip

    @torch.inference_mode()
    def graph(self, part: Part) -> tuple[torch.cuda.CUDAGraph, Tensor | None]:
        """A captured step or part of one and what it returns, captured now if it was not yet."""
        if part not in self._graphs:
            saved = [field.clone() for field in self._mutable()]
            self.state.states.zero_()  # what runs now runs once more: it may change no request's states
            try:
                self._graphs[part] = self._captured(lambda: self.run_part_eagerly(part))
            finally:  # a step has run, also where its capture failed
                for field, value in zip(self._mutable(), saved, strict=True):
                    field.copy_(value)
        return self._graphs[part]

    def prepare(self, blocks: Sequence[int], trees: Callable[[int], Collection[StepShape]] = lambda batch: ()) -> bool:
        """Capture the next prefill or step, greedy ones first, that is not there; False if none.

        Args:
            blocks: of steps over blocks.
            trees: the shapes of those over trees, of a batch.
        """
        if self.device.type != "cuda":
            return False
        for size in PREFILL_SIZES:
            if size not in self._prefills and size <= self.reach:
                self._prefill_graph(size)
                return True
        for chunks in self.prefill_batch_shapes:
            if chunks not in self._batch_prefills:
                self._capture_batch(*chunks)
                return True
        shapes = list(itertools.product(buckets_up_to(self.max_num_seqs), sorted(blocks, reverse=True)))
        parts = [Part("step", *shape) for shape in shapes]
        batches = buckets_up_to(self.max_num_seqs)
        parts += [self._part(batch, shape) for batch in batches for shape in trees(batch)]
        parts += [Part("propose", *shape) for shape in shapes if shape[1] > 1]
        parts += [Part("read", *shape) for shape in shapes] + [Part("end", *shape) for shape in shapes]
        trees_of = [part for part in parts if part.kind == "tree"]
        parts += [part._replace(mode=mode) for mode in (Mode.SAMPLED, Mode.FULL) for part in trees_of]
        modes = [mode for mode in Mode if self._masked or not mode.masked]
        parts += [Part("choose", *shape, mode) for mode in modes for shape in shapes]
        missing = next((part for part in parts if part not in self._graphs), None)
        if missing is not None:
            self.graph(missing)
        return missing is not None

    def _mutable(self) -> list[Tensor]:
        """What a step advances."""
        state = self.state
        return [state.lengths, state.last_token, state.states, self.verifier.steps, state.sampler.counts]

    def _run(self, part: Part) -> Tensor | None:
        if self.device.type != "cuda":
            return self.run_part_eagerly(part)
        graph, result = self.graph(part)
        graph.replay()
        return result

    def _run_step(self, matchers: Sequence[Matcher | None], block: int) -> tuple[Tensor, Tensor | None, list[int]]:
        """A step of the first rows: as `_step`, log-probabilities, and the rows that these are of."""
        batch = self._rows(len(matchers))
        of_mode: dict[Mode, list[int]] = {mode: [] for mode in Mode}
        for row, mode in enumerate(self._modes[: len(matchers)]):
            of_mode[mode].append(row)
        if len(of_mode[Mode.GREEDY]) == len(matchers):
            tokens = self._run(Part("step", batch, block))
            assert tokens is not None
            return tokens, None, []
        if block > 1:
            self._run(Part("propose", batch, block))
        drafts = self._drafts(batch, block) if any(of_mode[mode] for mode in Mode if mode.masked) else None
        self._run(Part("read", batch, block))
        full: list[tuple[Tensor, list[int]]] = []
        for mode, rows in of_mode.items():  # those that wait for the host are last
            if not rows:
                continue
            count = self._rows(len(rows))
            self._between.name(mode, rows, count)
            if mode.masked:
                assert drafts is not None
                written = drafts()
                masks, at = masks_of([matchers[row] for row in rows], [written[row] for row in rows], self._words)
                at = torch.cat([at, at[:block].repeat(count - len(rows))])
                for buffer, values in zip(self._between.masks(count, block, self._words), (masks, at), strict=True):
                    buffer[: len(values)].copy_(upload(values, self.device))
            logprobs = self._run(Part("choose", count, block, mode))
            if logprobs is not None:
                full.append((logprobs[: len(rows)], rows))
        tokens = self._run(Part("end", batch, block))
        assert tokens is not None
        all_logprobs = torch.cat([logprobs for logprobs, _ in full]) if full else None
        return tokens, all_logprobs, [row for _, rows in full for row in rows]

    def _drafts(self, batch: int, block: int) -> Callable[[], list[list[int]]]:
        """Sends the drafts to the host; what waits for them, and only for them."""
        proposed = self._between.proposed(batch, block)
        if self.device.type != "cuda":
            return proposed.tolist
        host = self._on_host(proposed)
        sent = torch.cuda.Event()
        sent.record()

        def drafts() -> list[list[int]]:
            sent.synchronize()
            return host.tolist()

        return drafts

    def _rows(self, count: int) -> int:
        """Rows that are computed for so many."""
        return self.bucket(count) if self.device.type == "cuda" else count

    @torch.inference_mode()
    def run_part_eagerly(self, part: Part) -> Tensor | None:
        """A part of a step, or the whole, without a graph."""
        if part.kind == "choose":
            return self._choose(part.rows, part.block, part.mode)
        if self.trees is not None and part.nodes:
            told, logprobs = self.trees(part.rows, part.block, part.nodes, mode=part.mode, tokens=self._random)
            if logprobs is not None:
                self._between.told(part.mode, logprobs)
            return told
        run = {"step": self._step, "propose": self._propose, "read": self._read, "end": self._end}[part.kind]
        return run(part.rows, part.block)

    def _step(self, batch: int, block: int) -> Tensor:
        """One greedy step of the first `batch` rows: int64 [batch, 1 + S], see `PendingResult`."""
        rows = self.state.rows(batch, block)
        read = self._read_block(self._draft(rows, block), rows)
        choice = self.state.sampler.greedy(read.hidden.flatten(0, 1), self.target.head).view(batch, block)
        return self._commit(read, choice)[0]

    def _propose(self, batch: int, block: int) -> None:
        rows, sampled = self.state.rows(batch, block), self._sample_drafts and block > 1
        self._between.propose(self._sampled_draft(rows, block) if sampled else self._draft(rows, block))

    def _read(self, batch: int, block: int) -> None:
        draft = Draft(self._between.proposed(batch, block))
        self._between.put(self._read_block(draft, self.state.rows(batch, block)))

    def _choose(self, count: int, block: int, mode: Mode) -> Tensor | None:
        """The choices of `count` rows in that mode, and their log-probabilities."""
        rows, hidden, draft, lengths = self._between.of(mode, count, block)
        masks = self._between.masks(count, block, self._words) if mode.masked else None
        choice, logprobs = self.state.sampler.choose(hidden, self.target.head, rows, draft, lengths, mode, masks)
        self._between.chosen(rows, choice)
        return None if logprobs is None else self._between.told(mode, logprobs)

    def _end(self, batch: int, block: int) -> Tensor:
        tokens, verdict = self._commit(*self._between.get(self.state.page_table[:batch], self.page_size, block))
        self.state.sampler.count(slice(0, batch), verdict.path, verdict.counts)
        return tokens

    def _draft(self, rows: Rows, block: int) -> Draft:
        last = self.state.last_token[: len(rows.lengths)]
        if self.proposer and block > 1:
            draft = self.proposer.propose(last, rows, block)
            if self._random is None:
                return draft
            return Draft(self._random[: draft.tokens.numel()].view_as(draft.tokens))
        return Draft(last.new_empty(len(last), 0))

    def _sampled_draft(self, rows: Rows, block: int) -> Draft:
        assert self.proposer is not None
        batch, sampler = len(rows.lengths), self.state.sampler
        uniform = sampler.draft_uniform(rows.lengths, block - 1)
        return self.proposer.sample(self.state.last_token[:batch], rows, sampler.temperature[:batch], uniform)

    def _read_block(self, draft: Draft, rows: Rows) -> Block:
        last = self.state.last_token[: len(rows.lengths)]
        hidden, features = self.verifier.read(draft, last, rows)
        return Block(rows, draft.tokens, hidden, features)

    def _commit(self, read: Block, choice: Tensor) -> tuple[Tensor, Verdict]:
        verdict = self.verifier.commit(read.draft, choice, self.state)
        if self.proposer and read.features is not None:
            self.proposer.write_context(read.features, read.rows, verdict.counts)
        return torch.cat([verdict.counts[:, None].long(), self._of_finite(verdict.path, read.hidden)], dim=1), verdict

    def _of_finite(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Tokens [B, S], and -1 where the state [B, S, D] behind which one stands is not finite."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        norm = torch.linalg.vector_norm(hidden, dim=-1, dtype=wide)  # one kernel, and NaN stays NaN
        return torch.where(norm < math.inf, tokens, self._none)

    # ---- host and device -----------------------------------------------------------------------------------

    @staticmethod
    def _on_host(values: Tensor) -> Tensor:
        """Pinned memory that they are on their way to."""
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)

    def _pending(
        self,
        tokens: Tensor,
        logprobs: Tensor | None,
        requests: Sequence[Request],
        full: Sequence[int],
        scored: list[Tensor] | None = None,
    ) -> PendingResult:
        """A result of the first rows; `full` are those that `logprobs` are of, in this order."""
        rows = len(requests)
        best = ((place, row, requests[row].params.logprobs) for place, row in enumerate(full))
        wanted = {row: (place, count) for place, row, count in best if count is not None}
        logprobs = logprobs[: len(full)] if wanted and logprobs is not None else None
        if self.device.type != "cuda":
            return PendingResult(tokens[:rows], logprobs, wanted, None, scored=scored)
        buffer = self._results.take()
        # contiguous, as else the copy would be waited for
        host = buffer[: rows * tokens.shape[1]].view(rows, -1).copy_(tokens[:rows], non_blocking=True)
        logprobs = None if logprobs is None else self._on_host(logprobs)
        done = torch.cuda.Event()
        done.record()
        return PendingResult(host, logprobs, wanted, done, buffer, scored)
