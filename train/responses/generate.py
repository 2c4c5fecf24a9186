"""Lets a backend respond to all turns of chosen prompts and appends the responses to a file."""

import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from dflash_toolkit.config import UserError
from dflash_toolkit.evaluation.measure.decoders import Chat, Decoder, Response
from dflash_toolkit.files import append_lines
from dflash_toolkit.progress import Progress
from dflash_toolkit.sampling import SamplingParams

from ..distributed.parallel import Processes
from ..prompts.choosing import chosen
from .conversation import TOO_LONG, LiveConversation
from .file import lines_of

PACE_S = 60.0  # seconds of responses, after which their rate is known
SAID = ("target", "target_digest", "vocab_size", "template_hash", "sampler")  # fields of the record in every row
MANY_CUT = 0.2  # share of responses cut at the limit that calls for a warning
T = TypeVar("T", bound="Talk")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponsePlan:
    """Settings of the responses."""

    tokenizer: Any
    params: SamplingParams
    length: int  # prompt and response together
    thinking: bool | None
    seed: int = 0
    samples: int = 1  # responses to every prompt
    greedy_first: bool = False
    vocab_size: int = sys.maxsize
    strict: bool = False  # raise UserError at the first conversation without a row

    def conversations(
        self, prompts: Path, done: Collection[tuple[int, int]], rank: int, world: int
    ) -> Iterator[LiveConversation]:
        """Yields the conversations that are not done yet, of several processes this one's share.

        The first responses to all prompts come before the second ones, so that a batch is all greedy or all sampled:
        its steps then compute one way of choosing tokens.
        """
        todo = 0
        for sample in range(self.samples):
            for each in chosen(prompts):
                if (each.index, sample) in done:
                    continue
                todo += 1
                if todo % world != rank:
                    continue
                params = replace(self.params, seed=seed_of(self.seed, each.index, sample))
                if self.greedy_first and sample == 0:
                    params = replace(params, temperature=0.0)
                yield LiveConversation(
                    each.index, sample, each.conversation, self.tokenizer, params, self.length, self.thinking,
                    self.vocab_size,
                )  # fmt: skip


def seed_of(seed: int, index: int, sample: int = 0) -> int:
    """Returns the seed of one response, in 0..2^31 - 1; it does not depend on other responses."""
    return zlib.crc32(f"{seed}/{index}/{sample}".encode()) >> 1


class Talk(Protocol):
    """A conversation with a target: a request at a time, until it has ended."""

    @property
    def request(self) -> tuple[list[int], SamplingParams] | None: ...

    @property
    def chat(self) -> Chat: ...

    def on_response(self, answer: Response) -> None: ...


def submit_all(backend: Decoder, conversations: Iterable[T]) -> Iterator[T]:
    """Yields every conversation when it ends, as many at a time as the backend uses.

    Raises:
        UserError: as the backend.
    """
    waiting, running = enumerate(conversations), dict[int, T]()
    while True:
        while len(running) < backend.width and (found := next(waiting, None)):
            key, conversation = found
            if conversation.request is None:
                yield conversation
            else:
                running[key] = conversation
                backend.submit(key, *conversation.request, conversation.chat)
        if not running:
            return
        response = backend.wait()
        conversation = running[response.key]
        conversation.on_response(response)
        if conversation.request is None:
            yield running.pop(response.key)
        else:
            backend.submit(response.key, *conversation.request, conversation.chat)


@dataclass(slots=True)
class Tally:
    """Counts of the responses."""

    rows: int = 0
    tokens: int = 0  # in responses
    decoded: int = 0  # tokens decoded by this start of the command
    seconds: float = 0.0  # time that it took, without loading the target
    dropped: Counter[str] = field(default_factory=Counter)  # conversations without a row, by reason
    left_out: Counter[str] = field(default_factory=Counter)  # missing turns of the others, by reason
    cut: int = 0  # rows with a last response that reached the limit
    first: dict[str, str] = field(default_factory=dict)  # conversation that was dropped first for each reason

    def add(self, other: "Tally") -> None:
        self.rows, self.tokens = self.rows + other.rows, self.tokens + other.tokens
        self.decoded, self.seconds = self.decoded + other.decoded, max(self.seconds, other.seconds)
        self.dropped += other.dropped
        self.left_out += other.left_out
        self.cut += other.cut
        self.first = other.first | self.first

    @property
    def speed(self) -> dict[str, Any]:
        """Tokens per second of this start, for records."""
        rate = round(self.decoded / self.seconds, 1) if self.seconds else None
        return {"tokens": self.decoded, "seconds": round(self.seconds, 1), "tokens_per_second": rate}

    @property
    def speed_in_words(self) -> str:
        return f"{self.decoded} tokens in {self.seconds:.0f} s, {self.decoded / (self.seconds or 1):,.0f} tokens/s"

    def in_words(self, limit: str) -> str:
        """Returns the counts in words. Args: limit: the reason of `TOO_LONG`."""
        counted = {"dropped": self.dropped, "left out of others:": self.left_out}
        more = "".join(f"; {name} {reasons(of, limit, self.first)}" for name, of in counted.items() if of)
        cut = f", {self.cut} of {self.rows} cut at the limit" if self.cut else ""
        return f"{self.rows} responses, {self.tokens} tokens{cut}{more}"

    def warning(self, option: str) -> str | None:
        """Returns a warning if many responses are cut. Args: option: name of the limit."""
        if self.cut <= MANY_CUT * self.rows:
            return None
        return f"warning: {self.cut} of {self.rows} responses are cut at the limit; raise {option}"


def reasons(counts: Counter[str], limit: str, first: Mapping[str, str] | None = None) -> str:
    """Returns the counts by reason in words. Args: first: the first row of each reason."""

    def described(reason: str) -> str:
        found = f" (first: {first[reason]})" if first and reason in first else ""
        return f"{counts[reason]} {reason}" + (f" ({limit})" if TOO_LONG in reason else "") + found

    return ", ".join(map(described, sorted(counts)))


def limit_of(max_length: int, context: int) -> str:
    """Returns the limit that makes a prompt too long, in words."""
    if context < max_length:
        return f"the target's context is {context} tokens"
    return f"prompts.max_length is {max_length}"


def respond(
    backend: Decoder,
    plan: ResponsePlan,
    prompts: Path,
    output: Path,
    common: dict[str, Any],
    done: Collection[tuple[int, int]],
    total: int,
    rank: int = 0,
    world: int = 1,
    peers: Processes | None = None,
    on_pace: Callable[[float], Iterable[str]] | None = None,
) -> Tally:
    """Appends the missing responses to `output`, each when it is finished.

    Args:
        prompts: a file of `choose`.
        common: fields that every row repeats.
        total: total number of responses, with those that are done.
        peers: processes that decode together; the first of them writes.
        on_pace: called once with the tokens/s of all processes, after `PACE_S` seconds; returns lines to print.

    Raises:
        UserError: the disk is full, or as the backend.
    """
    tally, peers, began = Tally(), peers or Processes(), time.perf_counter()
    with Progress("responses", total, unit="tok") as progress:
        progress.advance(len(done), units=0)
        for conversation in submit_all(backend, plan.conversations(prompts, done, rank, world)):
            if conversation.dropped:
                if plan.strict:
                    why = "prompts.strict=false skips such rows"
                    raise UserError(f"{conversation.id}: {conversation.dropped}; {why}")
                tally.first.setdefault(conversation.dropped, conversation.id)
                tally.dropped[conversation.dropped] += 1
            tally.left_out.update(conversation.left_out)
            if conversation.parts:
                peers.rank_zero(append_lines, output, lines_of(conversation, common))
            tally.rows += len(conversation.parts)
            tally.cut += sum(part.finish_reason == "length" for part in conversation.parts)
            tally.tokens += sum(part.row.response_tokens for part in conversation.parts)
            note = f"{tally.dropped.total()} dropped" if tally.dropped else None
            progress.advance(world, world * conversation.response_tokens, note)  # others are about as far
            tally.decoded += conversation.response_tokens
            tally.seconds = time.perf_counter() - began
            if on_pace and tally.seconds >= PACE_S:
                for line in on_pace(world * tally.decoded / tally.seconds):
                    progress.print(line)
                on_pace = None
    return tally
