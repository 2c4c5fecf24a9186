"""Decodes several prompts at a time on Hugging Face modules, for targets that the engine does not support.

Every row gets the same tokens as from `decode.stream`, up to the rounding of GEMMs over more rows.
"""

import inspect
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...config import UserError
from ...decode import choices, generate, sampled
from ...generation import Generation, Step, check_prompt, commit
from ...models import packed
from ...models.cache import BatchCache
from ...models.target import Target
from ...sampling import SamplingParams, int64_seed
from .decoders import Chat, Response, free_memory

PREFILL_TOKENS = 8192  # maximum per forward, including padding; bounds activation memory
REFILL = 0.25  # free share of the batch before prompts are added; 0 is no faster, 1 is far slower

# layers that allow left padding
KINDS = {"full_attention", "sliding_attention", "chunked_attention", "linear_attention"}
LENGTH_DEPENDENT = {"dynamic", "longrope"}  # RoPE of every row depends on the longest row


@dataclass(slots=True)
class _Row:
    key: int
    prompt: list[int]
    params: SamplingParams
    stop_ids: set[int]
    limit: int
    generation: Generation = field(default_factory=Generation)

    @property
    def length(self) -> int:
        """Number of tokens so far, which is the position of the next."""
        return len(self.prompt) + len(self.generation.tokens)

    @property
    def filter(self) -> tuple[float, float, int, float]:
        """The parameters that filter its distribution."""
        return self.params.temperature, self.params.top_p, self.params.top_k, self.params.min_p


def unbatchable_reason(target: Target) -> str | None:
    """Returns why prompts of this target must be decoded one at a time; None if they can be batched."""
    kinds = set(getattr(target.config, "layer_types", None) or ())
    rope = getattr(target.config, "rope_parameters", None) or {}
    turns = {str(group.get("rope_type")) for group in (rope, *rope.values()) if isinstance(group, dict)}
    if unknown := {"attention_mask", "position_ids"} - inspect.signature(type(target.model).forward).parameters.keys():
        return f"its model has no argument {min(unknown)}"
    if kinds - KINDS or not BatchCache.holds(target.config):
        return "its layers keep state that cannot be batched"
    return f"its RoPE is {min(turns & LENGTH_DEPENDENT)!r}" if turns & LENGTH_DEPENDENT else None


def _alone(params: SamplingParams) -> bool:
    """Whether a request is decoded on its own, by `generate`."""
    return bool(params.grammar) or params.logprobs is not None or params.prompt_logprobs is not None


class BatchedDecoder:
    """Decodes up to `batch` prompts at a time, one token of each per forward.

    Prompts are added in order when a share of the batch is free. Prompts of similar length are prefilled together, to
    reduce padding. A request with a grammar or log-probabilities is decoded on its own.

    Args:
        target: one without an `unbatchable_reason`.

    Raises:
        UnsupportedModel: the model does not use its cache.
    """

    def __init__(self, target: Target, batch: int) -> None:
        self._target: Target | None = target
        self._batch, self.width = batch, 2 * batch  # so a finished row can be replaced at once
        self._waiting: deque[_Row] = deque()
        self._finished: deque[Response] = deque()
        self._rows: list[_Row] = []
        self._cache = BatchCache(config=target.config)  # all tokens of the rows except the last
        recurrent = target.new_cache().recurrent
        self._pads = not recurrent or packed.separable(target.model)  # otherwise padding may change a state

    def submit(self, key: int, prompt: list[int], params: SamplingParams, chat: Chat | None = None) -> None:
        target = self._open
        check_prompt(prompt, target.context_limit, target.embedding.num_embeddings)
        params.check_bias(target.embedding.num_embeddings)
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else target.stop_token_ids)}
        limit = min(params.max_tokens, target.context_limit - len(prompt))
        if not _alone(params):  # else `generate` applies them
            params = target.restrictions.apply(params, len(prompt))
        self._waiting.append(_Row(key, prompt, params, stop_ids, limit))

    @torch.inference_mode()
    def wait(self) -> Response:
        while not self._finished:
            try:
                if self._waiting and len(self._rows) <= self._batch * (1 - REFILL):
                    self._refill()
                elif self._rows:
                    self._step()
                else:
                    raise RuntimeError("nothing was submitted")
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"GPU memory does not hold {self._batch} prompts at a time and their answers; lower batch_size"
                ) from error
        return self._finished.popleft()

    def close(self) -> None:
        self._target = None
        self._rows, self._cache = [], BatchCache()
        free_memory()

    @property
    def _open(self) -> Target:
        assert self._target is not None, "closed"
        return self._target

    def _step(self) -> None:
        started = time.perf_counter()
        last = torch.tensor([[row.generation.tokens[-1]] for row in self._rows], device=self._open.device)
        out = self._open.forward(last, cache=self._cache, logits="all", padding=self._padding(self._rows))
        assert out.logits is not None
        for row, token in zip(self._rows, choose_all(out.logits[:, 0], self._rows), strict=True):
            commit(row.generation, [token], row.stop_ids, row.limit)
            row.generation.steps.append(Step(0, 0, (token,)))
        passed = time.perf_counter() - started
        for row in self._rows:
            row.generation.decode_s += passed
        self._drop_finished()

    def _refill(self) -> None:
        """Adds waiting prompts to the free rows."""
        fresh: list[_Row] = []
        while self._waiting and len(self._rows) + len(fresh) < self._batch:
            row = self._waiting.popleft()
            if _alone(row.params):
                self._finished.append(Response(row.key, generate(self._open, None, row.prompt, row.params)))
            else:
                fresh.append(row)
        for group in self._prefill_groups(fresh):
            cache = self._prefill(group)
            if self._rows:
                longest = max(row.length for row in (*self._rows, *group)) - 1
                self._cache.keep(range(len(self._rows)), longest)
                cache.keep(range(len(group)), longest)
                self._cache.append(cache)
            else:
                self._cache = cache
            self._rows += group
            self._drop_finished()

    def _prefill_groups(self, rows: Sequence[_Row]) -> Iterator[list[_Row]]:
        """Yields groups of rows to prefill in one forward."""
        group: list[_Row] = []
        for row in sorted(rows, key=lambda row: len(row.prompt)):
            even = not group or self._pads or len(row.prompt) == len(group[0].prompt)
            if group and (not even or (len(group) + 1) * len(row.prompt) > PREFILL_TOKENS):
                yield group
                group = []
            group.append(row)
        if group:
            yield group

    def _prefill(self, group: Sequence[_Row]) -> BatchCache:
        started = time.perf_counter()
        target, cache = self._open, BatchCache(config=self._open.config)
        longest = max(len(row.prompt) for row in group)
        ids = torch.tensor([[0] * (longest - len(row.prompt)) + row.prompt for row in group], device=target.device)
        out = target.forward(ids, cache=cache, logits="last", padding=self._padding(group))
        assert out.logits is not None
        for row, token in zip(group, choose_all(out.logits[:, 0], group), strict=True):
            commit(row.generation, [token], row.stop_ids, row.limit)
        passed = time.perf_counter() - started
        for row in group:
            row.generation.prefill_s = passed
        return cache

    def _padding(self, rows: Sequence[_Row]) -> Tensor | None:
        """Returns the left padding of each row; None if there is none."""
        longest = max(row.length for row in rows)
        padding = [longest - row.length for row in rows]
        return torch.tensor(padding, device=self._open.device) if any(padding) else None

    def _drop_finished(self) -> None:
        running = [i for i, row in enumerate(self._rows) if row.generation.finish_reason is None]
        if len(running) == len(self._rows):
            return
        self._finished += [Response(row.key, row.generation) for row in self._rows if row.generation.finish_reason]
        self._rows = [self._rows[i] for i in running]
        if running:
            self._cache.keep(running, max(row.length for row in self._rows) - 1)


def choose_all(logits: Tensor, rows: Sequence[_Row]) -> list[int]:
    """Chooses the token of every row from logits [B, V], as `decode.choices` does for one."""
    found = logits.argmax(-1)
    drawn: dict[tuple[float, ...], list[int]] = {}
    for i, row in enumerate(rows):
        if row.params.edits_logits:
            answer = row.generation.tokens
            found[i] = choices(logits[i : i + 1], row.prompt + answer, answer, [], row.params, row.stop_ids)[0]
        elif row.params.temperature > 0.0:
            drawn.setdefault(row.filter, []).append(i)
    for places in drawn.values():
        seeds, positions = (
            torch.tensor([number(rows[i]) for i in places], device=logits.device)
            for number in (lambda row: int64_seed(row.params.seed), lambda row: row.length)
        )
        found[places] = sampled(logits[places], rows[places[0]].params, seeds, positions)
    return found.tolist()
