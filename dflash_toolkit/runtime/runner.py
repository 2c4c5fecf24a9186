"""The device's side of the engine: manages the rows of the batch and runs the programs.

A step proposes a draft, verifies it, and writes the keys and values of the committed tokens into the drafter's context.
It is one CUDA graph. Everything it reads and writes is on the device (`batch_state.py`), so the host launches a step
without waiting for the one before, and reads results from pinned memory later. Shapes are fixed: rows without a request
and the padding of a prompt's chunk write to the null block.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..draft_tree import WIDTH
from ..kernels.ops import Ops
from .batch_state import BatchState
from .graphs import CAPTURED_AT_START, TREES_AT_START, Captured, Captures, StepGraphs, buckets_up_to, to_device
from .pace import Pace
from .prefill_job import PrefillJob, PrefillLimits
from .programs.block import BlockProgram
from .programs.buffers import StepBuffers
from .programs.context import Part, StepContext
from .programs.first_tokens import FirstTokens, GreedyToken
from .programs.prefill import PrefillPrograms
from .programs.prefill_pass import PrefillPass
from .programs.results import PendingResult, Results, TimedStep
from .programs.tree import TreeProgram
from .proposer import Proposer, head_of
from .request import Committed, Request, StepShape
from .sampler import Mode, Sampler, mode_of
from .stack import Stack
from .tap_cache import TapCache
from .timing import Shape
from .trees.budget import ROWS, key_of
from .trees.result import TreeStepResult
from .verifier import Verifier
from .weights import DrafterWeights, TargetWeights


class StepRunner:
    """Runs prefills and steps for up to `max_num_seqs` requests; a `scheduler.Device`.

    Args:
        num_pages: pages of the cache, the null block included.
        max_context: tokens of prompt and answer; the page table also has room for overshoot.
        max_block: S of the longest block.
        scratch: bytes that graphs have for temporary tensors, from the first capture on.
        forced: int32 [steps, max_num_seqs], see `Verifier`.
        sample_drafts: sample drafts at the temperatures of their requests; otherwise take the most probable tokens.
        kept_states: slots of recurrent states for prefixes, after the slots of requests.
        tree_nodes: the most nodes of a request's draft tree; 0: all steps are over blocks.
        tree_width: the most children of a node.
        tree_blocks: S of steps over trees (default: max_block).
        chain_blocks: S of chains for which steps over trees also report promises.
        fp8_cache: keep keys and values in fp8, see `quantized_heads`.
        report_offered: also report the candidates of trees at the positions of committed tokens.
        keep_taps: keep the taps of all tokens in the pages.
        packed_rows: maximum prompt tokens of a pass with several chunks of any length.

    Attributes:
        step_rows: number of launched steps, by the rows that the target reads, padding included.
        tree_rows: the same for steps over draft trees only.
        reach: maximum tokens of a request in the page table.
        observe: called with the result of every step over trees, when it is read.
        observe_time: on a GPU, called with the key of a step in `Times`, the tokens in the cache of its batch, and its
            seconds, when it is read.
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
        report_offered: bool = False,
        keep_taps: bool = False,
        fp8_cache: bool = False,
        packed_rows: int = 0,
    ) -> None:
        self.target, self.drafter, self.ops = target, drafter, ops
        self.device, self.dtype = target.embedding.device, target.embedding.dtype
        self.depth = 1 if self.device.type == "cuda" else 0
        self.max_num_seqs, self.max_block, self.page_size = max_num_seqs, max_block, page_size
        self.fp8_cache = fp8_cache
        self.step_rows, self.tree_rows = Counter[int](), Counter[int]()
        self.max_places = max(max_block, tree_nodes + 1)
        self.reach = max_context + (self.depth + 1) * max_block + self.max_places
        self.pages_per_request = -(-self.reach // page_size)
        spec = target.spec
        sampler = Sampler(max_num_seqs, spec.vocab_size, self.device, ops, spec.logit_scale)
        self.state = BatchState.empty(
            max_num_seqs, self.pages_per_request, page_size, self.device, sampler, spec.recurrent
        )
        sizes = num_pages, page_size, self.pages_per_request, max_num_seqs, max_block, kept_states, fp8_cache
        taps = drafter.config.target_layer_ids if drafter and max_block > 1 else ()
        self.verifier = Verifier(target, Stack.allocate(target, ops, self.dtype, *sizes), taps, forced)
        self.proposer = None
        if drafter is not None:
            head, stack = head_of(drafter, target.head, ops), Stack.allocate(drafter, ops, self.dtype, *sizes)
            width = drafter.config.feature_size
            kept = TapCache(num_pages, page_size, width, self.dtype, self.device) if keep_taps and taps else None
            self.proposer = Proposer(drafter, stack, target.embedding, head, kept)
        stacks = [self.verifier.stack, *([self.proposer.stack] if self.proposer else [])]
        self._stacks, self._memories = stacks, [memory for stack in stacks for memory in stack.memories]
        drafts = drafter is not None and max_block > 1
        sample_drafts = sample_drafts and drafts
        candidates = drafter.config.draft_candidates if drafter and sample_drafts else 0
        width = spec.hidden_size
        buffers = StepBuffers(
            max_num_seqs, max_block, width, len(taps) * width, spec.vocab_size, self.dtype, self.device, candidates
        )
        captures = Captures(self.device, scratch)
        self.graphs = StepGraphs(captures, self.device, self.advanced(), self.state.states)
        blocks = [] if not (tree_nodes and drafts) else list(tree_blocks or (max_block,))
        chains = [block for block in chain_blocks if block not in blocks]
        promised = len({*blocks, *chains} - {1})
        largest = TreeStepResult.size(max_num_seqs, StepShape(max_block, ROWS[-1]), promised) if blocks else 0
        results = Results(self.device, max(max_num_seqs * (1 + max_block), largest))
        self.context = StepContext(self.verifier, self.proposer, self.state, buffers, self.graphs, results)
        self.bucket = self.context.bucket
        self.pace = Pace(self.device)
        self.prefills = PrefillPrograms(
            self.context, captures, page_size, self.pages_per_request, self.reach, packed_rows, self.pace
        )
        self.prefill_limits: PrefillLimits = self.prefills.limits
        self.first_tokens = FirstTokens(self.context)
        self.blocks = BlockProgram(self.context, sample_drafts)
        self.trees: TreeProgram | None = None
        self.observe: Callable[[Sequence[Request], TreeStepResult], object] = lambda requests, result: None
        self.observe_time: Callable[[Shape, int, float], object] = lambda key, tokens, seconds: None
        if blocks:
            self.trees = TreeProgram(self.context, tree_nodes, tree_width, blocks, chains, report_offered)
        self._masked = False  # whether any request had a grammar

    # ---- prefill ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def start_prefill(self, jobs: Sequence[PrefillJob]) -> PrefillPass:
        """Returns a pass of chunks, see `PrefillPrograms.start`."""
        return self.prefills.start(jobs)

    @property
    def taps(self) -> TapCache | None:
        """The taps of all tokens, if they are kept."""
        return self.proposer.taps if self.proposer is not None else None

    @property
    def drafting(self) -> bool:
        """Whether the drafter runs: it drafts, and its context is written."""
        return self.proposer is not None and self.proposer.drafting

    @drafting.setter
    def drafting(self, on: bool) -> None:
        assert self.proposer is not None
        if on != self.proposer.drafting:
            self.proposer.drafting = on
            self.graphs.exchange()
            self.prefills.exchange()

    @torch.inference_mode()
    def write_kept_context(self, pages: Sequence[int], count: int) -> None:
        """See `Proposer.write_kept_context`."""
        assert self.proposer is not None
        self.proposer.write_kept_context(pages, count)

    @property
    def step_s(self) -> float:
        """Seconds of a recent decoding step; 0 if none was measured."""
        return self.pace.step_s

    @torch.inference_mode()
    def copy_states(self, source: int, target: int, rows: int = 0) -> None:
        """Copies the recurrent states of slot `source` to slot `target`, with rows of the source's newest block."""
        self.verifier.stack.copy_states(source, target, rows)

    # ---- rows ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def add(self, row: int, request: Request, place: int = 0) -> PendingResult | GreedyToken | None:
        """Puts a prefilled request into the batch; its first token, if it has none yet, comes from the prefill."""
        mode = self.context.modes[row] = mode_of(request.params)
        self._masked |= mode.masked
        self.state.add(row, request)
        if request.tokens:
            return None
        assert self.prefills.last_hidden is not None
        return self.first_tokens.add(row, request, self.prefills.last_hidden[place : place + 1])

    @torch.inference_mode()
    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        self.state.set_pages(row, pages)

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        self.first_tokens.move(source, target)
        self.state.move(source, target)
        self.context.modes[target] = self.context.modes[source]

    @torch.inference_mode()
    def remove(self, row: int) -> None:
        self.first_tokens.move(row, None)
        self.state.remove(row)

    @torch.inference_mode()
    def clean(self, pages: Sequence[int]) -> None:
        """Fills pages with zeros, as some kernels multiply the values after the last key by zero."""
        at = to_device(pages, torch.int64, self.device)
        for stack in self._stacks:
            for cached in stack.cached:
                cached.unflatten(2, (-1, self.page_size))[:, :, at] = 0.0

    @torch.inference_mode()
    def check(self) -> None:
        """Uses the device once. Raises the error that a failed device raises at every use."""
        self.state.lengths[:1].add_(0)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---- steps -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def decode(self, requests: Sequence[Request], shape: StepShape) -> PendingResult:
        """Launches one step of rows 0..len(requests) - 1. Requests with a grammar need a step over blocks."""
        self.first_tokens.choose()
        if self.device.type != "cuda":
            return self._launch(requests, shape)
        began, missed = self.pace.begin_step(), self.graphs.missed
        pending = self._launch(requests, shape)
        self.pace.end_step(pending.done)
        if self.graphs.missed > missed:
            return pending
        taken = pending.trees.shape if pending.trees else shape
        tokens = sum(request.length for request in requests)
        return replace(pending, timed=TimedStep(began, key_of(taken, self.bucket(len(requests))), tokens))

    def _launch(self, requests: Sequence[Request], shape: StepShape) -> PendingResult:
        if not shape.rows:
            batch = self.context.computed_rows(len(requests))
            self.step_rows[batch * shape.block] += 1
            return self.blocks.launch(requests, batch, shape.block)
        assert self.trees is not None
        pending = self.trees.launch(requests, shape)
        assert pending.trees is not None
        self.step_rows[pending.trees.shape.rows] += 1
        self.tree_rows[pending.trees.shape.rows] += 1
        return pending

    def read(self, pending: PendingResult | GreedyToken) -> list[Committed]:
        """Waits for a result."""
        if isinstance(pending, GreedyToken):
            pending = self.first_tokens.result(pending)
        pending.wait()
        if pending.done is not None:
            self.pace.read_step(pending.done)
            if (timed := pending.timed) is not None:
                self.observe_time(timed.key, timed.tokens, self.pace.seconds_of_step(timed.began, pending.done))
        if pending.trees is None:
            return self.blocks.read(pending)
        assert self.trees is not None
        committed, result = self.trees.read(pending, pending.trees)
        self.observe(pending.trees.requests, result)
        return committed

    def run_part(self, part: Part) -> Tensor | None:
        """Runs a step or a part of one without a graph."""
        if part.kind == "tree":
            assert self.trees is not None
            return self.trees.run(part)
        return self.blocks.run(part)

    @torch.inference_mode()
    def prepare(
        self,
        blocks: Sequence[int],
        trees: Callable[[int], Collection[StepShape]] = lambda batch: (),
        *,
        everything: bool = False,
    ) -> bool:
        """Captures one prefill or step that has no graph yet, greedy steps first; returns False if there is none.

        Args:
            blocks: lengths of steps over blocks.
            trees: returns the shapes of steps over trees, of a batch.
            everything: also batches of more than CAPTURED_AT_START requests, and trees of more than TREES_AT_START;
                and loads the kernels of passes over prompts.
        """
        if self.device.type != "cuda":
            return False
        if self.prefills.capture_next():
            return True
        most, most_trees = (math.inf, math.inf) if everything else (CAPTURED_AT_START, TREES_AT_START)
        batches = [batch for batch in buckets_up_to(self.max_num_seqs) if batch <= most]
        parts = parts_of(batches, blocks, lambda batch: trees(batch) if batch <= most_trees else (), self._masked)
        missing = next((part for part in parts if part not in self.graphs.captured), None)
        if missing is None:
            self.graphs.started = True
            return everything and self.prefills.load_next()
        self.graph(missing)
        return True

    def graph(self, part: Part) -> Captured:
        """Returns the graph of a step or of a part of one, and the tensor it writes."""
        return self.graphs.graph(part, self.run_part)

    def advanced(self) -> list[Tensor]:
        """Returns the tensors that a step advances."""
        state = self.state
        return [state.lengths, state.last_token, state.states, self.verifier.steps, state.sampler.counts]


def parts_of(
    batches: Sequence[int], blocks: Sequence[int], trees: Callable[[int], Collection[StepShape]], masked: bool
) -> list[Part]:
    """Returns the steps and parts of steps that batches run, greedy steps first; see `StepRunner.prepare`.

    Args:
        masked: also choices under a grammar.
    """
    sizes = list(itertools.product(batches, sorted(blocks, reverse=True)))
    over_trees = [Part.whole_step(batch, shape) for batch in batches for shape in trees(batch)]
    parts = [Part("step", *size) for size in sizes] + over_trees + BlockProgram.parts(sizes)
    parts += [part._replace(mode=mode) for mode in (Mode.SAMPLED, Mode.FULL) for part in over_trees]
    return parts + BlockProgram.choices(sizes, masked)
