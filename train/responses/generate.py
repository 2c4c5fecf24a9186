"""Chosen prompts answered by a backend, all turns of each, into an answers file: for dflash-data and dflash-train."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash_toolkit.progress import Progress
from dflash_toolkit.sampling import SamplingParams

from ..prompts.choosing import chosen
from .backends import Backend
from .conversation import TOO_LONG, ChatDialogue
from .file import lines_of
from .rows import append, converse, seed_of

SAID = ("target", "target_digest", "vocab_size", "template_hash", "sampler")  # of a run's record, in each of its rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Asking:
    """How prompts are answered."""

    tokenizer: Any
    params: SamplingParams
    length: int  # of prompt and answers together
    thinking: bool | None
    seed: int = 0
    samples: int = 1  # answers to every prompt
    greedy_first: bool = False

    def dialogues(
        self, prompts: Path, done: Collection[tuple[int, int]], rank: int, world: int
    ) -> Iterator[ChatDialogue]:
        """What is not done yet; of several processes each gets its share."""
        todo = 0
        for each in chosen(prompts):
            for sample in range(self.samples):
                if (each.index, sample) in done:
                    continue
                todo += 1
                if todo % world != rank:
                    continue
                params = replace(self.params, seed=seed_of(self.seed, each.index, sample))
                if self.greedy_first and sample == 0:
                    params = replace(params, temperature=0.0)
                yield ChatDialogue(
                    each.index, sample, each.conversation, self.tokenizer, params, self.length, self.thinking
                )


@dataclass(slots=True)
class Tally:
    """What came of it."""

    rows: int = 0
    tokens: int = 0  # of answers
    dropped: Counter[str] = field(default_factory=Counter)  # conversations without a row, by reason
    left_out: Counter[str] = field(default_factory=Counter)  # of those that have one

    def add(self, other: "Tally") -> None:
        self.rows, self.tokens = self.rows + other.rows, self.tokens + other.tokens
        self.dropped += other.dropped
        self.left_out += other.left_out

    def in_words(self, limit: str) -> str:
        """For people. Args: limit: what `TOO_LONG` means."""
        counted = {"dropped": self.dropped, "left out of others:": self.left_out}
        more = "".join(f"; {name} {reasons(of, limit)}" for name, of in counted.items() if of)
        return f"{self.rows} answers, {self.tokens} tokens{more}"


def reasons(counts: Counter[str], limit: str) -> str:
    """Counts by reason in words."""
    said = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
    return f"{said} ({limit})" if any(TOO_LONG in reason for reason in counts) else said


def limit_of(max_length: int, context: int) -> str:
    """Which limit makes a prompt too long."""
    if context < max_length:
        return f"the target's context is {context} tokens"
    return f"prompts.max_length is {max_length}"


def answer(
    backend: Backend,
    asking: Asking,
    prompts: Path,
    output: Path,
    common: dict[str, Any],
    done: Collection[tuple[int, int]],
    total: int,
    rank: int = 0,
    world: int = 1,
) -> Tally:
    """Append the answers that are not done yet to `output`, each when it is finished.

    Args:
        prompts: what `choose` left.
        common: what every row says of the run.
        total: answers to come in all, with those that are done.

    Raises:
        UserError: the disk is full, and whatever the backend raises.
    """
    tally = Tally()
    with Progress("answers", total, unit="tok") as progress:
        progress.advance(len(done), units=0)
        for dialogue in converse(backend, asking.dialogues(prompts, done, rank, world)):
            if dialogue.dropped:
                tally.dropped[dialogue.dropped] += 1
            tally.left_out.update(dialogue.left_out)
            if dialogue.parts:
                append(output, lines_of(dialogue, common))
            tally.rows += len(dialogue.parts)
            tally.tokens += sum(part.row.answer_tokens for part in dialogue.parts)
            note = f"{tally.dropped.total()} dropped" if tally.dropped else None
            progress.advance(1, dialogue.answer_tokens, note)
    return tally
