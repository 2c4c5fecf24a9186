"""The engine: a target and its drafter decode many requests at once. Not thread-safe; `loop.py` steps it."""

import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from ..config import UnsupportedModel, UserError
from ..generation import Generation, Step
from ..grammar import Grammars, Matcher
from ..kernels import flash
from ..kernels.ops import Ops, ops_for, unsupported
from ..models.dflash.network import Drafter
from ..models.restrictions import Restrictions
from ..sampling import GrammarError, SamplingParams
from .capture import Capture
from .draft_length import BlockChooser, break_even
from .fit import Budget, fit, log_fitted, planner_for
from .graphs import buckets_up_to
from .memory import Room, check_heads, explain_out_of_memory, room_for_cache
from .options import EngineOptions, check_cache_dtype, resolve_draft_dtype
from .pages import PagePool
from .plan import block_lengths, runner_arguments
from .precompile import precompile
from .request import Capacity, Queueing, Request, RollingAcceptance, StepShape
from .runner import StepRunner
from .scheduler import Scheduler
from .step_costs import StepCosts
from .step_times import measure_steps
from .timing import cached_times, extended, measured_batches, place_of, shapes_to_measure
from .trees.budget import completed, tree_shapes
from .trees.chooser import TreeChooser
from .trees.result import TreeStepResult
from .weight_updates import update_drafter, update_head, update_target
from .weights import DrafterWeights, TargetWeights

VERSIONS = 8  # drafters; steps of each are counted
log = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was created."""

    requests: int = 0  # finished
    prompt_tokens: int = 0  # prompts of requests with at least one token of their answer
    cached_prompt_tokens: int = 0  # prompt tokens from prefix hits
    generated_tokens: int = 0
    outcomes: Counter[tuple[int, int]] = field(default_factory=Counter)  # verifications, counted per request, by
    # drafted and accepted tokens
    preemptions: int = 0
    draft_lengths: dict[int, int] = field(default_factory=dict)  # steps of the batch, by drafted tokens per row
    by_version: dict[int, tuple[int, int]] = field(default_factory=dict)  # steps and their tokens, by the drafter's
    # version: the first one and the newest
    tree_nodes: list[int] = field(default_factory=list)  # [S - 1] verified nodes of draft trees, by depth
    tree_nodes_accepted: list[int] = field(default_factory=list)  # [S - 1] accepted nodes, also after an answer's end

    def add_step(self, step: Step, version: int) -> None:
        """Counts a verification of one request."""
        self.outcomes[step.drafted, step.accepted] += 1
        steps, tokens = self.by_version.get(version, (0, 0))
        self.by_version[version] = steps + 1, tokens + len(step.tokens)
        if len(self.by_version) > VERSIONS:
            del self.by_version[sorted(self.by_version)[1]]

    def add_trees(self, result: TreeStepResult) -> None:
        """Counts the nodes of a step over trees."""
        by_depth = np.bincount(result.outcomes.accepted_nodes, minlength=len(result.nodes) + 1)[::-1].cumsum()[-2::-1]
        for counts, more in ((self.tree_nodes, result.nodes), (self.tree_nodes_accepted, by_depth)):
            counts += [0] * (len(more) - len(counts))
            counts[: len(more)] = [count + new for count, new in zip(counts, more.tolist(), strict=False)]

    @property
    def steps(self) -> int:
        """Verifications, counted per request."""
        return self.outcomes.total()

    @property
    def drafted(self) -> int:
        return sum(drafted * steps for (drafted, _), steps in self.outcomes.items())

    @property
    def accepted(self) -> int:
        return sum(accepted * steps for (_, accepted), steps in self.outcomes.items())


def operations(device: torch.device) -> Ops:
    """Returns the operations of a device. Raises UnsupportedModel if it cannot run decoding steps."""
    if reason := unsupported(device):
        raise UnsupportedModel(reason)
    flash.installed(device)  # loads it now, and not in the first long prompt
    return ops_for(device)


def expected_of_first_requests() -> RollingAcceptance:
    """Returns the acceptance expected of a new request: an average over some hundred blocks of other requests."""
    return RollingAcceptance(weight=3, decay=0.99)


class Engine:
    """Decodes prompts with a target and, unless it is None, a drafter.

    Args:
        tokenizer: the target's, for requests with a grammar.
        restrictions: apply to every request.

    Attributes:
        grammars: compiled grammars; `request` does not wait for one that is already compiled.
        context_limit: prompt and answer together, in tokens.
        vocabulary: prompt ids are below this.
        capacity: the largest request.
        stats: counts so far.
        drafter_version, target_version: how often their weights were replaced.
    """

    def __init__(
        self,
        target: TargetWeights,
        drafter: DrafterWeights | None,
        stop_ids: Sequence[int],
        options: EngineOptions | None = None,
        tokenizer: Any = None,
        restrictions: Restrictions | None = None,
    ) -> None:
        device = target.embedding.device
        config = drafter.config if drafter else None
        asked = options or EngineOptions()
        dtype = target.embedding.dtype
        unlimited = asked.fitted(target.spec, config, device)
        check_cache_dtype(asked.kv_cache_dtype, dtype)
        fitted = unlimited = replace(unlimited, draft_dtype=resolve_draft_dtype(asked.draft_dtype, device, dtype))
        planner, budget = None, 0.0
        if device.type == "cuda":
            planner = planner_for(target.spec, config, device, dtype)
            budget = Budget.of(asked, device).bytes + planner.loaded
            fitted, _ = fit(asked, planner, budget, device)
        self.vocabulary = target.spec.vocab_size
        self.stats = EngineStats()
        self.drafter_version = self.target_version = 0
        self._capture: Capture | None = None
        ops = operations(device)
        specs = [target.spec, *([drafter.spec] if drafter else [])]
        for spec in specs:
            check_heads(spec, device, dtype)
        self._stop_ids, self._restrictions = frozenset(stop_ids), restrictions or Restrictions()
        self.grammars = Grammars(tokenizer, self.vocabulary, stop_ids)
        self._expected = expected_of_first_requests()
        self._sizes = block_lengths(fitted, config)
        max_num_seqs, max_block = fitted.max_num_seqs or 1, self._sizes[-1]
        if drafter is not None and fitted.draft_dtype == "fp8":
            with explain_out_of_memory(fitted):
                drafter = drafter.quantized(target.head)
        forced = fitted.synthetic.table(4096, max_num_seqs, max_block).to(device) if fitted.synthetic else None

        kept_states = fitted.prefix_states or 0

        def runner(room: Room) -> StepRunner:
            arguments = runner_arguments(fitted, config) | {"max_context": room.context}
            return StepRunner(
                target, drafter, ops, num_pages=room.pages, scratch=room.scratch, forced=forced, **arguments
            )

        precompile(target.spec, config, dtype, fitted, device)
        with explain_out_of_memory(fitted):
            shorten = asked.max_model_len is None and asked.kv_cache_tokens is None
            room = room_for_cache(runner, planner, fitted, shorten=shorten)
            self.runner = runner(room)
        self.context_limit = room.context
        self.options = options = replace(fitted, max_model_len=room.context)
        assert options.max_num_batched_tokens is not None
        if planner is not None:
            log_fitted(asked, options, unlimited, budget)
        if options.kv_cache_tokens and asked.max_model_len is None and room.context < target.spec.context_limit:
            log.warning(
                "a request may have at most %d tokens, as kv_cache_tokens is %d; the target supports %d",
                room.context,
                options.kv_cache_tokens,
                target.spec.context_limit,
            )
        slots = range(1 + max_num_seqs, 1 + max_num_seqs + kept_states)  # after the slots of requests
        self.pool = PagePool(room.pages, options.page_size, slots)
        self.capacity = Capacity(self.context_limit, self.vocabulary)
        self._costs = self._step_costs()
        own = weakref.proxy(self)  # no reference cycle: an unused engine frees its memory at once
        self.scheduler = Scheduler(
            self.runner,
            self.pool,
            self._chooser(),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_block=max_block,
            max_places=self.runner.max_places,
            prefix_cache=options.prefix_cache and (kept_states > 0 or not target.spec.recurrent),
            recurrent=target.spec.recurrent,
            report=lambda request, step: own._report(request, step),
            on_finish=lambda request: own._on_finish(request),
        )

    def load_drafter(self, drafter: Drafter) -> None:
        """Uses another drafter of the same shape from the next step on; see `update_drafter`.

        Raises:
            UserError: there is no drafter, or it has another shape.
        """
        own = self._drafter().config
        for name in (each.name for each in fields(own) if each.compare):
            if (asked := getattr(drafter.config, name)) != (has := getattr(own, name)):
                raise UserError(f"the drafter's {name} is {asked}, but the engine's is {has}; start a new engine")
        self.update_drafter(drafter.state_dict())

    def update_drafter(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies weights [named as in a checkpoint] over those of the drafter, between two steps.

        Requests continue, and captured steps and the prefix cache stay valid: drafts only propose, so answers do not
        change. Keys and values that the old drafter wrote for the context stay too; they cost some acceptance until
        their pages are released. Expected acceptance and the calibration of trees are those of a new engine again.
        Ends `stop_drafting`.

        Args:
            tensors: all of the drafter, on any device, in any dtype.

        Raises:
            UserError: there is no drafter, or a tensor is unknown, missing or has another shape.
        """
        update_drafter(self._drafter(), tensors)
        self.drafter_version += 1
        if not self.runner.drafting:
            self._start_drafting()
        self._expect_as_new()

    def stop_drafting(self) -> None:
        """Decodes without the drafter until `update_drafter`, as fast as an engine without one. Taps are kept.

        Raises:
            UserError: the engine keeps no taps.
        """
        if self.runner.taps is None:
            raise UserError("stop_drafting needs a drafter and an engine with EngineOptions(keep_taps=True)")
        self.runner.drafting = False
        self.scheduler.choose_shape = self._chooser()

    def _start_drafting(self) -> None:
        """Writes the drafter's context of all requests. Cached prefixes have none and are forgotten."""
        self.runner.drafting = True
        for request in self.scheduler.prefilling:
            self.runner.write_kept_context(request.pages, request.prefilled)
        self.pool.clear()
        for request in self.scheduler.running:
            self.runner.write_kept_context(request.pages, request.reach)

    def update_target(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies weights [named as in a Hugging Face checkpoint], some or all, over those of the target.

        The prefix cache is emptied, as its keys and values are those of the old weights. Call it once for all tensors,
        or once for each part of them: every call is a new version.

        Raises:
            UserError: requests are unfinished, the target is not supported, or a tensor is unknown or does not fit.
        """
        if not self.scheduler.idle:
            raise UserError(
                "requests are unfinished, and their answers would mix two versions of the target; wait for them, or "
                "cancel them"
            )
        update_target(self.runner.target, tensors)
        if self.runner.drafter is not None:
            update_head(self.runner.drafter, self.runner.target.head)
        self.pool.clear()
        self.target_version += 1

    def start_capture(self, limit: int) -> Capture:
        """Collects requests that finish from now on, with their taps, in at most `limit` bytes until they are taken.

        Raises:
            UserError: the engine keeps no taps.
        """
        if self.runner.taps is None:
            raise UserError("capture needs a drafter and an engine with EngineOptions(keep_taps=True)")
        self._capture = Capture(limit)
        return self._capture

    @property
    def versions(self) -> tuple[int, int]:
        """Versions of target and drafter."""
        return self.target_version, self.drafter_version

    def _drafter(self) -> DrafterWeights:
        if self.runner.drafter is None:
            raise UserError("the engine has no drafter; start it with one")
        return self.runner.drafter

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        on_progress: Callable[[Request, Step | None], None] | None = None,
        **queueing: Unpack[Queueing],
    ) -> Request:
        """Queues a prompt for `step`. Raises UserError, see `request`."""
        request = self.request(prompt_ids, params, on_progress, **queueing)
        self.scheduler.add(request)
        return request

    def request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        on_progress: Callable[[Request, Step | None], None] | None = None,
        **queueing: Unpack[Queueing],
    ) -> Request:
        """Returns a checked request, which is not queued yet.

        Raises:
            GrammarError: a grammar that cannot be used. It is compiled here, unless `grammars` has it.
            UserError: see `Capacity.check`.
        """
        params = params or SamplingParams()
        prompt = list(prompt_ids)
        limit = self.capacity.check(prompt, params)
        if params.return_taps and self.runner.taps is None:
            raise UserError("return_taps needs a drafter and an engine with EngineOptions(keep_taps=True)")
        params = self._restrictions.apply(params, len(prompt))
        matcher = self.matcher(params)
        stop = self._stops(params)
        acceptance = RollingAcceptance(self._expected)
        return Request(
            prompt, params, stop, limit, on_progress, acceptance=acceptance, matcher=matcher, **queueing
        )  # fmt: skip

    def matcher(self, params: SamplingParams) -> Matcher | None:
        """Returns the matcher of a request's grammar, if any. From any thread. Raises GrammarError, see `Grammars`."""
        if not params.grammar:
            return None
        if self.options.synthetic:
            raise GrammarError("synthetic acceptance writes random text; it does not support grammars")
        return self.grammars.matcher(params.grammar, self._stops(params))

    def _stops(self, params: SamplingParams) -> frozenset[int]:
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._stop_ids)

    def reset_acceptance(self) -> None:
        """Resets the expected acceptance to that of a new engine, for benchmarks.

        Raises:
            ValueError: requests are unfinished.
        """
        if not self.scheduler.idle:
            raise ValueError("reset_acceptance needs an idle engine")
        self._costs = self._step_costs()
        self._expect_as_new()

    def _expect_as_new(self) -> None:
        """Forgets the acceptance of drafts; observed step times stay."""
        self._expected = expected_of_first_requests()
        if self.runner.trees is not None:
            self.runner.trees.reset_calibration()
        self.scheduler.choose_shape = self._chooser()

    def cancel(self, request: Request) -> None:
        """Discards a request; there are no more reports about it."""
        self.scheduler.cancel(request)

    def step(self) -> bool:
        """Runs one turn: chunks of prompts, and a step of the batch. Returns False if there is nothing left to do."""
        if self.scheduler.idle:
            return False
        self.scheduler.advance()
        self.stats.preemptions = self.scheduler.preemptions
        return True

    def prepare(self, *, everything: bool = False) -> bool:
        """Captures one step that batches may need and that has no graph yet; returns False if there is none.

        Without a graph a step takes longer, and some are captured when a batch needs them, see `StepGraphs`. After
        `stop_drafting` steps without the drafter are first, and those that follow `update_drafter` come next.

        Args:
            everything: also steps of large batches, which take long to capture.
        """
        runner, sizes = self.runner, sorted({1, *self._sizes})
        if runner.drafting or runner.drafter is None:
            return runner.prepare(sizes, self._tree_shapes, everything=everything)
        if runner.prepare([1], everything=everything):
            return True
        runner.drafting = True
        try:
            return runner.prepare(sizes, self._tree_shapes, everything=everything)
        finally:
            runner.drafting = False

    @property
    def break_even(self) -> float:
        """Tokens per step of whole blocks from which drafts make the running batch faster, by the times of steps."""
        batch = self.runner.bucket(max(len(self.scheduler.running), 1))
        if 1 not in self._sizes or (batch, 1) not in self._costs:
            return 1.0
        tokens = sum(request.length for request in self.scheduler.running)
        seconds = self._costs.seconds([(batch, size) for size in self._sizes], tokens)
        return break_even(dict(zip(self._sizes, seconds, strict=True)))

    def step_shapes(self, batch: int) -> list[StepShape]:
        """Returns the shapes of all steps that a batch of so many computed rows may run."""
        return [*map(StepShape, sorted({1, *self._sizes})), *self._tree_shapes(batch)]

    def _on_finish(self, request: Request) -> None:
        taps = self.runner.taps
        if request.params.return_taps and taps is not None:
            request.generation.taps = taps.read(request.pages, request.length)
        if self._capture is not None and taps is not None:
            self._capture.add(request, taps, self.drafter_version)

    def _report(self, request: Request, step: Step | None) -> None:
        stats = self.stats
        if step is not None:
            stats.add_step(step, self.drafter_version)
            if step.drafted:
                self._expected.observe(step.drafted, step.accepted)
        elif request.error is None:  # its prefill; a client may cancel it before it finishes
            stats.prompt_tokens += len(request.prompt_ids)
            stats.cached_prompt_tokens += request.cached_tokens
        if request.finished:
            stats.requests += 1
            stats.generated_tokens += len(request.tokens)
        if request.on_progress is not None:
            request.on_progress(request, step)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Generation]:
        """Decodes prompts together until all have ended; `params` are one for all, or one for each.

        Raises:
            UserError: see `request`.
            Exception: the error that ended one of them, after all others have ended.
        """
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        requests = [self.request(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
        try:
            for request in requests:
                self.scheduler.add(request)
            while not all(request.finished for request in requests):
                self.step()
        except BaseException:  # also Ctrl-C: their answers are not needed any more
            for request in requests:
                self.cancel(request)
            raise
        if error := next((request.error for request in requests if request.error), None):
            raise error
        return [request.generation for request in requests]

    def _chooser(self) -> Callable[[Sequence[Request]], StepShape]:
        drafting, counts = self.runner.drafting, self.stats.draft_lengths
        choose, self._trees = self._choose_drafted(), self._tree_chooser()
        trees = self._trees if drafting else None

        def chosen(requests: Sequence[Request]) -> StepShape:
            drafts = [request.drafts for request in requests]
            over_trees = trees is not None and any(drafts) and trees.available(requests)
            shape = trees(requests) if trees is not None and over_trees else StepShape(1)
            if drafting and not shape.rows:  # past acceptance predicts blocks better than draft probabilities do
                shape = StepShape(choose(requests) if all(drafts) else 1)  # either all requests have a block or none
            counts[shape.block - 1] = counts.get(shape.block - 1, 0) + 1
            return shape

        return chosen

    def _tree_chooser(self) -> TreeChooser | None:
        """Returns the chooser of steps over trees, or None without trees."""
        runner = self.runner
        if runner.trees is None:
            return None
        on_gpu = runner.device.type == "cuda"
        trees = TreeChooser(runner.trees, self._sizes, self._costs, runner.bucket, on_gpu, self.stats.add_trees)
        runner.observe = trees.observe
        return trees

    def _tree_shapes(self, batch: int) -> list[StepShape]:
        return self._trees.shapes(batch) if self._trees is not None else []

    def _choose_drafted(self) -> Callable[[Sequence[Request]], int]:
        sizes = self._sizes
        if len(sizes) == 1:
            return lambda requests: sizes[0]
        return BlockChooser(sizes, self._costs, self.runner.bucket)

    def _step_costs(self) -> StepCosts:
        """Returns the times of steps, measured or read from the cache; without a choice of lengths there are none."""
        sizes, runner, max_num_seqs = self._sizes, self.runner, self.runner.max_num_seqs
        if len(sizes) == 1:
            return StepCosts({})
        drafter = None
        if (weights := runner.drafter) is not None:
            architecture = weights.config.architecture
            drafter = weights.spec, architecture.kind, [getattr(weights.config, name) for name in architecture.sizes]
        key = [
            place_of(runner.device),
            torch.__version__,
            str(runner.dtype),
            max_num_seqs,
            (self.context_limit, self.options.page_size),  # attention splits depend on them
            sizes,
            runner.target.spec,
            drafter,
            (self.options.draft_dtype, self.options.fp8_cache),
        ]
        shapes, batches = shapes_to_measure(max_num_seqs, sizes), measured_batches(max_num_seqs)
        if runner.trees is not None:
            shapes += tree_shapes(batches, runner.trees.blocks, runner.trees.nodes)
            key += [runner.trees.nodes, runner.trees.width]
        times = cached_times(key, lambda: measure_steps(runner, shapes), self.options.retune)
        if runner.trees is not None:
            times = completed(times, batches, runner.trees.blocks)
        times, unit = extended(times, buckets_up_to(max_num_seqs), sizes), math.inf
        if runner.device.type == "cuda":
            specs = [runner.target.spec, *([runner.drafter.spec] if runner.drafter else [])]
            unit = runner.target.spec.dense_parameters / sum(spec.kv_values_per_token for spec in specs)
        costs = StepCosts(times, unit, runner.target.spec.routes)
        runner.observe_time = costs.observe
        return costs
