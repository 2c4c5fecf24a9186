"""Plain decoding on Hugging Face modules, several prompts at a time: the reference for targets that the engine refuses.

Every row gets the tokens that `decode.stream` gives its prompt alone, up to the rounding of GEMMs over more rows.
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

PREFILL_TOKENS = 8192  # padding included, of prompts that run together: what is computed between layers is bounded
REFILL = 0.25  # of the batch is empty before prompts join: at once is no faster, once all have ended far slower

KINDS = {"full_attention", "sliding_attention", "linear_attention"}  # which no padding on the left changes
OF_LENGTH = {"dynamic", "longrope"}  # RoPE that turns every row by the length of the longest


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
        """Tokens so far, which is the position of the next."""
        return len(self.prompt) + len(self.generation.tokens)

    @property
    def filter(self) -> tuple[float, float, int, float]:
        """What its distribution is filtered by."""
        return self.params.temperature, self.params.top_p, self.params.top_k, self.params.min_p


def alone(target: Target) -> str | None:
    """Why prompts of this target are decoded one at a time; None where several can be."""
    kinds = set(getattr(target.config, "layer_types", None) or ())
    rope = getattr(target.config, "rope_parameters", None) or {}
    turns = {str(group.get("rope_type")) for group in (rope, *rope.values()) if isinstance(group, dict)}
    if unknown := {"attention_mask", "position_ids"} - inspect.signature(type(target.model).forward).parameters.keys():
        return f"its model takes no {min(unknown)}"
    if kinds - KINDS or not BatchCache.holds(target.config):
        return "its layers remember what no batch can hold"
    return f"its RoPE is {min(turns & OF_LENGTH)!r}" if turns & OF_LENGTH else None


class BatchedDecoder:
    """Up to `batch` prompts at a time, a token of each in every forward.

    Prompts join when a part of the batch is empty, those that came first. Their prefill goes by lengths, so that
    little of it is padding. What asks for a grammar or for log-probabilities is decoded by itself.

    Args:
        target: one that need not be decoded `alone`.

    Raises:
        UnsupportedModel: a model that reads nothing of what it keeps.
    """

    def __init__(self, target: Target, batch: int) -> None:
        self._target: Target | None = target
        self._batch, self.width = batch, 2 * batch  # whoever ends finds the next one waiting
        self._waiting: deque[_Row] = deque()
        self._finished: deque[Response] = deque()
        self._rows: list[_Row] = []
        self._cache = BatchCache(config=target.config)  # of all tokens of the rows but the last
        recurrent = target.new_cache().recurrent
        self._pads = not recurrent or packed.separable(target.model)  # else padding may leave something in a state

    def submit(self, key: int, prompt: list[int], params: SamplingParams, chat: Chat | None = None) -> None:
        target = self._open
        check_prompt(prompt, target.context_limit, target.embedding.num_embeddings)
        params.check_bias(target.embedding.num_embeddings)
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else target.stop_token_ids)}
        limit = min(params.max_tokens, target.context_limit - len(prompt))
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
        """Prompts that wait take the empty places."""
        fresh: list[_Row] = []
        while self._waiting and len(self._rows) + len(fresh) < self._batch:
            row = self._waiting.popleft()
            if row.params.grammar or row.params.logprobs is not None or row.params.prompt_logprobs is not None:
                self._finished.append(Response(row.key, generate(self._open, None, row.prompt, row.params)))
            else:
                fresh.append(row)
        for group in self._together(fresh):
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

    def _together(self, rows: Sequence[_Row]) -> Iterator[list[_Row]]:
        """Groups of rows whose prompts run in one forward."""
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
        """Empty places on the left of each row, of a batch as wide as its longest; None where there are none."""
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
    """The token of every row from logits [B, V], as `decode.choices` takes it for one."""
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
