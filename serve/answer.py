"""One answer in the making: the text that may be sent, why it ended, and what it cost."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from dflash_toolkit.generation import FinishReason, PromptLogprobs
from dflash_toolkit.runtime import Progress

from .logprobs import AnswerToken, Echo, TokenQueue, TokenStrings
from .parsing import Delta, OutputParser
from .parsing.output import THINK_END
from .text import Detokenizer, StopScanner

MARK_TOKENS = 16  # at most, that the end of the reasoning is written in


@dataclass(frozen=True, slots=True)
class StepText:
    """What one step brought, for those who show the drafter at work."""

    drafted: int
    accepted: int
    tokens: int
    text: tuple[str, str]  # of the accepted drafts, and of the target's own token behind them


@dataclass(frozen=True, slots=True)
class Piece:
    """What may be sent at once."""

    text: str
    tokens: tuple[AnswerToken, ...] = ()  # those whose text starts here, if log-probabilities were asked for
    deltas: tuple[Delta, ...] | None = None  # what the text is, if it is parsed
    steps: tuple[StepText, ...] = ()  # where the text is from, if that was asked for
    echo: Echo | None = None  # the prompt that the text begins with
    ids: tuple[int, ...] = ()  # the tokens, whether or not their text may be sent, if they were asked for

    @classmethod
    def joined(cls, pieces: Sequence["Piece"]) -> "Piece":
        """Pieces of one answer as one."""
        tokens = tuple(token for piece in pieces for token in piece.tokens)
        deltas = tuple(delta for piece in pieces for delta in piece.deltas or ())
        parsed = any(piece.deltas is not None for piece in pieces)
        steps = tuple(step for piece in pieces for step in piece.steps)
        echo = next((piece.echo for piece in pieces if piece.echo is not None), None)
        ids = tuple(token for piece in pieces for token in piece.ids)
        return cls("".join(piece.text for piece in pieces), tokens, deltas if parsed else None, steps, echo, ids)

    def __bool__(self) -> bool:
        """Whether there is anything to send."""
        more = self.tokens or self.steps or self.echo or self.ids
        return bool(more or (self.text if self.deltas is None else self.deltas))


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What a request asks of the text of its answers."""

    stops: Sequence[str] = ()  # strings that end it
    stop_ids: Collection[int] = ()  # tokens that it asks to end it
    include_stop: bool = False  # the text ends with what ended it, a stop string or token
    least: int = 0  # tokens that it has before a stop string can end it
    before: Sequence[int] = ()  # tokens that the text goes on behind
    shown: Collection[str] = ()  # special tokens whose text is returned like others'
    strings: TokenStrings | None = None  # of a request for log-probabilities; the progress must then hold them
    ids: bool = False  # pieces have their tokens
    follow: bool = False  # pieces say where their text is from
    trace: bool = False  # what became of each draft is kept
    prompt_alone: bool = False  # the answer is left out


class Answer:
    """Turns an engine's progress into text.

    The result does not depend on how many tokens a step brought: a drafter changes the statistics, never the text,
    the finish reason or the number of tokens.

    Args:
        parser: of the text, which ends before a stop string.
        echo: the prompt, if the text begins with it; the token that ends the answer then is one of those reported.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_tokens: int,
        asked: AnswerOptions,
        parser: OutputParser | None = None,
        echo: Echo | None = None,
    ) -> None:
        self._asked = asked
        self._echo, self._echoed = echo, False
        self.prompt_logprobs: PromptLogprobs | None = None
        self.prompt_tokens = prompt_tokens
        self.tokens: list[int] = []  # up to the one that ended the answer, included
        self.verify_steps = self.drafted = self.accepted = 0
        self.cached_tokens = 0  # of the prompt
        self.reasoning_tokens = 0  # up to the mark that ends the reasoning, included
        self.drafts: list[tuple[int, int]] = []  # tokens proposed and taken, if that is kept
        self.finish_reason: FinishReason | None = None
        self.committed = 0  # by verify steps; tokens after a stop string in the last step count here only
        self._tokenizer, self._detokenizer = tokenizer, Detokenizer(tokenizer, asked.before, asked.shown)
        self._parser = parser
        self._scanner = StopScanner(asked.stops, asked.include_stop)
        self._queue = TokenQueue(asked.strings) if asked.strings else None

    @property
    def reason(self) -> str | None:
        """`finish_reason` as clients know it; an answer that was cut says so though it has tool calls."""
        called = self._parser is not None and self._parser.called
        return "tool_calls" if called and self.finish_reason == "stop" else self.finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """What of the request ended it: a stop string or a stop token. As vLLM has it."""
        if self.finish_reason != "stop" or self._scanner.stopped:
            return self._scanner.found
        return self.tokens[-1] if self.tokens[-1] in self._asked.stop_ids else None

    def add(self, progress: Progress) -> Piece:
        """What may be sent now; sets `finish_reason` when it is the last."""
        if progress.prompt_logprobs is not None:
            self.prompt_logprobs = progress.prompt_logprobs
        if self._asked.prompt_alone:
            progress = Progress((), None, "length")
        before = len(self.tokens)
        piece = self._followed(progress) if self._asked.follow else self._add(progress)
        if self._asked.ids:
            piece = replace(piece, ids=tuple(self.tokens[before:]))
        if self._echo is not None and not self._echoed:
            self._echoed = True
            echo = replace(self._echo, logprobs=self.prompt_logprobs)
            piece = replace(piece, text=echo.text + piece.text, echo=echo)
        if self._parser is None:
            return piece
        thinking = self._parser.thinking
        deltas = self._parser.feed(piece.text)
        if self.finish_reason is not None:
            deltas += self._parser.finish()
        if self._parser.thinking or thinking or any(delta.reasoning for delta in deltas):
            self.reasoning_tokens = len(self.tokens) if self._parser.thinking else self._thought()
        return replace(piece, deltas=tuple(deltas))

    def _thought(self) -> int:
        """Tokens up to the mark that has just ended the reasoning; all, where it was cut."""
        first = max(self.reasoning_tokens - MARK_TOKENS, 0)
        for end in range(self.reasoning_tokens + 1, len(self.tokens)):
            if THINK_END in self._tokenizer.decode(self.tokens[first:end], skip_special_tokens=False):
                return end
        return len(self.tokens)

    def _followed(self, progress: Progress) -> Piece:
        """Its text in two parts: of what the drafter proposed, and of the target's own token."""
        step, tokens = progress.step, progress.tokens
        taken = min(step.accepted, len(tokens) - 1) if step else 0  # with a stop token the target has the last word
        parts = [Piece("")]
        if taken:
            parts = [self._add(Progress(tokens[:taken], step, None, progress.logprobs[:taken]))]
        if self.finish_reason is None:
            rest = replace(progress, tokens=tokens[taken:], logprobs=progress.logprobs[taken:])
            parts.append(self._add(replace(rest, step=None) if taken else rest))
        piece = Piece.joined(parts)
        texts = (parts[0].text, parts[-1].text if len(parts) > 1 else "")
        drafted, accepted = (step.drafted, step.accepted) if step else (0, 0)
        return replace(piece, steps=(StepText(drafted, accepted, len(tokens), texts),))

    def _add(self, progress: Progress) -> Piece:
        self.cached_tokens = max(self.cached_tokens, progress.cached_tokens)
        if progress.step is not None:
            self.verify_steps += 1
            self.drafted += progress.step.drafted
            self.accepted += progress.step.accepted
            self.committed += len(progress.step.tokens)
            if self._asked.trace and progress.step.drafted:
                self.drafts.append((progress.step.drafted, progress.step.accepted))

        text = ""
        silent = progress.finish_reason == "stop" and not self._asked.include_stop
        visible = progress.tokens[:-1] if silent else progress.tokens
        single = visible  # one by one, where it matters which of them completed a stop string, or carries which text
        if self._queue is None and not self._scanner.stops:
            self.tokens += visible
            text, single = self._detokenizer.add(visible), ()
        for token, logprobs in zip_longest(single, progress.logprobs[: len(single)]):
            self.tokens.append(token)
            if self._queue is not None:
                self._queue.add(token, logprobs)
            text += self._scan(self._detokenizer.add([token]))
            if self._scanner.stopped:
                self.finish_reason = "stop"
                return self._piece(text)
        if progress.finish_reason is not None:
            self.tokens += progress.tokens[len(visible) :]
            text += self._scan(self._detokenizer.finish())
            text += self._scanner.finish()
            if self._queue is not None and self._echo is not None and len(visible) < len(progress.tokens):
                self._queue.add(progress.tokens[-1], progress.logprobs[-1])
            self.finish_reason = "stop" if self._scanner.stopped else progress.finish_reason
        return self._piece(text)

    def _scan(self, text: str) -> str:
        if self._queue is not None:
            self._queue.completed(text, self._detokenizer.waiting)
        return self._scanner.add(text, len(self.tokens) <= self._asked.least)

    def _piece(self, text: str) -> Piece:
        if self._queue is None:
            return Piece(text)
        tokens = self._queue.carried_by(text)
        if self.finish_reason is not None and not self._scanner.stopped:
            tokens += self._queue.rest()
        return Piece(text, tokens)

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens)


def usage(answers: Sequence[Answer], of_a_prompt: int) -> dict[str, Any]:
    """OpenAI's `usage` of a request, with the acceptance statistics under `dflash`.

    Args:
        of_a_prompt: answers to each prompt, which follow each other; its tokens count once.
    """
    prompt_tokens = sum(answer.prompt_tokens for answer in answers[::of_a_prompt])
    completion_tokens = sum(answer.completion_tokens for answer in answers)
    verify_steps = sum(answer.verify_steps for answer in answers)
    committed = sum(answer.committed for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for answer in answers[::of_a_prompt])},
        "completion_tokens_details": {"reasoning_tokens": sum(answer.reasoning_tokens for answer in answers)},
        "dflash": {
            "verify_steps": verify_steps,
            "drafted": sum(answer.drafted for answer in answers),
            "accepted": sum(answer.accepted for answer in answers),
            # committed tokens per verify step, bonus included; none before the first step
            "acceptance_length": committed / verify_steps if verify_steps else None,
        },
    }


def speculative_decoding(answer: Answer, longest: int, detailed: bool) -> dict[str, Any]:
    """vLLM's `metrics.speculative_decoding` of an answer whose drafts were kept.

    Args:
        longest: tokens that a draft can have.
        detailed: with every draft by itself.
    """
    proposed, taken = [drafted for drafted, _ in answer.drafts], [accepted for _, accepted in answer.drafts]
    found: dict[str, Any] = {
        "mean_acceptance_length": 1.0 + (sum(taken) / len(taken) if taken else 0.0),
        "draft_acceptance_rate": sum(taken) / sum(proposed) if proposed else 0.0,
        "acceptance_histogram": [taken.count(accepted) for accepted in range(longest + 1)],
        "num_spec_steps": len(taken),
        "num_accepted_draft_tokens": sum(taken),
        "num_draft_tokens": sum(proposed),
        "num_spec_tokens": longest,
    }
    return found | ({"per_step_accepted": taken, "per_step_drafted": proposed} if detailed else {})
