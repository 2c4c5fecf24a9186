"""The results of a run, per prompt set and pooled over all, and the form they have in `report.json`."""

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import dflash_toolkit

from ..acceptance import Acceptance
from ..files import finite
from ..fingerprint import json_digest
from .decoders import Pair
from .measure import Difference, Measurement

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What the numbers depend on besides the arguments."""

    dflash_toolkit: str
    torch: str
    transformers: str
    python: str
    platform: str
    device: str
    device_name: str
    dtype: str
    threads: int
    date: str  # UTC, ISO 8601

    @classmethod
    def of(cls, pair: Pair) -> "Environment":
        """This machine, as the loaded `pair` uses it, now."""
        return cls(
            dflash_toolkit=dflash_toolkit.__version__,
            torch=torch.__version__,
            transformers=transformers.__version__,
            python=platform.python_version(),
            platform=platform.platform(),
            device=str(pair.device),
            device_name=_device_name(pair.device),
            dtype=str(pair.dtype).removeprefix("torch."),
            threads=torch.get_num_threads(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []  # not Linux
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one prompt set, or of all of them pooled."""

    drafted: Acceptance
    plain: Acceptance | None  # S = 1; None without a baseline
    identical: int | None  # requests whose tokens are the plain ones; None too where they need not be

    @classmethod
    def of(cls, measurements: Sequence[Measurement], block_size: int, repeats_plain: bool = True) -> "Summary":
        """Pool at least one measurement; either all of them have a plain answer or none has."""
        drafted = Acceptance.of([m.drafted for m in measurements], block_size)
        plain = [m.plain for m in measurements if m.plain]
        if not plain:
            return cls(drafted, None, None)
        same = sum(m.plain is not None and m.plain.tokens == m.drafted.tokens for m in measurements)
        return cls(drafted, Acceptance.of(plain, block_size=1), same if repeats_plain else None)

    @property
    def speedup(self) -> float | None:
        """Decode rate with the drafter over the plain one; NaN where neither took a step."""
        return self.drafted.tokens_per_second / self.plain.tokens_per_second if self.plain else None

    @property
    def identical_to_plain(self) -> float | None:
        """Share of requests whose tokens are the plain ones."""
        return None if self.identical is None else self.identical / self.drafted.answers

    def to_json(self) -> dict[str, Any]:
        drafted, plain = self.drafted, self.plain
        return {
            "requests": drafted.answers,
            "generated_tokens": drafted.tokens,
            "verify_steps": drafted.steps,
            "tau_pooled": drafted.tau_pooled,
            "tau_mean": drafted.tau_mean,
            "accepted_per_position": drafted.accepted_per_position,
            "accepted_given_previous": drafted.accepted_given_previous,
            "accepted_lengths": drafted.accepted_lengths,
            "prefill_seconds": drafted.prefill_s,
            "decode_seconds": drafted.decode_s,
            "tokens_per_second": drafted.tokens_per_second,
            "plain_prefill_seconds": plain.prefill_s if plain else None,
            "plain_decode_seconds": plain.decode_s if plain else None,
            "plain_tokens_per_second": plain.tokens_per_second if plain else None,
            "speedup": self.speedup,
            "identical_to_plain": self.identical_to_plain,
        }


@dataclass(frozen=True, slots=True)
class SetReport:
    """One prompt set."""

    summary: Summary
    measurements: tuple[Measurement, ...]

    @property
    def differences(self) -> list[tuple[str, Difference]]:
        """The id of every request whose answer is not the plain one, and where it leaves it."""
        return [(m.id, m.difference) for m in self.measurements if m.difference]

    def to_json(self) -> dict[str, Any]:
        return {
            **self.summary.to_json(),
            "differences": [{"id": request, **asdict(difference)} for request, difference in self.differences],
            "per_request": [_request(m) for m in self.measurements],
        }


def answer_hash(tokens: Sequence[int]) -> str:
    """The start of the SHA-256 of an answer's ids: whether two reports have the same answer."""
    return json_digest(list(tokens))[:16]


def _request(measurement: Measurement) -> dict[str, Any]:
    drafted, plain = measurement.drafted, measurement.plain
    return {
        "id": measurement.id,
        "prompt_tokens": measurement.prompt_tokens,
        "tokens": len(drafted.tokens),
        "steps": len(drafted.steps),
        "tau": drafted.acceptance_length,
        "finish_reason": drafted.finish_reason,
        "answer_sha256": answer_hash(drafted.tokens),
        "seconds": drafted.prefill_s + drafted.decode_s,
        "plain_seconds": plain.prefill_s + plain.decode_s if plain else None,
    }


@dataclass(frozen=True, slots=True)
class Report:
    """Everything a run found out."""

    environment: Environment
    arguments: dict[str, Any]  # plain JSON values
    sets: dict[str, SetReport]
    overall: Summary

    @property
    def block_size(self) -> int:
        return len(self.overall.drafted.accepted_lengths)

    @property
    def pair(self) -> str:
        """What was measured, in words."""
        drafter = self.arguments.get("drafter")
        if not drafter:
            return str(self.arguments["target"])
        kind = {"dflash": "DFlash", "dflash2": "DFlash 2"}[self.arguments["drafter_kind"]]
        return f"{drafter} ({kind}) drafting for {self.arguments['target']}"

    @property
    def labelled(self) -> list[tuple[str, Summary]]:
        """Each set with its name and, where there are several, all of them pooled."""
        rows = [(name, result.summary) for name, result in self.sets.items()]
        return rows if len(rows) == 1 else [*rows, ("all sets", self.overall)]

    def to_json(self) -> dict[str, Any]:
        """Strict JSON values: figures that could not be measured are None, never NaN."""
        values = {
            "schema": SCHEMA,
            "environment": asdict(self.environment),
            "arguments": self.arguments,
            "overall": self.overall.to_json(),
            "sets": {name: result.to_json() for name, result in self.sets.items()},
        }
        return finite(values)
