"""dflash-data: prompts -> the target's own responses, one JSON line each, for `dflash-train --responses`.

Next to FILE.jsonl (`responses/file.py` describes its rows) it writes FILE.prompts.jsonl, the chosen prompts, and
FILE.run.json, the options. `data_run.py` does the work and imports torch; this file does not.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_toolkit.command_line import parse_cli, run_command
from dflash_toolkit.config import Options, UserError, option, options
from dflash_toolkit.options import PromptOptions, TemplateOptions

from .data_options import BATCH_SIZE, OWN, RUNTIMES, SamplesOptions, SynthesisOptions, count_in
from .distributed.launch import launch
from .distributed.ranks import speaks, without_local_rank

PROG = "dflash-data"
DESCRIPTION = """\
Writes the target's responses to prompts into a JSONL file, for dflash-train --responses. You can stop it at any time;
run the same command again to resume."""
EXAMPLE = "dflash-data --target Qwen/Qwen3-8B --data mlabonne/open-perfectblend --output responses.jsonl"
APIS = ("auto", "completions", "chat")
WEEK_S = 7 * 24 * 3600  # a socket's timeout cannot exceed 24 days
MOST_THREADS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPromptOptions(PromptOptions):
    """The prompts to read."""

    shuffle: int = option(
        10_000,
        "size of the shuffle buffer for rows of datasets; 0 keeps their order, and files always keep theirs",
        within=">= 0",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerOptions(SamplesOptions):
    """How the target samples its responses."""

    seed: int = option(0, "seed of responses and of the order of datasets")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions(Options):
    """Settings of requests to the servers of --endpoint."""

    model: str | None = option(None, "name of the target on the server (default: the only model it has)")
    api: str = option(
        "auto", "API of the server; auto is completions, or chat where completions are refused or missing", choices=APIS
    )
    timeout: float = option(600.0, "seconds to wait for one response", within=f"in (0, {WEEK_S}]")
    retries: int = option(
        6, "retries of a request after a temporary error, with pauses of 1, 2, 4, ... seconds", within="in 0..1000"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(TemplateOptions):
    """One run of `dflash-data`."""

    data: tuple[str, ...] = option(
        (),
        help="sources of prompts: JSONL, JSON, Parquet or text files, or datasets as DATASET[:SUBSET]; SOURCE[a:b] "
        "takes rows a to b-1, and gsm8k=SOURCE uses that benchmark's prompt template (required, unless "
        "--synthesize-prompts is given)",
        common=True,
        metavar="SOURCE",
    )
    synthesize_prompts: int = option(
        0,
        "number of prompts that the target writes itself, in addition to those of --data; 0 writes none",
        common=True,
        within=">= 0",
    )
    output: str = option(
        help="file for the responses, FILE.jsonl; responses that it already has are kept", common=True, metavar="PATH"
    )
    endpoint: tuple[str, ...] = option(
        (),
        "OpenAI-compatible servers of the target that write the responses (default: load the target here)",
        common=True,
        metavar="URL",
    )
    runtime: str = option(
        "auto",
        "runtime that writes the responses; auto is the engine if it supports the target, vllm must be installed",
        choices=(*RUNTIMES, "vllm"),
    )
    gpus: int = option(
        1, "GPUs of this machine that share the prompts, each with the whole target; with --runtime vllm they share "
        "the target", common=True
    )  # fmt: skip
    drafter: str | None = option(
        None, "drafter that speeds up the engine; responses stay the same (default: none)", metavar="PATH"
    )
    batch_size: int | None = option(
        None, BATCH_SIZE.replace("32 on", "64 with --endpoint, 32 on"), common=True, within=">= 1"
    )
    prompts: DataPromptOptions = options(DataPromptOptions)
    synthesis: SynthesisOptions = options(SynthesisOptions)
    sampler: SamplerOptions = options(SamplerOptions, flat=True)
    server: ServerOptions = options(ServerOptions)

    def __post_init__(self) -> None:
        TemplateOptions.__post_init__(self)
        if self.prompt_format == "text" and self.server.api == "chat":
            raise ValueError("prompt_format is text, which the chat API cannot complete; remove server.api")
        if not self.sources:
            raise ValueError("data is empty; give at least one source, or --synthesize-prompts N")
        if count_in(self.sources) and self.endpoint:
            raise ValueError("endpoint excludes synthesize_prompts: servers do not continue a user's turn")
        if count_in(self.sources) and self.prompt_format == "text":
            raise ValueError("prompt_format text excludes synthesize_prompts, which needs a chat template")
        if self.endpoint and (self.batch_size or 0) > MOST_THREADS:
            raise ValueError(
                f"batch_size is {self.batch_size}; with endpoint each response needs a thread, so it must be <= "
                f"{MOST_THREADS}"
            )
        sampler = self.sampler
        if (
            sampler.samples == 1
            and sampler.greedy_first
            and sampler.temperature not in (0.0, SamplesOptions().temperature)
        ):
            raise ValueError(
                f"temperature is {sampler.temperature}, but the only response to a prompt is greedy; "
                "give --no-greedy-first or more samples"
            )
        if Path(self.output).suffix != ".jsonl":
            raise ValueError(f"output {self.output!r} must end in .jsonl")
        if self.endpoint and (self.drafter or self.runtime != "auto"):
            raise ValueError("endpoint excludes drafter and runtime; the server decides about both")
        if self.runtime == "reference" and self.drafter:
            raise ValueError("runtime reference excludes drafter; it decodes without one")
        if self.runtime == "vllm" and self.drafter:
            raise ValueError("runtime vllm excludes drafter; start 'vllm serve' with it and give --endpoint")
        if self.gpus < 1 or (self.gpus > 1 and self.endpoint):
            raise ValueError(f"gpus is {self.gpus}; it must be >= 1, and 1 with endpoint")

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of prompts, with `self:N` for prompts that the target writes."""
        return (*([f"{OWN}{self.synthesize_prompts}"] if self.synthesize_prompts else []), *self.data)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Exit codes: 0 done, 2 an error (one line), 130 interrupted (run again to resume)."""

    def command() -> int | None:
        try:
            words = without_local_rank(sys.argv[1:] if argv is None else list(argv))
            config = parse_cli(DataConfig, words, PROG, DESCRIPTION, EXAMPLE)
            if config.gpus > 1 and config.runtime != "vllm" and "WORLD_SIZE" not in os.environ:
                return launch("dflash_toolkit.train.data_cli", words, config.gpus)
            from .data_run import run

            run(config)
        except UserError:
            if not speaks():
                raise SystemExit(2) from None
            raise
        return None

    return run_command(command)


if __name__ == "__main__":
    raise SystemExit(main())
