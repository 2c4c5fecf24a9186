"""Turns the engine's progress into an answer: the text that may be sent, the finish reason and the usage."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from dflash_toolkit.generation import FinishReason, PromptLogprobs
from dflash_toolkit.runtime import Progress

from .logprobs import AnswerToken, Echo, TokenQueue, TokenStrings
from .parsing import Delta, OutputParser
from .text import Detokenizer, StopScanner

MARK_TOKENS = 16  # most tokens of the mark that ends the reasoning


@dataclass(frozen=True, slots=True)
class StepText:
    """Describes one step, for clients that show which text was drafted."""

    drafted: int
    accepted: int
    tokens: int
    text: tuple[str, str]  # text of the accepted drafts, and of the target's own token after them


@dataclass(frozen=True, slots=True)
class Piece:
    """Holds a part of an answer that can be sent."""

    text: str
    tokens: tuple[AnswerToken, ...] = ()  # tokens with text that starts here, if log-probabilities were requested
    deltas: tuple[Delta, ...] | None = None  # the parsed text; None: it is not parsed
    steps: tuple[StepText, ...] = ()  # the steps that made the text, if they were requested
    echo: Echo | None = None  # the prompt that the text begins with
    ids: tuple[int, ...] = ()  # the tokens, even if their text is still held back, if they were requested

    @classmethod
    def joined(cls, pieces: Sequence["Piece"]) -> "Piece":
        """Joins pieces of one answer."""
        tokens = tuple(token for piece in pieces for token in piece.tokens)
        deltas = tuple(delta for piece in pieces for delta in piece.deltas or ())
        parsed = any(piece.deltas is not None for piece in pieces)
        steps = tuple(step for piece in pieces for step in piece.steps)
        echo = next((piece.echo for piece in pieces if piece.echo is not None), None)
        ids = tuple(token for piece in pieces for token in piece.ids)
        return cls("".join(piece.text for piece in pieces), tokens, deltas if parsed else None, steps, echo, ids)

    def __bool__(self) -> bool:
        """Returns whether there is anything to send."""
        more = self.tokens or self.steps or self.echo or self.ids
        return bool(more or (self.text if self.deltas is None else self.deltas))


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Options of a request that concern the text of its answers."""

    stops: Sequence[str] = ()  # strings that end an answer
    stop_ids: Collection[int] = ()  # the request's own stop tokens
    include_stop: bool = False  # include the stop string or token in the text
    least: int = 0  # tokens before a stop string can end the answer
    before: Sequence[int] = ()  # tokens that the text continues
    shown: Collection[str] = ()  # special tokens with text that is returned
    strings: TokenStrings | None = None  # set if log-probabilities are requested; the progress must then hold them
    ids: bool = False  # pieces carry their tokens
    follow: bool = False  # pieces carry their steps
    trace: bool = False  # keep the drafted and accepted tokens of each step
    prompt_alone: bool = False  # return no answer, only the prompt


class Answer:
    """Turns an engine's progress into text.

    The result does not depend on how many tokens a step adds: a drafter changes the statistics, never the text,
    the finish reason or the number of tokens.

    Args:
        parser: parses the text, which ends before a stop string.
        echo: the prompt, if the text begins with it; the token that ends the answer is then reported too.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_tokens: int,
        options: AnswerOptions,
        parser: OutputParser | None = None,
        echo: Echo | None = None,
    ) -> None:
        self._options = options
        self._echo, self._echoed = echo, False
        self.prompt_logprobs: PromptLogprobs | None = None
        self.prompt_tokens = prompt_tokens
        self.tokens: list[int] = []  # includes the token that ended the answer
        self.verify_steps = self.drafted = self.accepted = 0
        self.cached_tokens = 0  # in the prompt
        self.reasoning_tokens = 0  # includes the mark that ends the reasoning
        self.drafts: list[tuple[int, int]] = []  # drafted and accepted tokens of each step, with `trace`
        self.versions = 0, 0  # target and drafter
        self.finish_reason: FinishReason | None = None
        self.committed = 0  # by verify steps; tokens after a stop string in the last step count here only
        self._tokenizer, self._detokenizer = tokenizer, Detokenizer(tokenizer, options.before, options.shown)
        self._parser = parser
        self._scanner = StopScanner(options.stops, options.include_stop)
        self._queue = TokenQueue(options.strings) if options.strings else None

    @property
    def reason(self) -> str | None:
        """Returns OpenAI's `finish_reason`: "length" for an answer that was cut, even if it has tool calls."""
        called = self._parser is not None and self._parser.called
        return "tool_calls" if called and self.finish_reason == "stop" else self.finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """Returns vLLM's `stop_reason`: the request's stop string or stop token that ended the answer."""
        if self.finish_reason != "stop" or self._scanner.stopped:
            return self._scanner.found
        return self.tokens[-1] if self.tokens[-1] in self._options.stop_ids else None

    def add(self, progress: Progress) -> Piece:
        """Returns the text that can be sent now; sets `finish_reason` with the last piece."""
        if progress.prompt_logprobs is not None:
            self.prompt_logprobs = progress.prompt_logprobs
        self.versions = progress.versions
        if self._options.prompt_alone:
            progress = Progress((), None, "length")
        before = len(self.tokens)
        piece = self._with_steps(progress) if self._options.follow else self._add(progress)
        if self._options.ids:
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
            deltas += self._parser.finish(cut=self.finish_reason != "stop" or self._scanner.stopped)
        if self._parser.thinking or thinking or any(delta.reasoning for delta in deltas):
            end = self._parser.reasoning_end
            self.reasoning_tokens = len(self.tokens) if self._parser.thinking else self._count_reasoning(end)
        return replace(piece, deltas=tuple(deltas))

    def _count_reasoning(self, mark: str) -> int:
        """Counts the tokens up to the end mark of the reasoning; counts all tokens if the mark is missing."""
        first = max(self.reasoning_tokens - MARK_TOKENS, 0)
        for end in range(self.reasoning_tokens + 1, len(self.tokens)):
            if mark in self._tokenizer.decode(self.tokens[first:end], skip_special_tokens=False):
                return end
        return len(self.tokens)

    def _with_steps(self, progress: Progress) -> Piece:
        """Splits the text into that of the drafter's tokens and that of the target's own token."""
        step, tokens = progress.step, progress.tokens
        taken = min(step.accepted, len(tokens) - 1) if step else 0  # a stop token is the target's own
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
            if self._options.trace and progress.step.drafted:
                self.drafts.append((progress.step.drafted, progress.step.accepted))

        text = ""
        silent = progress.finish_reason == "stop" and not self._options.include_stop
        visible = progress.tokens[:-1] if silent else progress.tokens
        single = visible  # one at a time where it matters which token completed a stop string or carries which text
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
        return self._scanner.add(text, len(self.tokens) <= self._options.least)

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


def usage(answers: Sequence[Answer], answers_per_prompt: int) -> dict[str, Any]:
    """Returns OpenAI's `usage` of a request, with the acceptance statistics under `dflash`.

    Args:
        answers: grouped by prompt; the tokens of a prompt count once.
    """
    prompt_tokens = sum(answer.prompt_tokens for answer in answers[::answers_per_prompt])
    completion_tokens = sum(answer.completion_tokens for answer in answers)
    verify_steps = sum(answer.verify_steps for answer in answers)
    committed = sum(answer.committed for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(answer.cached_tokens for answer in answers[::answers_per_prompt])
        },
        "completion_tokens_details": {"reasoning_tokens": sum(answer.reasoning_tokens for answer in answers)},
        "dflash": {
            "verify_steps": verify_steps,
            "drafted": sum(answer.drafted for answer in answers),
            "accepted": sum(answer.accepted for answer in answers),
            # committed tokens per verify step, bonus included; None before the first step
            "acceptance_length": committed / verify_steps if verify_steps else None,
            # how often the weights were replaced before the answer's last step
            "target_version": max(answer.versions[0] for answer in answers),
            "drafter_version": max(answer.versions[1] for answer in answers),
        },
    }


def speculative_decoding(answer: Answer, longest: int, detailed: bool) -> dict[str, Any]:
    """Returns vLLM's `metrics.speculative_decoding` of an answer with `trace`.

    Args:
        longest: most tokens of a draft.
        detailed: also list every draft.
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
