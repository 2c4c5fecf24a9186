"""Options of prompts and responses, for `dflash-train` and `dflash-data`."""

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_toolkit.config import Options, option
from dflash_toolkit.options import PromptOptions, SamplingOptions
from dflash_toolkit.sampling import COLDEST, HOTTEST

RUNTIMES = ("auto", "engine", "reference")
BATCH_SIZE = "prompts answered at a time (default: as many as the GPU's memory holds, at most 256; 32 on a CPU)"
GREEDY_FIRST = "make the first of several responses greedy, at any temperature"
PACKS = 128  # tokens of packs and joined rows are multiples of this
OWN = "self:"  # prefix of a source: the target writes the prompts itself


def own_count(name: str) -> int | None:
    """Returns N of a source `self:N`; None for any other source."""
    number = name.removeprefix(OWN)
    return int(number) if number != name and number.isdecimal() else None


def count_in(names: Sequence[str]) -> int:
    """Returns N of the source `self:N`, 0 without one. Raises ValueError for more than one, or for N = 0."""
    found = [count for name in names if (count := own_count(name)) is not None]
    if len(found) > 1 or 0 in found:
        raise ValueError(f"data has {len(found)} sources {OWN}N; give one, with N >= 1")
    return sum(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions(PromptOptions):
    """The prompts that are read, and how many of them are used."""

    dataset: str = option(
        "mlabonne/open-perfectblend", "public instruction dataset that is read if --data is not given", metavar="SOURCE"
    )
    max_prompts: int = option(
        100_000, "number of prompts sampled from all sources; 0 uses all", common=True, within=">= 0"
    )
    held_out: int = option(64, "number of prompts kept out of training, to measure acceptance on", within=">= 0")
    join_to: int | None = option(
        None,
        "join prompts with their responses to training rows of up to this many tokens, for long contexts; a multiple "
        "of 128 (default: each is a row)",
    )

    def __post_init__(self) -> None:
        PromptOptions.__post_init__(self)
        if self.join_to is not None and (self.join_to < self.max_length or self.join_to % PACKS):
            raise ValueError(
                f"join_to is {self.join_to}; it must be a multiple of {PACKS}, at least max_length ({self.max_length})"
            )

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest training row."""
        return self.join_to or self.max_length


@dataclass(frozen=True, kw_only=True, slots=True)
class SynthesisOptions(Options):
    """How the target writes prompts itself (--data self:N)."""

    topics: str | None = option(
        None,
        "file with a topic on each line; prompts are about these, through the system message (default: system messages "
        "for mathematics, code, writing, advice and other fields)",
        metavar="PATH",
        flag="topics",
    )
    turns: int = option(1, "most user turns of a conversation; the target answers between them", within=">= 1")
    script: str | None = option(
        None, "keep only prompts in this script, as Unicode names it: latin, cyrillic, cjk, ... (default: any)"
    )
    temperature: float = option(1.0, "temperature of prompts", within=f"in [{COLDEST}, {HOTTEST}]")
    max_tokens: int = option(512, "longest prompt, in tokens; longer ones are skipped", within=">= 8")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplesOptions(SamplingOptions):
    """How the target samples its responses, of which a prompt may have several.

    Two responses, one of them sampled, teach more than twice as many epochs over one (docs/benchmarks.md, "Settings").
    """

    samples: int = option(2, "number of responses to every prompt, each with its own seed", common=True, within=">= 1")
    greedy_first: bool = option(True, GREEDY_FIRST)
    temperature: float = option(1.0, "temperature of sampled responses; 0 is greedy")

    def __post_init__(self) -> None:
        SamplingOptions.__post_init__(self)
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be >= 2")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples is {self.samples}, but responses at temperature 0 are all the same; set samples to 1, or "
                "raise the temperature"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseOptions(SamplesOptions):
    """How the target responds to the prompts. A drafter must be trained on the target's own responses."""

    regenerate: bool = option(
        True,
        "let the target write the responses; off trains on those in the data, which this target must have written",
    )
    runtime: str = option(
        "auto", "runtime that writes the responses; auto is the engine if it supports the target", choices=RUNTIMES
    )
    batch_size: int | None = option(None, BATCH_SIZE, within=">= 1")
    draft: bool = option(True, "write responses faster with the drafter of --init-from; the responses stay the same")
