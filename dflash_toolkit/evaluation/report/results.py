"""The results of a run, per prompt set and pooled, and their form in `report.json`."""

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import dflash_toolkit

from ...acceptance import Acceptance, prompt_length_group, ratio
from ...files import finite
from ...fingerprint import json_digest
from ...generation import Generation
from ...models.dflash.architecture import architectures
from ..measure.measurement import Difference, Measurement
from ..measure.pairs import Pair
from ..stats.bootstrap import CONFIDENCE, RESAMPLES, SEED, intervals
from .schema import SCHEMA_VERSION

PERCENTILES = (50, 90, 99)
NOISY = 1.5  # ratio of plain speeds, fastest over slowest set, that causes a warning


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Versions, device and machine of a measurement."""

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
        """Describes this machine, as the loaded `pair` uses it, and the current time."""
        return cls(
            dflash_toolkit=dflash_toolkit.__version__,
            torch=torch.__version__,
            transformers=transformers.__version__,
            python=platform.python_version(),
            platform=platform.platform(),
            device="endpoint" if pair.where else str(pair.device),
            device_name=pair.where or _device_name(pair.device),
            dtype="of the server" if pair.where else str(pair.dtype).removeprefix("torch."),
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
    """The figures of one prompt set, or of all pooled."""

    drafted: Acceptance
    plain: Acceptance | None  # S = 1; None without a baseline
    identical: int | None  # requests with the plain tokens; None without a baseline, or if they may differ
    intervals: dict[str, Any]  # by names in `to_json`: an interval, None, or one per slot
    latencies: dict[str, dict[str, float] | None]  # mean and percentiles of seconds, by names in `to_json`
    joules_per_token: float | None  # None without a counter
    plain_joules_per_token: float | None
    max_regret_nats: float | None  # None without differences

    @classmethod
    def of(cls, measurements: Sequence[Measurement], block_size: int, repeats_plain: bool = True) -> "Summary":
        """Pools at least one measurement; all of them or none have a plain answer."""
        drafted = [m.drafted for m in measurements]
        plain = [m.plain for m in measurements if m.plain]
        same = sum(m.plain is not None and m.plain.tokens == m.drafted.tokens for m in measurements)
        regrets = [m.difference.regret_nats for m in measurements if m.difference]
        return cls(
            Acceptance.of(drafted, block_size),
            Acceptance.of(plain, block_size=1) if plain else None,
            same if plain and repeats_plain else None,
            intervals(drafted, plain, block_size, _begins(measurements)),
            {
                "time_to_first_token_seconds": spread([answer.prefill_s for answer in drafted]),
                "inter_token_latency_seconds": spread([gap for m in measurements for gap in m.step_s]),
                "plain_time_to_first_token_seconds": spread([answer.prefill_s for answer in plain]),
                "plain_inter_token_latency_seconds": spread([gap for m in measurements for gap in m.plain_step_s]),
            },
            _per_token([m.joules for m in measurements], drafted),
            _per_token([m.plain_joules for m in measurements], plain),
            max((regret for regret in regrets if regret is not None), default=None),
        )

    @property
    def speedup(self) -> float | None:
        """Decode rate with the drafter over the plain one; NaN without steps."""
        return self.drafted.tokens_per_second / self.plain.tokens_per_second if self.plain else None

    @property
    def identical_to_plain(self) -> float | None:
        """Share of requests with the plain tokens."""
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
            **self.latencies,
            "joules_per_token": self.joules_per_token,
            "plain_joules_per_token": self.plain_joules_per_token,
            "prefill_seconds": drafted.prefill_s,
            "decode_seconds": drafted.decode_s,
            "tokens_per_second": drafted.tokens_per_second,
            "plain_prefill_seconds": plain.prefill_s if plain else None,
            "plain_decode_seconds": plain.decode_s if plain else None,
            "plain_tokens_per_second": plain.tokens_per_second if plain else None,
            "speedup": self.speedup,
            "identical_to_plain": self.identical_to_plain,
            "max_regret_nats": self.max_regret_nats,
            **{f"{name}_ci95": interval for name, interval in self.intervals.items()},
        }


def _begins(measurements: Sequence[Measurement]) -> list[bool]:
    """Returns whether each request begins a conversation, or is the first of it among these requests."""
    before = [None, *measurements]
    return [
        last is None or m.id != last.id or m.turn <= last.turn for last, m in zip(before, measurements, strict=False)
    ]


def _per_token(joules: Sequence[float | None], answers: Sequence[Generation]) -> float | None:
    """Pools over answers, as the counter is updated only a few times per second."""
    known = [used for used in joules if used is not None]
    return ratio(sum(known), sum(len(answer.tokens) for answer in answers)) if len(known) == len(answers) > 0 else None


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Returns mean and percentiles; None without values."""
    if not values:
        return None
    percentiles = np.percentile(values, PERCENTILES)
    return {
        "mean": float(np.mean(values)),
        **{f"p{p}": float(v) for p, v in zip(PERCENTILES, percentiles, strict=True)},
    }


@dataclass(frozen=True, slots=True)
class SetReport:
    """The results of one prompt set."""

    summary: Summary
    measurements: tuple[Measurement, ...]
    categories: dict[str, Summary]  # by category

    @classmethod
    def of(cls, measurements: Sequence[Measurement], block_size: int, repeats_plain: bool = True) -> "SetReport":
        kinds = sorted({m.category for m in measurements if m.category})
        by_kind = {kind: [m for m in measurements if m.category == kind] for kind in kinds}
        return cls(
            Summary.of(measurements, block_size, repeats_plain),
            tuple(measurements),
            {kind: Summary.of(found, block_size, repeats_plain) for kind, found in by_kind.items()},
        )

    @property
    def differences(self) -> list[tuple[str, Difference]]:
        """Ids and first differences of the requests with other tokens than the plain ones."""
        return [(m.id, m.difference) for m in self.measurements if m.difference]

    def to_json(self) -> dict[str, Any]:
        return {
            **self.summary.to_json(),
            "categories": {kind: summary.to_json() for kind, summary in self.categories.items()},
            "differences": [{"id": request, **asdict(difference)} for request, difference in self.differences],
            "per_request": [_request(m) for m in self.measurements],
        }


def answer_hash(tokens: Sequence[int]) -> str:
    """Returns the start of the SHA-256 of an answer's ids, to compare answers of two reports."""
    return json_digest(list(tokens))[:16]


def _request(measurement: Measurement) -> dict[str, Any]:
    drafted, plain = measurement.drafted, measurement.plain
    trees = {}
    if measurement.offered_texts:
        trees = {
            "offered_per_step": [step.offered for step in drafted.steps],
            "offered_texts": {str(token): text for token, text in measurement.offered_texts},
        }
    return {
        "id": measurement.id,
        "category": measurement.category,
        "turn": measurement.turn,
        "prompt_tokens": measurement.prompt_tokens,
        "prompt_text": measurement.prompt_text,
        "tokens": len(drafted.tokens),
        "token_ids": drafted.tokens,
        "token_texts": measurement.token_texts,
        "steps": len(drafted.steps),
        "drafted_per_step": [step.drafted for step in drafted.steps],
        "accepted_per_step": [step.accepted for step in drafted.steps],
        "committed_per_step": [len(step.tokens) for step in drafted.steps],
        "seconds_per_step": measurement.step_s,
        **trees,
        "tau": drafted.acceptance_length,
        "finish_reason": drafted.finish_reason,
        "answer_sha256": answer_hash(drafted.tokens),
        "identical": plain.tokens == drafted.tokens if plain else None,
        "time_to_first_token_seconds": drafted.prefill_s,
        "decode_seconds": drafted.decode_s,
        "plain_tokens": len(plain.tokens) if plain else None,
        "plain_time_to_first_token_seconds": plain.prefill_s if plain else None,
        "plain_decode_seconds": plain.decode_s if plain else None,
    }


@dataclass(frozen=True, slots=True)
class Section:
    """All prompt sets, measured in one setting."""

    temperature: float
    thinking: bool | None  # None leaves it to the chat template
    sets: dict[str, SetReport]
    overall: Summary
    by_prompt_tokens: dict[str, Summary]  # by `prompt_length_group`, ascending; empty for a single group

    @classmethod
    def of(
        cls,
        measured: Mapping[str, Sequence[Measurement]],
        temperature: float,
        thinking: bool | None,
        block_size: int,
        repeats_plain: bool = True,
    ) -> "Section":
        """Pools the measurements of each set, given by name."""
        pooled = [m for found in measured.values() for m in found]
        groups = list(dict.fromkeys(prompt_length_group(n) for n in sorted(m.prompt_tokens for m in pooled)))
        by_group = {group: [m for m in pooled if prompt_length_group(m.prompt_tokens) == group] for group in groups}
        return cls(
            temperature,
            thinking,
            {name: SetReport.of(found, block_size, repeats_plain) for name, found in measured.items()},
            Summary.of(pooled, block_size, repeats_plain),
            {g: Summary.of(found, block_size, repeats_plain) for g, found in by_group.items() if len(groups) > 1},
        )

    @property
    def name(self) -> str:
        """The setting in words."""
        thinking = {None: "", True: ", thinking", False: ", no thinking"}[self.thinking]
        return ("greedy" if self.temperature == 0.0 else f"temperature {self.temperature:g}") + thinking

    @property
    def labelled(self) -> list[tuple[str, Summary]]:
        """Each set with its name and, if there are several, all of them pooled."""
        rows = [(name, result.summary) for name, result in self.sets.items()]
        return rows if len(rows) == 1 else [*rows, ("all sets", self.overall)]

    def to_json(self) -> dict[str, Any]:
        groups = {group: summary.to_json() for group, summary in self.by_prompt_tokens.items()}
        return {
            "name": self.name,
            "temperature": self.temperature,
            "thinking": self.thinking,
            "overall": self.overall.to_json(),
            **({"by_prompt_tokens": groups} if groups else {}),
            "sets": {name: result.to_json() for name, result in self.sets.items()},
        }


def noise(sections: Sequence[Section]) -> list[str]:
    """Returns warnings for sections in which plain decoding was much faster in some sets than in others."""
    found = []
    for section in sections:
        speeds = {name: s.summary.plain.tokens_per_second for name, s in section.sets.items() if s.summary.plain}
        measured = {name: speed for name, speed in speeds.items() if math.isfinite(speed)}
        if measured and max(measured.values()) > NOISY * min(measured.values()):
            said = ", ".join(f"{name} {speed:.1f}" for name, speed in measured.items())
            found.append(
                f"Plain decoding ({section.name}) was not equally fast in all sets ({said} tokens/s): other programs "
                f"may have used the machine, or contexts differ much. Compare speed-ups with care."
            )
    return found


def at_a_time(concurrency: int) -> str:
    """Describes the load of a report."""
    return "one request at a time" if concurrency == 1 else f"each of {concurrency} requests at a time"


@dataclass(frozen=True, slots=True)
class Report:
    """All results of a run."""

    environment: Environment
    arguments: dict[str, Any]  # plain JSON values
    sections: tuple[Section, ...]  # at least one; the summary shows the first
    warnings: tuple[str, ...] = ()  # reasons why figures may mislead
    sweeps: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # points, in the form of `report.json`
    recommendation: dict[str, Any] | None = None  # see `sweeps.recommendation`
    recall: dict[str, Any] | None = None  # see `recall.draft_recall`
    distribution: dict[str, Any] | None = None  # see `distribution.distribution_test`

    @property
    def sets(self) -> dict[str, SetReport]:
        """The sets of the first section."""
        return self.sections[0].sets

    @property
    def overall(self) -> Summary:
        """The pooled figures of the first section."""
        return self.sections[0].overall

    @property
    def block_size(self) -> int:
        return len(self.overall.drafted.accepted_lengths)

    @property
    def machine(self) -> str:
        """The device and its dtype; a server does not report a dtype."""
        found = self.environment
        return found.device_name if found.device == "endpoint" else f"{found.device_name}, {found.dtype}"

    @property
    def load(self) -> str:
        """The concurrency in words."""
        return at_a_time(self.arguments.get("max_concurrency", 1))

    @property
    def pair(self) -> str:
        """Drafter and target in words."""
        drafter = self.arguments.get("drafter")
        if not drafter:
            return str(self.arguments["target"])
        kind = self.arguments["drafter_kind"]
        kind = next((f" ({each.title})" for each in architectures() if each.kind == kind), "")
        nodes = self.arguments.get("draft_tree")
        form = "chains" if self.arguments.get("draft_tree_width") == 1 else "trees"
        what = f"drafting {form} of {nodes} nodes" if nodes else "drafting"
        return f"{drafter}{kind} {what} for {self.arguments['target']}"

    @property
    def labelled(self) -> list[tuple[str, Summary]]:
        """As `Section.labelled`, of the first section."""
        return self.sections[0].labelled

    def to_json(self) -> dict[str, Any]:
        """Returns strict JSON values; figures that could not be measured are None instead of NaN."""
        values = {
            "schema_version": SCHEMA_VERSION,
            "environment": asdict(self.environment),
            "arguments": self.arguments,
            "bootstrap": {"confidence": CONFIDENCE, "resamples": RESAMPLES, "seed": SEED},
            "warnings": list(self.warnings),
            "recommendation": self.recommendation,
            "sweeps": self.sweeps,
            "draft_recall": self.recall,
            "distribution_test": self.distribution,
            "sections": [section.to_json() for section in self.sections],
        }
        return finite(values)
