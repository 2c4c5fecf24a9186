"""The record of a run: its origin and its result."""

import datetime
import json
import math
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import dflash_toolkit
from dflash_toolkit import DrafterConfig
from dflash_toolkit.config import UserError, to_mapping
from dflash_toolkit.data.prompts import template_variables
from dflash_toolkit.fingerprint import model_digest

from ..config import TrainConfig
from ..prompts.split import PromptData
from ..responses.corpus import Corpus
from .definition import WORK, Export, Outcome
from .held_out import Evaluation
from .resume_point import read_plan
from .settings import defaults, fingerprint, first_difference
from .training_budget import plan_of


def provenance(config: TrainConfig, shape: DrafterConfig, data: PromptData, template: str) -> dict[str, Any]:
    return {
        "target": config.target,
        "target_digest": target_digest(config.target),
        "config": to_mapping(config),
        "drafter": to_mapping(shape),
        "data_hash": data.digest,
        "samplers": data.samplers or [to_mapping(config.responses)],
        "template_hash": template,
        "argv": sys.argv,
        "versions": {
            "dflash_toolkit": dflash_toolkit.__version__,
            "git": _git_revision(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "started": now(),
    }


def origin(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of the record that goes into the checkpoint's config.json."""
    start = {"start": record["start"]} if "start" in record else {}
    return start | {
        "version": record["versions"]["dflash_toolkit"],
        "git": record["versions"]["git"],
        "target": record["target"],
        "target_digest": record["target_digest"],
        "template_hash": record["template_hash"],
        "prompt_format": record["config"]["prompt_format"],
        "data_hash": record["data_hash"],
        "answers": record["samplers"],
    }


def is_finished(output: Path, record: dict[str, Any]) -> bool:
    try:
        old = json.loads((output / "run.json").read_text())
        # round trip: JSON has no tuples
        settings = json.loads(json.dumps(fingerprint(record)))
        same = first_difference(fingerprint(old), settings, defaults()) is None
        plan = plan_of(old["config"]["optim"])
        ended = plan == plan_of(record["config"]["optim"]) and read_plan(output / WORK / "state.pt") in (None, plan)
        finished = same and ended and bool(old["finished"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # none, or a foreign file
        return False
    exports = [output, output / "speculators"] if record["config"]["run"]["speculators"] else [output]
    return finished and all((path / "model.safetensors").exists() for path in exports)


def measured(made: Export, thinking: str) -> dict[str, Any]:
    """Returns the record of an exported drafter. Args: thinking: `thinking_mode` of the responses."""
    found: dict[str, Any] = {"step": made.step, "acceptance_length": None}
    if made.evaluation:
        values = made.evaluation.values()
        found |= {name: _rounded(value) for name, value in values.items() if name.startswith("acceptance_length")}
        found["measured_on"] = _measured_on(made.evaluation) | {"temperature": 0.0, "thinking": thinking}
    if made.without_selector:
        found["acceptance_length_without_selector"] = _rounded(made.without_selector.tau)
    return found


def _measured_on(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "prompts": evaluation.prompts,
        "tokens": sum(evaluation.tokens),
        "max_tokens": evaluation.max_tokens,
    }


def thinking_mode(tokenizer: Any, samplers: Sequence[Mapping[str, Any]]) -> str:
    """Returns the thinking mode of a run's responses: on, off, default (the template's own) or none (it has none)."""
    if "enable_thinking" not in template_variables(tokenizer):
        return "none"
    modes = {sampler.get("thinking") for sampler in samplers}
    if modes in ({True}, {False}):
        return "on" if modes.pop() else "off"
    return "default"


def longest_response(config: TrainConfig, samplers: Sequence[Mapping[str, Any]]) -> int:
    """Returns the longest response that the data may have, in tokens."""
    given = (sampler.get("max_tokens") for sampler in samplers)
    longest = max((int(tokens) for tokens in given if tokens), default=config.responses.max_tokens)
    return min(longest, config.prompts.max_length)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return round(value, 4) if math.isfinite(value) else None


def result(data: PromptData, outcome: Outcome, rows: Corpus, answered: int, thinking: str) -> dict[str, Any]:
    assert outcome.exported is not None
    other = {outcome.other.role: measured(outcome.other, thinking)} if outcome.other else {}
    exported = measured(outcome.exported, thinking)
    curve = outcome.followed
    followed = (
        {"measured_during_training": _measured_on(curve) | {"acceptance_length": _rounded(curve.tau)}} if curve else {}
    )
    return {
        "steps": outcome.steps,
        "exported_step": exported.pop("step"),
        **exported,
        **followed,
        **other,
        "warnings": outcome.warnings,
        "prompts": data.counts["prompts"],
        "held_out_prompts": len(data.held_out),
        "answers": rows.responses,
        "rows": len(rows),
        "answer_tokens": rows.response_tokens,
        "tokens": int(rows.lengths.sum()),
        "left_out": {"too short for a block, or cut off": answered - len(rows)},
        "training_seconds": round(outcome.elapsed_s, 1),
    }


def _git_revision() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None  # not a checkout


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def target_digest(name: str) -> str | None:
    """Returns the sha256 over a target's weights and scales and its configuration's computation (`model_digest`).

    None if the weights are not on this machine. Raises UserError for files that cannot be read.
    """
    try:
        return model_digest(name)
    except UserError as error:
        raise UserError(f"target {name}: {error}") from error
