"""Decodes prompts with and without a drafter, one request at a time, and counts accepted drafts.

`run.py` sends concurrent requests to servers.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...acceptance import Acceptance
from ...data.prompts import Message
from ...decode import generate
from ...fingerprint import json_digest
from ...generation import Generation
from ...models.dflash.network import Drafter
from ...models.target import Target
from ...sampling import SamplingParams
from .decoders import OnStep
from .energy import joules
from .pairs import Pair


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as token ids."""

    id: str
    token_ids: list[int]
    category: str | None = None
    turn: int = 1  # number of the turn in its conversation
    rest: "Rest | None" = None  # later turns
    asked: str = ""  # the user's last message
    recorded: str = ""  # the recorded answer
    # encodes the prompt with a text before the user's first message; None: the prompt cannot be lengthened
    encode_after: Callable[[str], list[int]] | None = field(default=None, compare=False, repr=False)

    def next(self, answer: str) -> "EncodedPrompt | None":
        """Returns the next turn after this answer; None after the last. Raises UserError if the template fails."""
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
    """The later turns of a conversation."""

    history: tuple[Message, ...]  # messages of the prompt
    turns: tuple[tuple[Message, ...], ...]  # at least one
    encode: Callable[[Sequence[Message]], list[int]]


def prompts_digest(prompts: Sequence[EncodedPrompt]) -> str:
    """Returns the digest of a set's prompts for reports."""
    rows = [{"id": prompt.id, "token_ids": prompt.token_ids} for prompt in prompts]
    later = [{"later": prompt.rest.turns} if prompt.rest else {} for prompt in prompts]
    return json_digest([row | more for row, more in zip(rows, later, strict=True)])


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of a drafted answer from the plain one.

    At temperature 0 a small regret is a near-tie decided by rounding; a large one is a defect.
    """

    position: int  # 0-based, in the answer
    plain_token: int
    drafted_token: int
    plain_text: str
    drafted_text: str
    regret_nats: float | None  # see `Pair.regret`; None if tokens are sampled


@dataclass(frozen=True, slots=True)
class Measurement:
    """One prompt decoded with the drafter and, with a baseline, without it."""

    id: str
    prompt_tokens: int
    drafted: Generation
    plain: Generation | None
    difference: Difference | None  # None without a baseline, and if the answers are equal or may differ
    category: str | None = None
    turn: int = 1
    prompt_text: str = ""
    asked: str = ""  # the user's last message; empty if only tokens are known
    token_texts: tuple[str, ...] = ()  # one per token of the drafted answer; joined they are its text
    offered_texts: tuple[tuple[int, str], ...] = ()  # token id and text of every token in `Step.offered`
    step_s: tuple[float, ...] = ()  # seconds between steps, as a reader of the stream sees them
    plain_step_s: tuple[float, ...] = ()
    joules: float | None = None  # used by the GPU; None without a counter
    plain_joules: float | None = None


def measure(
    pair: Pair,
    prompt: EncodedPrompt,
    params: SamplingParams,
    *,
    baseline: bool,
    on_step: Callable[[Generation], None] | None = None,
) -> Measurement:
    """Decodes one prompt with the drafter and then, with `baseline`, without it.

    Args:
        on_step: called with the growing drafted answer.

    Raises:
        UserError: the prompt is empty or leaves no room for an answer.
    """
    drafted = _watched(pair, prompt.token_ids, params, True, on_step)
    return joined(pair, prompt, params, drafted, _watched(pair, prompt.token_ids, params, False) if baseline else None)


Watched = tuple[Generation, tuple[float, ...], float | None]  # answer, seconds between its steps, joules


def joined(
    pair: Pair, prompt: EncodedPrompt, params: SamplingParams, with_drafts: Watched, without: Watched | None
) -> Measurement:
    """Combines the answers of a prompt to a measurement. Raises UserError."""
    (drafted, gaps, used), (plain, plain_gaps, plain_used) = with_drafts, without or (None, (), None)
    difference = None
    if plain and pair.repeats_plain(params):
        difference = _difference(pair, prompt.token_ids, plain.tokens, drafted.tokens, params.temperature == 0.0)
    texts = text_of(pair.tokenizer, prompt.token_ids), tuple(token_texts(pair.tokenizer, drafted.tokens))
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
    """Wraps `on_step` to also append the current time to `times`."""

    def step(growing: Generation) -> None:
        times.append(time.perf_counter())
        if on_step:
            on_step(growing)

    return step


def gaps_of(times: Sequence[float]) -> tuple[float, ...]:
    """Returns the seconds from each time to the next."""
    return tuple(round(b - a, 6) for a, b in itertools.pairwise(times))


def _difference(
    pair: Pair, prompt_ids: list[int], plain: list[int], drafted: list[int], greedy: bool
) -> Difference | None:
    # the end of an answer depends on its tokens only, so of two different answers neither is a prefix of the other
    for position, (a, b) in enumerate(zip(plain, drafted, strict=False)):
        if a != b:
            regret = pair.regret(prompt_ids + plain[:position], b) if greedy else None
            return Difference(position, a, b, text_of(pair.tokenizer, [a]), text_of(pair.tokenizer, [b]), regret)
    return None


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """Returns the text of every token, also of special ones; a character of several tokens belongs to the last."""
    found, start, done = [], 0, 0
    for end in range(1, len(ids) + 1):
        text = text_of(tokenizer, ids[start:end])
        if text.endswith("\ufffd") and end < len(ids) and end - done < 4:  # bytes of a character
            found.append("")
            continue
        # decode with the token before: some tokenizers write a word differently at the start of a text
        found.append(text[len(text_of(tokenizer, ids[start:done])) :])
        start, done = done, end
    return found


def _offered_texts(tokenizer: Any, answer: Generation) -> dict[int, str]:
    """Returns the text of every token of a draft tree, decoded after the token where it was first offered."""
    found, at = dict[int, str](), 1
    for step in answer.steps:
        for place, offered in enumerate(step.offered):
            before = answer.tokens[at + place - 1]
            start = len(text_of(tokenizer, [before])) if any(token not in found for token, _ in offered) else 0
            for token, _ in offered:
                if token not in found:
                    found[token] = text_of(tokenizer, [before, token])[start:]
        at += len(step.tokens)
    return found


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """Returns the text of tokens, special ones included."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def held_out_acceptance(
    target: Target, drafter: Drafter, prompts: list[list[int]], params: SamplingParams | None = None
) -> Acceptance:
    """Decodes prompts of token ids by `decode.py` with the drafter and counts, for modules already in memory.

    Raises:
        UserError: a prompt does not fit.
    """
    answers = [generate(target, drafter, prompt, params) for prompt in prompts]
    return Acceptance.of(answers, drafter.config.block_size)
