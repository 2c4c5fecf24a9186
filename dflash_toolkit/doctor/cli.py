"""dflash-doctor: diagnoses low acceptance. `examination.py` does the work and imports torch; this file does not."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..command_line import parse_cli, run_command
from ..config import UserError, option, options
from ..models.published import hint_for
from ..options import PROMPT_SETS, THINKING, PromptSetOptions, TemplateOptions
from ..preflight import check_new_folder
from ..sampling import SamplingParams

PROG = "dflash-doctor"
DESCRIPTION = """\
Diagnoses low acceptance. Reads the checkpoint, decodes a few prompts with it, and repeats that with changed settings:
layer ids off by one, another RoPE theta or mask row, shifted positions and labels, the anchor's own feature in the
context, thinking on and off. Compares the drafter's probabilities with what the target accepts. Reports what is wrong
and how to fix it.

Exit code: 0 no fault was found (there may be warnings), 1 a fault was found, 2 the command cannot be run as given."""
EXAMPLE = "dflash-doctor --target Qwen/Qwen3-8B --drafter out/qwen3-8b --prompts mine.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorPrompts(PromptSetOptions):
    """The prompts to examine a drafter on; those that it will serve are best."""

    prompts: tuple[str, ...] = option(
        (), f"{PROMPT_SETS} (default: 8 built-in prompts)", named=True, common=True, metavar="SOURCE"
    )
    limit: int | None = option(
        8, "number of prompts used from the start of each set, or of the 8 built-in ones", common=True, within=">= 1"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorConfig(TemplateOptions):
    """The options of `dflash-doctor`."""

    drafter: str = option("", "drafter: Hugging Face id or directory (required)", common=True, metavar="PATH")
    sets: DoctorPrompts = options(DoctorPrompts, flat=True)
    output: str | None = option(
        None, "JSON file for all findings and figures (default: print only)", common=True, metavar="PATH"
    )
    max_tokens: int = option(128, "longest response, in tokens", common=True, within=">= 8")
    temperature: float = option(
        0.0,
        "temperature at which the drafter will be served; above 0, acceptance is compared with that of greedy decoding",
        common=True,
    )
    thinking: bool | None = option(None, f"{THINKING} (default: the template's own)", common=True)

    def __post_init__(self) -> None:
        TemplateOptions.__post_init__(self)
        if not self.drafter:
            raise ValueError(f"drafter is missing; give --drafter{hint_for(self.target)}")
        SamplingParams(temperature=self.temperature)  # checks it


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _run(parse_cli(DoctorConfig, argv, PROG, DESCRIPTION, EXAMPLE)))


def _run(config: DoctorConfig) -> int:
    if config.output and not Path(config.output).absolute().parent.is_dir():
        raise UserError(f"output {config.output}: there is no directory {Path(config.output).absolute().parent}")
    if config.output:
        check_new_folder(Path(config.output).parent, f"output {config.output}")
    from .examination import report

    return report(config)


if __name__ == "__main__":
    raise SystemExit(main())
