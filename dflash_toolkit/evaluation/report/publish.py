"""Publishes a report: in the drafter's model card, as a badge, and to Weights & Biases."""

import math
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ...command_line import list_options
from ...config import UserError, to_mapping
from ...files import write_text
from ...tracking import import_wandb, start_run
from .markdown import escape, render_table
from .results import Report, Section
from .tables import prompt_length_table, summary_table

CARD = "README.md"
BEGIN, END = "<!-- dflash-eval: begin -->", "<!-- dflash-eval: end -->"
NOT_SHOWN = {"output", "wandb", "write_model_card", "api_key"}  # options that do not change figures, or are secret
LOGGED = (
    "requests", "tau_pooled", "tau_mean", "tokens_per_second", "plain_tokens_per_second", "speedup",
    "identical_to_plain", "max_regret_nats",
)  # fmt: skip


def badge(report: Report) -> str:
    """Returns a shields.io image in Markdown with the pooled acceptance length of the first section."""
    tau = report.overall.drafted.tau_pooled
    said = f"{tau:.2f} tokens a step" if math.isfinite(tau) else "not measured"
    label, message = (quote(text.replace("-", "--").replace(" ", "_")) for text in ("acceptance length", said))
    return f"![acceptance length: {said}](https://img.shields.io/badge/{label}-{message}-teal)"


# ---- the model card -----------------------------------------------------------------------------------------------


def find_card(drafter: str) -> Path:
    """Returns the path of a drafter's model card, which may not exist yet.

    Raises:
        UserError: the drafter is not a directory, or the card cannot be read or has an incomplete earlier report.
    """
    folder = Path(drafter)
    if not folder.is_dir():
        raise UserError(f"write_model_card: {drafter} is not a directory; give a directory that contains the drafter")
    _around(folder / CARD)
    return folder / CARD


def write_card(card: Path, report: Report, command: str) -> None:
    """Writes a report into a model card, in place of an earlier one or at the end. Raises UserError."""
    before, after = _around(card)
    environment = report.environment
    where = f"{escape(report.machine)}, {environment.date[:10]}"
    version = f"dflash-toolkit {environment.dflash_toolkit}"
    parts = [BEGIN, badge(report), "## Measured acceptance"]
    parts += [f"Drafting for {escape(str(report.arguments['target']))}: {where}, by {version}."]
    for section in report.sections:
        parts += [f"{section.name.capitalize()}:", render_table(summary_table(section))]
        if by_length := prompt_length_table(section):
            parts += [f"{by_length.caption}:", render_table(by_length)]
    write_text(card, before + "\n\n".join([*parts, f"```bash\n{command}\n```", END]) + after)


def _around(card: Path) -> tuple[str, str]:
    """Returns the text before and after the report in a card."""
    try:
        text = card.read_bytes().decode() if card.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{card}: cannot be read ({error})") from error
    begins, ends = text.count(BEGIN), text.count(END)
    before, _, rest = text.partition(BEGIN)
    if (begins, ends) == (0, 0):
        return text.rstrip() + "\n\n" if text.strip() else "", "\n"
    if (begins, ends) != (1, 1) or END not in rest:
        raise UserError(f"{card}: the lines {BEGIN} and {END} do not enclose one report; remove both")
    return before, rest.partition(END)[2]


def shown_command(config: Any) -> str:
    """Returns the command line of a configuration, without default values."""
    words, values = ["dflash-eval"], to_mapping(config)
    for key, (field, _) in list_options(type(config)):
        value, default = values[key], field.default
        if key in NOT_SHOWN or value == (list(default) if isinstance(default, tuple) else default):
            continue
        name = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            items = value if isinstance(value, list) else [value]
            words += [f"--{name}", *(str(item).lower() if isinstance(item, bool) else str(item) for item in items)]
    return shlex.join(words)


# ---- Weights & Biases ---------------------------------------------------------------------------------------------


def log_report(report: Report, output: Path, project: str) -> None:
    """Logs the figures of every set and the page in `output` to a new run. Raises UserError."""
    values = report.to_json()
    config = values["environment"] | values["arguments"]
    run = start_run("wandb", project, config=config, dir=str(output), job_type="evaluation")
    run.summary.update({key: value for section in report.sections for key, value in _figures(section).items()})
    page = (output / "report.html").read_text(encoding="utf-8")
    run.log({"report": import_wandb("wandb").Html(page, inject=False)})
    run.finish()


def _figures(section: Section) -> dict[str, float]:
    """Returns the measured figures as `section/set/figure`, with the ends of their intervals."""
    found = {}
    by_length = [(f"prompt_tokens/{group}", summary) for group, summary in section.by_prompt_tokens.items()]
    for name, summary in [*section.labelled, *by_length]:
        values = summary.to_json()
        for key in LOGGED:
            low, high = values.get(f"{key}_ci95") or (None, None)
            for ending, value in (("", values[key]), ("_low", low), ("_high", high)):
                if value is not None and math.isfinite(value):
                    found[f"{section.name}/{name}/{key}{ending}"] = value
    return found
