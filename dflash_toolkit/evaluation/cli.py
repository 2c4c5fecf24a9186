"""dflash-eval: the acceptance report that people decide from."""

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..checkpoint.readahead import read_ahead
from ..config import UnsupportedModel, UserError, option, options, parse_cli, run_command, to_mapping
from ..data.prompts import Prompt, encode_chat, tell_of_thinking
from ..files import locked
from ..options import DraftOptions, ModelOptions, PromptSetOptions, SamplingOptions
from ..sampling import DraftSampleMethod
from ..threads import use_threads

if TYPE_CHECKING:
    from .decoders import Pair

PROG = "dflash-eval"
DESCRIPTION = """\
Decode prompts with a drafter and without one, and report how many drafted tokens the target accepts, how much
faster that is, and whether every answer is the plain one. Writes report.json, report.md and report.html. An
interrupted run continues where it was when the same command runs again.

dflash-eval check REPORT says whether a report keeps limits; it has a --help of its own."""
COMMANDS = ("check",)  # first words; each has a module of its name


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSampling(SamplingOptions):
    """How answers are decoded."""

    max_tokens: int = option(512, "longest answer, in tokens")
    seed: int = option(0, "of sampling; the same for every prompt")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalDrafts(DraftOptions):
    """How the drafter is used: whole blocks at every step."""

    num_speculative_tokens: int | None = option(None, "tokens drafted a step (default: as the drafter was trained)")

    def __post_init__(self) -> None:
        if self.num_speculative_tokens is not None and self.num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens is {self.num_speculative_tokens}; it must be >= 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig(ModelOptions):
    """The options of `dflash-eval`."""

    drafter: str = option(help="the drafter: Hugging Face id or directory")
    sets: PromptSetOptions = options(PromptSetOptions, flat=True)
    output: str = option("report", "directory for the report")
    runtime: str = option(
        "auto",
        "engine: what dflash-serve runs; reference: Hugging Face modules, slow; auto: the engine where it computes the "
        "target",
        ("auto", "engine", "reference"),
    )
    baseline: bool = option(True, "also decode without the drafter: gives speed-up and identity")
    sampling: EvalSampling = options(EvalSampling, flat=True)
    draft: EvalDrafts = options(EvalDrafts, flat=True)

    def __post_init__(self) -> None:
        ModelOptions.__post_init__(self)
        if not self.sets.prompts:
            raise ValueError("prompts is empty; give at least one NAME=SOURCE")
        if self.runtime == "reference" and self.draft.draft_dtype == "fp8":
            raise ValueError(f"draft_dtype is {self.draft.draft_dtype!r}; only --runtime engine can draft in it")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in COMMANDS:
        module = importlib.import_module(f".{words[0]}", __package__)  # the other one takes its time
        return cast(int, module.main(words[1:]))
    return run_command(lambda: _run(parse_cli(EvalConfig, words, PROG, DESCRIPTION)))


def _run(config: EvalConfig) -> None:
    read_ahead(config.drafter, config.target)
    # what can be wrong is looked at before the target's weights, which take longest
    prompts = config.sets.read()
    hashes = {each.name: each.source.contents(config.sets.split) for each in config.sets.sets}
    # not above: this imports torch and transformers, seconds in which the disk is to read already
    import transformers

    from .files import write_report
    from .markdown import render_table
    from .measure import EncodedPrompt
    from .run import evaluate
    from .tables import summary_table

    use_threads(config.threads)
    transformers.utils.logging.disable_progress_bar()  # errors are one line, and the only bar is ours
    pair = _load(config)
    tell_of_thinking(pair.tokenizer, config.sampling.thinking)
    sets = {
        name: [
            EncodedPrompt(row.id, _encode(pair.tokenizer, name, row, config.sampling.thinking), row.category)
            for row in rows
        ]
        for name, rows in prompts.items()
    }

    output = Path(config.output)
    partial = output / "partial.jsonl"
    arguments = {key: value for key, value in to_mapping(config).items() if key != "output"}
    with _alone(output):
        report = evaluate(
            pair,
            sets,
            config.sampling.params(config.sampling.seed),
            baseline=config.baseline,
            arguments={**arguments, "prompt_file_sha256": hashes},
            partial=partial,
            show_progress=True,
        )
        write_report(report, output)
        partial.unlink(missing_ok=True)
    print(f"{render_table(summary_table(report))}\n\nThe report is in {output / 'report.html'}")


@contextlib.contextmanager
def _alone(output: Path) -> Iterator[None]:
    """One process measures into a folder at a time."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output {output}: cannot be written ({error.strerror})") from error
    with locked(output):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                output.rmdir()  # nothing was measured


def _load(config: EvalConfig) -> "Pair":
    from ..models.dflash.checkpoint import check_fits, load_drafter
    from ..models.target import Target, load_config
    from .decoders import EnginePair, ReferencePair

    drafter = load_drafter(config.drafter)
    check_fits(drafter.config, load_config(config.target))
    if config.draft.block_size is not None:
        try:
            drafter.config = drafter.config.with_block_size(config.draft.block_size)
        except ValueError as error:
            raise UserError(str(error)) from error
    refused, method = None, cast(DraftSampleMethod, config.draft.draft_sample_method)  # one of its choices
    if config.runtime != "reference":
        try:
            how = config.device, config.dtype, config.draft.draft_dtype, method
            return EnginePair.load(config.target, drafter, *how)
        except UnsupportedModel as error:
            if config.runtime == "engine" or config.draft.draft_dtype == "fp8":  # which the reference does not know
                raise
            refused = str(error.__cause__ or error)  # without the way out
    pair = ReferencePair(Target.load(config.target, config.device, config.dtype), drafter, method)
    if refused is not None:
        print(f"the reference decodes, for the engine cannot: {refused}", file=sys.stderr)
        pair.facts["refused_by_the_engine"] = refused
    return pair


def _encode(tokenizer: Any, name: str, prompt: Prompt, thinking: bool | None) -> list[int]:
    try:
        return encode_chat(tokenizer, prompt.messages, thinking, prompt.tools)
    except UserError as error:
        raise UserError(f"set {name!r}, prompt {prompt.id!r}: {error}") from error
