"""Writes a drafter in 8 bits, and what that costs: the work of `dflash-train export`."""

import re
import sys
from pathlib import Path
from typing import Any

from dflash_toolkit import Drafter, Target, UserError, load_drafter, save_drafter
from dflash_toolkit.checkpoint.reader import locate
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.data.skipped import Skipped
from dflash_toolkit.files import read_json, write_text
from dflash_toolkit.models.dflash.checkpoint import PROVENANCE_KEY, check_fits, stored_tensors
from dflash_toolkit.models.dflash.eight_bits import narrowed, widened
from dflash_toolkit.preflight import check_new_folder
from dflash_toolkit.progress import disable_library_bars
from dflash_toolkit.record import RECORD_KEY, export_record

from ..export_cli import ExportConfig
from ..training_options import RunOptions
from .held_out import Evaluation, HeldOut, HeldOutPrompt
from .publish import CARD, make_repository, upload

MEASURED = re.compile("acceptance_length.*|measured_on|record")  # keys that describe the source alone


def export(config: ExportConfig) -> None:
    """Reads, measures, writes and uploads. Raises UserError."""
    disable_library_bars()
    output, skipped = Path(config.output), Skipped(config.sets.strict, "strict")
    check_new_folder(output, f"output {config.output}")
    source = locate("drafter", config.drafter)
    if source.resolve() == output.resolve():
        raise UserError(f"output {config.output} is the drafter itself; choose another directory")
    asked = config.sets.read(skipped) if config.target else {}
    drafter = load_drafter(config.drafter)
    stated = read_json(source / "config.json")
    if "quantization_config" in stated:
        raise UserError(f"drafter {config.drafter} is quantized already; give the one in 16 bits")
    if config.push_to_hub:
        make_repository(config.push_to_hub)
    small = Drafter.of_tensors(drafter.config, widened(narrowed(stored_tensors(drafter), config.dtype)[0]))
    note = {key: value for key, value in stated.get(PROVENANCE_KEY, {}).items() if not MEASURED.fullmatch(key)}
    note["exported_from"] = Path(config.drafter).name
    cost: tuple[Evaluation, Evaluation] | None = None
    if config.target:
        target = Target.load(config.target, config.device)
        check_fits(drafter.config, target.config, target.embedding.num_embeddings)
        prompts = [
            HeldOutPrompt(encode_chat(target.tokenizer, each.messages, tools=each.tools), name)
            for name, of_set in asked.items()
            for each in of_set
        ]
        options = RunOptions(evaluate_prompts=1, final_tokens=config.max_tokens)
        held_out = HeldOut(target, drafter.config, [prompts[0], *prompts], options)  # it sets the first one aside
        cost = held_out.final(drafter.to(target.device), 0), held_out.final(small.to(target.device), 0)
        note |= {RECORD_KEY: export_record(small, target)} | _measured(*cost)
    save_drafter(drafter, output, note, config.dtype)
    name = config.push_to_hub or output.name
    write_text(output / CARD, _card(source, output, config, name, cost))
    print(f"{output}: drafter exported in {config.dtype}", file=sys.stderr)
    if cost:
        print(_said(config.dtype, *cost))
    if config.push_to_hub:
        print(f"uploaded to {upload(output, config.push_to_hub)}", file=sys.stderr)


def _measured(full: Evaluation, small: Evaluation) -> dict[str, Any]:
    found = {key: value for key, value in small.values().items() if key.startswith("acceptance_length")}
    on = {"prompts": small.prompts, "tokens": sum(small.tokens), "max_tokens": small.max_tokens, "temperature": 0.0}
    return found | {"acceptance_length_in_16_bits": full.tau, "measured_on": on}


def _said(dtype: str, full: Evaluation, small: Evaluation) -> str:
    """Returns the cost of the format in words."""
    error = small.error_of_difference(full)
    return (
        f"acceptance length {small.tau:.3f} in {dtype}, {full.tau:.3f} in 16 bits: {small.tau - full.tau:+.3f} "
        f"(standard error {error:.3f}) on {small.prompts} prompts, greedy, at most {small.max_tokens} tokens each"
    )


def _card(
    source: Path, output: Path, config: ExportConfig, name: str, cost: tuple[Evaluation, Evaluation] | None
) -> str:
    """Returns the model card of the source with the new weights, or a short one if it has none."""
    text = (source / CARD).read_text(encoding="utf-8") if (source / CARD).is_file() else f"# {name}\n"
    size = (output / "model.safetensors").stat().st_size / 1e6
    text = re.sub(
        r"\| weights \| [\d.]+ MB in bfloat16;", f"| weights | {size:.1f} MB, matrices in {config.dtype};", text
    )
    if old := re.search(r"dflash-serve --target \S+ --drafter (\S+)", text):
        text = text.replace(old[1], name)
    text = text.replace("## Acceptance\n", "## Acceptance in 16 bits\n")
    before = sum(file.stat().st_size for file in source.glob("*.safetensors")) / 1e6
    lines = [
        f"## Weights in {config.dtype.upper()}",
        f"The matrices of the layers have 8 bits and one scale per row, in the form of compressed-tensors: {size:.1f} "
        f"MB instead of {before:.1f} MB. vLLM also casts the rows that they multiply to 8 bits.",
    ]
    if cost:
        by_source = zip(*(each.by_source().items() for each in cost), strict=True)
        rows = "".join(f"| {key} | {full:.2f} | {small:.2f} |\n" for (key, full), (_, small) in by_source)
        lines += [
            f"| prompts | 16 bits | {config.dtype} |\n|---|---|---|\n{rows}".rstrip(),
            f"Measured with rows in 16 bits: {_said(config.dtype, *cost)}.",
        ]
    else:
        lines.append("The acceptance that this costs was not measured.")
    return "\n\n".join([text.rstrip(), *lines]) + "\n"
