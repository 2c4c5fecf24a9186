"""Decode prompts with a drafter and without one, and count what was accepted.

One request at a time; `run.py` has several in flight where a server is measured so.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...acceptance import Acceptance
from ...data.prompts import Message
from ...decode import generate
from ...fingerprint import json_digest
from ...generation import Generation
from ...models.dflash.network import Drafter
from ...models.target import Target
from ...sampling import SamplingParams
from .decoders import OnStep, Pair
from .energy import joules


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the target reads it."""

    id: str
    token_ids: list[int]
    category: str | None = None
    turn: int = 1  # of its conversation
    rest: "Rest | None" = None  # of the conversation
    asked: str = ""  # the last message of the user, as readers know it

    def next(self, answer: str) -> "EncodedPrompt | None":
        """The next turn, behind this answer; None behind the last. Raises UserError: the chat template refuses it."""
        if self.rest is None:
            return None
        asked = self.rest.turns[0]
        # a turn that begins with a recorded call replaces the answer
        said = () if asked[0]["role"] == "assistant" else ({"role": "assistant", "content": answer},)
        history = (*self.rest.history, *said, *asked)
        rest = replace(self.rest, history=history, turns=self.rest.turns[1:])
        left, question = rest if rest.turns else None, last_question(asked)
        return EncodedPrompt(self.id, rest.encode(history), self.category, self.turn + 1, left, question)


def last_question(messages: Sequence[Message]) -> str:
    """Returns the text of the user's last message."""
    texts = [message.get("content") for message in messages if message["role"] == "user"]
    return texts[-1] if texts and isinstance(texts[-1], str) else ""


@dataclass(frozen=True, slots=True)
class Rest:
    """What is asked behind a prompt."""

    history: tuple[Message, ...]  # of the prompt
    turns: tuple[tuple[Message, ...], ...]  # at least one
    encode: Callable[[Sequence[Message]], list[int]]


def prompts_digest(prompts: Sequence[EncodedPrompt]) -> str:
    """As reports note the prompts of a set."""
    rows = [{"id": prompt.id, "token_ids": prompt.token_ids} for prompt in prompts]
    later = [{"later": prompt.rest.turns} if prompt.rest else {} for prompt in prompts]
    return json_digest([row | more for row, more in zip(rows, later, strict=True)])


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a drafted answer leaves the plain one.

    At temperature 0 a small regret is a near tie that rounding decided; a large one is a defect.
    """

    position: int  # 0-based, in the answer
    plain_token: int
    drafted_token: int
    plain_text: str
    drafted_text: str
    regret_nats: float | None  # of the drafted token, see `Pair.regret`; None where tokens are sampled


@dataclass(frozen=True, slots=True)
class Measurement:
    """One prompt, decoded with the drafter and, with a baseline, without."""

    id: str
    prompt_tokens: int
    drafted: Generation
    plain: Generation | None
    difference: Difference | None  # None without a baseline, and where the answers are equal or need not be
    category: str | None = None
    turn: int = 1
    prompt_text: str = ""
    asked: str = ""  # the last message of the user; empty where only tokens are known
    token_texts: tuple[str, ...] = ()  # of the drafted answer, one a token; together they are its text
    offered_texts: tuple[tuple[int, str], ...] = ()  # of every token that `Step.offered` has, by its id
    step_s: tuple[float, ...] = ()  # seconds from each of its steps to the next, as who reads the stream sees them
    plain_step_s: tuple[float, ...] = ()
    joules: float | None = None  # that the GPU used for it; None where it does not say
    plain_joules: float | None = None


def measure(
    pair: Pair,
    prompt: EncodedPrompt,
    params: SamplingParams,
    *,
    baseline: bool,
    on_step: Callable[[Generation], None] | None = None,
) -> Measurement:
    """Decode one prompt with the drafter and, with `baseline`, without, one after the other.

    Args:
        on_step: called with the growing drafted answer.

    Raises:
        UserError: a prompt that is empty or leaves no room for an answer.
    """
    drafted = _watched(pair, prompt.token_ids, params, True, on_step)
    return joined(pair, prompt, params, drafted, _watched(pair, prompt.token_ids, params, False) if baseline else None)


Watched = tuple[Generation, tuple[float, ...], float | None]  # an answer, the seconds between its steps, and joules


def joined(
    pair: Pair, prompt: EncodedPrompt, params: SamplingParams, with_drafts: Watched, without: Watched | None
) -> Measurement:
    """The measurement of a prompt whose answers are there. Raises UserError."""
    (drafted, gaps, used), (plain, plain_gaps, plain_used) = with_drafts, without or (None, (), None)
    difference = None
    if plain and pair.repeats_plain(params):
        difference = _difference(pair, prompt.token_ids, plain.tokens, drafted.tokens, params.temperature == 0.0)
    texts = _text(pair.tokenizer, prompt.token_ids), tuple(token_texts(pair.tokenizer, drafted.tokens))
    offered = tuple(_offered_texts(pair.tokenizer, drafted).items())
    of_prompt = prompt.category, prompt.turn, texts[0], prompt.asked, texts[1], offered
    costs = gaps, plain_gaps, used, plain_used
    return Measurement(prompt.id, len(prompt.token_ids), drafted, plain, difference, *of_prompt, *costs)


def _watched(
    pair: Pair,
    prompt_ids: list[int],
    params: SamplingParams,
    draft: bool,
    on_step: Callable[[Generation], None] | None = None,
) -> Watched:
    times: list[float] = []
    step = noting(times, on_step)
    before = joules(pair.device)
    answer = pair.decode(prompt_ids, params, draft=draft, on_step=step)
    after = joules(pair.device)
    used = None if before is None or after is None else after - before
    return answer, gaps_of(times), used


def noting(times: list[float], on_step: OnStep | None) -> OnStep:
    """`on_step`, which also notes when an answer grew."""

    def step(growing: Generation) -> None:
        times.append(time.perf_counter())
        if on_step:
            on_step(growing)

    return step


def gaps_of(times: Sequence[float]) -> tuple[float, ...]:
    """Seconds from each time to the next."""
    return tuple(round(b - a, 6) for a, b in itertools.pairwise(times))


def _difference(
    pair: Pair, prompt_ids: list[int], plain: list[int], drafted: list[int], greedy: bool
) -> Difference | None:
    # an answer ends by a rule on its own tokens, so neither of two different ones is a prefix of the other
    for position, (a, b) in enumerate(zip(plain, drafted, strict=False)):
        if a != b:
            regret = pair.regret(prompt_ids + plain[:position], b) if greedy else None
            return Difference(position, a, b, _text(pair.tokenizer, [a]), _text(pair.tokenizer, [b]), regret)
    return None


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of every token, special ones too; a character of several tokens is that of the last of them."""
    found, start, done = [], 0, 0
    for end in range(1, len(ids) + 1):
        text = _text(tokenizer, ids[start:end])
        if text.endswith("\ufffd") and end < len(ids) and end - done < 4:  # bytes of a character
            found.append("")
            continue
        # behind the token before: some tokenizers write a word otherwise at the beginning of a text
        found.append(text[len(_text(tokenizer, ids[start:done])) :])
        start, done = done, end
    return found


def _offered_texts(tokenizer: Any, answer: Generation) -> dict[int, str]:
    """Of every token that a draft tree had, behind the token where it was first offered."""
    found, at = dict[int, str](), 1
    for step in answer.steps:
        for place, offered in enumerate(step.offered):
            before = answer.tokens[at + place - 1]
            start = len(_text(tokenizer, [before])) if any(token not in found for token, _ in offered) else 0
            for token, _ in offered:
                if token not in found:
                    found[token] = _text(tokenizer, [before, token])[start:]
        at += len(step.tokens)
    return found


def _text(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def held_out_acceptance(
    target: Target, drafter: Drafter, prompts: list[list[int]], params: SamplingParams | None = None
) -> Acceptance:
    """Decode token-id prompts by `decode.py` with the drafter and count; for modules that are in memory anyway.

    Raises:
        UserError: a prompt that does not fit.
    """
    answers = [generate(target, drafter, prompt, params) for prompt in prompts]
    return Acceptance.of(answers, drafter.config.block_size)
