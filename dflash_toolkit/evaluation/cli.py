"""dflash-eval: the acceptance report that people decide from."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.readahead import read_ahead
from ..config import UserError, knob, parse_cli, run_command, to_mapping
from ..data.conversations import BY_NAME, FORM_CHOICES
from ..data.prompts import Prompt, encode_chat, parse_prompt_sets, read_prompt_sets
from ..files import locked
from ..runtime.options import DRAFT_DTYPES
from ..sampling import SamplingParams
from ..threads import HELP, check_threads, use_threads

if TYPE_CHECKING:
    from .decoders import Runtime

PROG = "dflash-eval"
DESCRIPTION = """\
Decode prompts with a drafter and without one, and report how many drafted tokens the target accepts, how much
faster that is, and whether every answer is the plain one. Writes report.json, report.md and report.html. An
interrupted run continues where it was when the same command runs again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """The knobs of `dflash-eval`."""

    target: str = knob(help="the target: Hugging Face id or directory")
    drafter: str = knob(help="the drafter: Hugging Face id or directory")
    prompts: tuple[str, ...] = knob(
        help="prompt sets, each as NAME=SOURCE: JSONL, JSON, Parquet or text, or a dataset as DATASET[:SUBSET]; "
        "SOURCE[a:b] takes its rows a..b-1",
        named=True,
    )
    form: str = knob(
        BY_NAME, "ask all sets as this benchmark does; auto: each by its name; none: rows as they are", FORM_CHOICES
    )
    split: str = knob("test", "of datasets, whose rows are taken in their order")
    output: str = knob("report", "directory for the report")
    runtime: str = knob(
        "engine", "engine: what dflash-serve runs; reference: Hugging Face modules, slow", ("engine", "reference")
    )
    baseline: bool = knob(True, "also decode without the drafter: gives speed-up and identity")
    limit: int | None = knob(None, "use the first LIMIT prompts of each set")
    max_new_tokens: int = knob(512, "longest answer, in tokens")
    temperature: float = knob(0.0, "0 is greedy")
    top_p: float = knob(1.0, "nucleus sampling")
    top_k: int = knob(0, "0 keeps every token")
    min_p: float = knob(0.0, "drop tokens below this share of the likeliest one's probability")
    seed: int = knob(0, "of the sampler; the same for every prompt")
    thinking: bool | None = knob(None, "for templates with a thinking mode (default: the template's own)")
    block_size: int | None = knob(None, "draft blocks of this size instead of the drafter's own")
    draft_dtype: str = knob(
        "auto", "of drafts, the answers stay the same: fp8, full (as loaded) or what is faster here", DRAFT_DTYPES
    )
    device: str = knob("auto", "auto, cpu or cuda")
    dtype: str = knob("auto", "auto, bfloat16, float16 or float32")
    threads: int | None = knob(None, HELP)

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit is {self.limit}; it must be >= 1")
        if not self.prompts:
            raise ValueError("prompts is empty; give at least one NAME=SOURCE")
        if self.runtime == "reference" and self.draft_dtype == "fp8":
            raise ValueError(f"draft_dtype is {self.draft_dtype!r}; only --runtime engine can draft in it")
        check_threads(self.threads)
        parse_prompt_sets(self.prompts, self.form)  # raises for another form
        _ = self.sampling  # raises for a value outside its range

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            max_new_tokens=self.max_new_tokens,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_command(lambda: _run(parse_cli(EvalConfig, argv, PROG, DESCRIPTION)))


def _run(config: EvalConfig) -> None:
    read_ahead(config.drafter, config.target)
    # what can be wrong is looked at before the target's weights, which take longest
    prompts = read_prompt_sets(config.prompts, config.limit, form=config.form, split=config.split)
    hashes = {each.name: each.source.contents(config.split) for each in parse_prompt_sets(config.prompts)}
    # not above: this imports torch and transformers, seconds in which the disk is to read already
    import transformers

    from .files import write_report
    from .markdown import render_table
    from .measure import EncodedPrompt
    from .run import evaluate
    from .tables import summary_table

    use_threads(config.threads)
    transformers.utils.logging.disable_progress_bar()  # errors are one line, and the only bar is ours
    runtime = _load(config)
    sets = {
        name: [EncodedPrompt(row.id, _encode(runtime.tokenizer, name, row, config.thinking)) for row in rows]
        for name, rows in prompts.items()
    }

    output = Path(config.output)
    partial = output / "partial.jsonl"
    arguments = {key: value for key, value in to_mapping(config).items() if key != "output"}
    with _alone(output):
        report = evaluate(
            runtime,
            sets,
            config.sampling,
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


def _load(config: EvalConfig) -> "Runtime":
    from ..models.dflash.checkpoint import check_fits, load_drafter
    from ..models.target import Target, load_config
    from .decoders import EngineRuntime, ReferenceRuntime

    drafter = load_drafter(config.drafter)
    check_fits(drafter.config, load_config(config.target))
    if config.block_size is not None:
        try:
            drafter.config = drafter.config.with_block_size(config.block_size)
        except ValueError as error:
            raise UserError(str(error)) from error
    if config.runtime == "reference":
        return ReferenceRuntime(Target.load(config.target, config.device, config.dtype), drafter)
    return EngineRuntime.load(config.target, drafter, config.device, config.dtype, config.draft_dtype)


def _encode(tokenizer: Any, name: str, prompt: Prompt, thinking: bool | None) -> list[int]:
    try:
        return encode_chat(tokenizer, prompt.messages, thinking, prompt.tools)
    except UserError as error:
        raise UserError(f"set {name!r}, prompt {prompt.id!r}: {error}") from error
