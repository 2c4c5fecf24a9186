"""dflash-train export: writes a drafter with weights of 8 bits. `run/export.py` does the work and imports torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_toolkit.command_line import parse_cli, run_command
from dflash_toolkit.config import Options, option, options
from dflash_toolkit.options import PROMPT_SETS, PromptSetOptions

PROG = "dflash-train export"
DESCRIPTION = """\
Writes a drafter with weights in FP8 or INT8, in the form of compressed-tensors, which dflash-serve and vLLM load. With
--prompts it decodes them with both drafters and writes the acceptance that the format costs into the model card."""
EXAMPLE = (
    "dflash-train export --drafter out/mine --dtype fp8 --output out/mine-fp8 --target Qwen/Qwen3-8B "
    "--prompts chat=held_out.jsonl --limit 64"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSets(PromptSetOptions):
    """The prompts that measure the drafters."""

    prompts: tuple[str, ...] = option(
        (), f"{PROMPT_SETS} (default: no measurement)", named=True, common=True, metavar="SOURCE"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig(Options):
    """The options of `dflash-train export`."""

    drafter: str = option(help="drafter to read: directory or Hugging Face id", common=True, metavar="PATH")
    output: str = option(help="directory of the new drafter", common=True, metavar="PATH")
    dtype: str = option(
        "fp8", "number format of the layers' matrices, with one scale per row", ("fp8", "int8"), common=True
    )
    target: str | None = option(
        None, "target that decodes --prompts: Hugging Face id or directory (default: no measurement)", common=True,
        metavar="PATH",
    )  # fmt: skip
    sets: MeasuredSets = options(MeasuredSets, flat=True)
    max_tokens: int = option(512, "longest response, in tokens", common=True, within=">= 2")
    device: str = option("auto", "device: auto, cpu, cuda, cuda:1, ...; auto is the GPU, if there is one", common=True)
    push_to_hub: str | None = option(
        None, "Hugging Face repository to upload the drafter and its model card to, created if missing (default: none)"
    )

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if bool(self.target) != bool(self.sets.prompts):
            given, missing = ("target", "prompts") if self.target else ("prompts", "target")
            raise ValueError(f"{given} is given without {missing}; give both to measure the drafters, or neither")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Exit codes: 0 done, 2 an error (one line), 130 interrupted."""

    def command() -> None:
        config = parse_cli(ExportConfig, argv, PROG, DESCRIPTION, EXAMPLE)
        from .run.export import export

        export(config)

    return run_command(command)
