"""Draft -> verify -> accept on plain Hugging Face modules: the readable definition of what serving must produce.

Batch 1, written for reading. Greedy output is token-identical to the target's own `generate`; a sampled output is
token-identical to plain sampling with the same seed, because the draw at a position depends on the seed and that
position alone, never on how many tokens a step committed.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from .config import UserError
from .kernels.reference import accepted_prefix, choose, filtered_probabilities, penalized, position_uniform
from .models.dflash.network import ContextKV, Drafter
from .models.target import Target
from .sampling import SamplingParams

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Step:
    """One verification: `drafted` tokens proposed, `accepted` of them taken, `tokens` committed (bonus included)."""

    drafted: int
    accepted: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one position, of the target's own distribution at temperature 1, unfiltered."""

    chosen: float
    best: tuple[tuple[int, float], ...]  # (token, log-probability), most probable first


@dataclass(slots=True)
class Generation:
    """A finished (or, from `stream`, a growing) answer."""

    tokens: list[int] = field(default_factory=list)  # stop token included
    steps: list[Step] = field(default_factory=list)  # the first token comes from the prefill and is no step
    finish_reason: FinishReason | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one a token, if asked for

    @property
    def acceptance_length(self) -> float:
        """tau: committed tokens per verify step, bonus included; NaN before the first step."""
        return sum(len(s.tokens) for s in self.steps) / len(self.steps) if self.steps else float("nan")


class PromptError(UserError):
    """A prompt that cannot be decoded.

    Attributes:
        code: "context_length_exceeded" where OpenAI's API has that name for it, else None.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


def check_prompt(ids: Sequence[int], limit: int, rows: int) -> None:
    """Refuse what cannot be decoded.

    Args:
        limit: tokens of prompt and answer together.
        rows: of the target's embedding.

    Raises:
        PromptError: no token, no room for an answer, or an id that is no row.
    """
    if not ids:
        raise PromptError("the prompt is empty; give at least one token")
    if len(ids) >= limit:
        raise PromptError(
            f"the prompt has {len(ids)} tokens; the context limit is {limit} and an answer needs at least one",
            "context_length_exceeded",
        )
    if not 0 <= min(ids) <= max(ids) < rows:
        wrong = next(i for i in ids if not 0 <= i < rows)
        raise PromptError(f"the prompt holds token {wrong}; the target's embedding has rows 0..{rows - 1}")


def generate(
    target: Target, drafter: Drafter | None, prompt_ids: list[int], params: SamplingParams | None = None
) -> Generation:
    """Decode one prompt to its end; see `stream`."""
    return deque(stream(target, drafter, prompt_ids, params), maxlen=1)[0]


@torch.inference_mode()
def stream(
    target: Target, drafter: Drafter | None, prompt_ids: list[int], params: SamplingParams | None = None
) -> Iterator[Generation]:
    """Decode one prompt, yielding the same growing `Generation` after the prefill and after every step.

    Args:
        drafter: None decodes plainly, one token a step, by the same code.
        prompt_ids: at least one token, fewer than the target's context limit.

    Raises:
        UserError: an empty prompt, one that leaves no room for an answer, or an id, of the prompt or biased, outside
            the target's vocabulary.
    """
    params = params or SamplingParams()
    rows = target.embedding.num_embeddings
    check_prompt(prompt_ids, target.context_limit, rows)
    params.check_bias(rows)
    limit = min(params.max_new_tokens, target.context_limit - len(prompt_ids))
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(target.stop_token_ids))
    taps = drafter.config.target_layer_ids if drafter else ()
    generation = Generation()

    started = time.perf_counter()
    cache = target.new_cache()
    prompt = torch.tensor([prompt_ids], device=target.device)
    out = target.forward(prompt, taps=taps, cache=cache, logits="last")
    assert out.logits is not None
    first = _choose(out.logits[0], prompt_ids, [], [], params).tolist()
    context = _context_kv(drafter, out.features, 0, len(prompt_ids))
    cache.crop(0)  # takes nothing back; transformers 5.15 wants a crop behind every forward that records
    commit(generation, first, stop_ids, limit)
    if params.logprobs is not None:
        generation.logprobs += token_logprobs(out.logits[0], first, params.logprobs)
    generation.prefill_s = time.perf_counter() - started
    yield generation

    while generation.finish_reason is None:
        started = time.perf_counter()
        # tokens 0..p are committed, p has not been through the target; caches hold 0..p-1
        p = len(prompt_ids) + len(generation.tokens) - 1
        last = generation.tokens[-1]
        remaining = limit - len(generation.tokens)

        draft = propose(target, drafter, context, last, p) if drafter and remaining > 1 else []
        draft = draft[: remaining - 1]  # the bonus token is always committed, so no more can be used

        block = torch.tensor([[last, *draft]], device=target.device)
        out = target.forward(block, taps=taps, cache=cache, logits="all")
        assert out.logits is not None
        choice = _choose(out.logits[0], prompt_ids + generation.tokens, generation.tokens, draft, params)

        # the longest drafted prefix that equals the target's own choices, then its choice at the first mismatch
        accepted = int(accepted_prefix(block[:, 1:], choice[None])[0])
        committed = commit(generation, choice[: accepted + 1].tolist(), stop_ids, limit)
        if params.logprobs is not None:
            generation.logprobs += token_logprobs(out.logits[0], committed, params.logprobs)
        generation.steps.append(Step(len(draft), min(accepted, len(committed)), tuple(committed)))

        # rejected tokens leave the target's cache; the verified ones enter the drafter's context
        rejected = len(draft) - accepted
        cache.crop(-rejected)
        more = _context_kv(drafter, out.features, p, accepted + 1)
        context = context.append(more) if context and more else more
        generation.decode_s += time.perf_counter() - started
        yield generation


def propose(target: Target, drafter: Drafter, context: ContextKV | None, last: int, position: int) -> list[int]:
    """Draft S - 1 tokens after token `last` at `position` in one non-causal pass: argmax of slots 1..S-1."""
    assert context is not None and context.length == position, "the drafter sees positions strictly before the anchor"
    size = drafter.config.block_size
    ids = torch.full((1, size), drafter.config.mask_token_id, device=target.device)
    ids[0, 0] = last
    positions = torch.arange(position, position + size, device=target.device)[None]
    hidden = drafter(target.embed(ids).to(drafter.dtype), positions, context)
    return target.head(hidden[0, 1:].to(target.dtype)).argmax(-1).tolist()


def _context_kv(drafter: Drafter | None, features: Tensor | None, start: int, count: int) -> ContextKV | None:
    if drafter is None or features is None:
        return None
    positions = torch.arange(start, start + count, device=features.device)[None]
    return drafter.context_kv(features[:, :count].to(drafter.dtype), positions)


def _choose(logits: Tensor, context: list[int], answer: list[int], draft: list[int], params: SamplingParams) -> Tensor:
    """The target's tokens [M] from logits [M, V], row i standing behind the context and `draft[:i]`.

    Args:
        context: prompt and answer, so its length is the position of the first choice.
        answer: the part of it that was generated.
    """
    if params.edits_logits:
        logits = logits.float().clone()
        for i in range(len(logits)):
            logits[i] = _edited(logits[i], context + draft[:i], answer + draft[:i], params)
    if params.temperature == 0.0:
        return logits.argmax(-1)
    probabilities = filtered_probabilities(
        logits, temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, min_p=params.min_p
    )
    positions = torch.arange(len(context), len(context) + len(logits), device=logits.device)
    return choose(probabilities, position_uniform(torch.full_like(positions, int64_seed(params.seed)), positions))


def _edited(logits: Tensor, context: list[int], answer: list[int], params: SamplingParams) -> Tensor:
    def counts(tokens: list[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=logits.device).bincount(minlength=len(logits))

    bias = torch.zeros_like(logits)
    for token, value in params.logit_bias:
        bias[token] += value
    return penalized(
        logits,
        counts(context) > 0,
        counts(answer),
        bias,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )


def token_logprobs(logits: Tensor, tokens: list[int], best: int) -> list[TokenLogprobs]:
    """What `SamplingParams.logprobs` reports for `tokens`, chosen from the first rows of logits [M, V]."""
    found = []
    for row, token in zip(logits.float().log_softmax(-1), tokens, strict=False):
        values, ids = row.topk(best)
        found.append(TokenLogprobs(float(row[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True))))
    return found


def int64_seed(seed: int) -> int:
    """Any integer as the signed 64-bit one with the same low bits."""
    low = seed & ((1 << 64) - 1)
    return low - (1 << 64) if low >> 63 else low


def commit(generation: Generation, tokens: list[int], stop_ids: Set[int], limit: int) -> list[int]:
    """Append tokens up to the first stop token, say whether the answer is finished, return what was appended."""
    for i, token in enumerate(tokens):
        if token in stop_ids:
            tokens = tokens[: i + 1]
            generation.finish_reason = "stop"
            break
    generation.tokens += tokens
    if generation.finish_reason is None and len(generation.tokens) >= limit:
        generation.finish_reason = "length"
    return tokens
