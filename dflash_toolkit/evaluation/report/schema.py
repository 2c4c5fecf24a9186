"""The form of `report.json` and `compare.json`, and the reader of reports. Imports no torch.

The types below are the form; msgspec makes JSON Schemas of them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from ...command_line import list_options
from ...config import UserError

SCHEMA_VERSION = 2
COMPARE_VERSION = 1

Count = Annotated[int, Meta(ge=0, le=2**53)]  # whole in every JSON reader
Seconds = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Number = float | None  # null could not be measured
Interval = Annotated[
    tuple[Number, Number] | None,
    Meta(description="Low and high end of a 95 % interval, by a bootstrap over requests; null if it cannot be made."),
]


class Spread(TypedDict):
    """Mean and percentiles."""

    mean: Number
    p50: Number
    p90: Number
    p99: Number


class Latencies(TypedDict):
    time_to_first_token_seconds: Spread | None
    inter_token_latency_seconds: Annotated[Spread | None, Meta(description="Between the steps of an answer.")]
    plain_time_to_first_token_seconds: Spread | None
    plain_inter_token_latency_seconds: Spread | None


class SummaryForm(Latencies):
    """The figures of some requests; those of plain decoding are null without a baseline."""

    requests: Count
    generated_tokens: Annotated[int, Meta(ge=0, description="First and stop tokens included.")]
    verify_steps: Annotated[int, Meta(ge=0, description="Forwards of the target after the prefills, with the drafter.")]
    tau_pooled: Annotated[Number, Meta(description="Tokens committed by steps over steps, the bonus token included.")]
    tau_pooled_ci95: Interval
    tau_mean: Annotated[Number, Meta(description="Mean of the requests' own acceptance lengths.")]
    tau_mean_ci95: Interval
    accepted_per_position: Annotated[
        list[Share | None],
        Meta(description="By slot 1..S-1: share of the steps that judged the slot and accepted at least so many."),
    ]
    accepted_per_position_ci95: list[Interval]
    accepted_given_previous: Annotated[
        list[Share | None], Meta(description="The same among the steps that accepted the slot before.")
    ]
    accepted_given_previous_ci95: list[Interval]
    accepted_lengths: Annotated[
        list[Count], Meta(min_length=1, description="Number of steps that committed 1..S tokens.")
    ]
    joules_per_token: Annotated[Number, Meta(description="By the GPU's own counter, over generated tokens.")]
    plain_joules_per_token: Number
    prefill_seconds: Annotated[float, Meta(ge=0, description="Sum over requests.")]
    decode_seconds: Annotated[float, Meta(ge=0, description="Sum over requests, of the steps after the prefills.")]
    tokens_per_second: Annotated[Number, Meta(description="Tokens committed by steps over decode_seconds.")]
    tokens_per_second_ci95: Interval
    plain_prefill_seconds: Seconds | None
    plain_decode_seconds: Seconds | None
    plain_tokens_per_second: Number
    plain_tokens_per_second_ci95: Interval
    speedup: Annotated[Number, Meta(description="tokens_per_second over plain_tokens_per_second.")]
    speedup_ci95: Interval
    identical_to_plain: Annotated[
        Share | None,
        Meta(description="Share of requests with the plain tokens; null if drafts were sampled."),
    ]
    max_regret_nats: Annotated[Number, Meta(description="Largest regret_nats of the differences.")]


class DifferenceForm(TypedDict):
    """A request with another answer than the plain one."""

    id: str
    position: Annotated[int, Meta(ge=0, description="0-based, in the answer: the first token that differs.")]
    plain_token: Count
    drafted_token: Count
    plain_text: str
    drafted_text: str
    regret_nats: Annotated[
        Number,
        Meta(description="Log-probability of the target's best token minus that of the drafted one, in fp32."),
    ]


class RequestForm(TypedDict):
    id: str
    category: str | None
    turn: Annotated[int, Meta(ge=1, description="Of its conversation; the turns of one follow each other.")]
    prompt_tokens: Count
    prompt_text: Annotated[str, Meta(description="As the chat template renders it.")]
    tokens: Annotated[int, Meta(ge=0, description="Of the answer, stop token included.")]
    token_ids: list[Count]
    token_texts: Annotated[list[str], Meta(description="One a token; together they are the answer's text.")]
    steps: Count
    drafted_per_step: list[Count]
    accepted_per_step: list[Count]
    committed_per_step: Annotated[list[Count], Meta(description="The first token comes from the prefill.")]
    seconds_per_step: list[float]
    offered_per_step: NotRequired[
        Annotated[
            list[list[list[tuple[Count, Share]]]],
            Meta(description="Of draft trees: at each place the tokens and their probabilities."),
        ]
    ]
    offered_texts: NotRequired[Annotated[dict[str, str], Meta(description="Text of every id in offered_per_step.")]]
    tau: Number
    finish_reason: Literal["stop", "length"] | None
    answer_sha256: Annotated[str, Meta(description="First 16 digits of the SHA-256 of token_ids as JSON.")]
    identical: bool | None
    time_to_first_token_seconds: Seconds
    decode_seconds: Seconds
    plain_tokens: Annotated[int, Meta(ge=0, le=2**24)] | None
    plain_time_to_first_token_seconds: Seconds | None
    plain_decode_seconds: Seconds | None


class SetForm(SummaryForm):
    categories: dict[str, SummaryForm]
    differences: list[DifferenceForm]
    per_request: list[RequestForm]


class SectionForm(TypedDict):
    """All sets, measured in one setting."""

    name: str
    temperature: Seconds
    thinking: bool | None
    overall: SummaryForm
    by_prompt_tokens: NotRequired[
        Annotated[
            dict[str, SummaryForm],
            Meta(description="By the prompt's tokens, as 513-2048, if the prompts are in more than one such group."),
        ]
    ]
    sets: Annotated[dict[str, SetForm], Meta(min_length=1)]


class EnvironmentForm(TypedDict):
    dflash_toolkit: str
    torch: str
    transformers: str
    python: str
    platform: str
    device: str
    device_name: str
    dtype: str
    threads: Count
    date: Annotated[str, Meta(description="UTC, ISO 8601.")]


class ArgumentsForm(TypedDict):
    """Options of the run, and hashes of its models and prompts; there are more than these."""

    runtime: str | None
    block_size: Count | None
    max_tokens: Any
    prompt_tokens_sha256: dict[str, str]
    target: NotRequired[str | None]
    drafter: NotRequired[str | None]
    drafter_kind: NotRequired[str | None]
    baseline: NotRequired[bool]
    max_concurrency: NotRequired[Annotated[int, Meta(ge=1)]]
    target_sample_sha256: NotRequired[str | None]
    prompt_file_sha256: NotRequired[dict[str, str] | None]
    skipped_rows: NotRequired[dict[str, Count]]


class BootstrapForm(TypedDict):
    confidence: float
    resamples: Count
    seed: Count


class DraftingForm(TypedDict):
    """The results of one way to draft at one load."""

    concurrency: Annotated[int, Meta(ge=1)]
    drafts: Literal["blocks", "chains", "trees"]
    draft_tree: Count
    draft_tree_width: Count | None
    tokens_per_second: Number
    over_blocks: Number
    over_blocks_ci95: Interval


class DraftingAdvice(DraftingForm):
    command: str


class RecommendationForm(TypedDict):
    use_drafter: Annotated[bool | None, Meta(description="null: the interval holds 1.")]
    num_speculative_tokens: Count
    max_concurrency: Count | None
    speedup: Number
    speedup_ci95: Interval
    drafting: NotRequired[list[DraftingAdvice]]
    reason: str


class LengthPoint(SummaryForm):
    num_speculative_tokens: Count


class ContextPoint(SummaryForm):
    context_length: Count
    tau_over_shortest: NotRequired[Annotated[Number, Meta(description="tau_pooled over that of the shortest prompts.")]]
    tau_over_shortest_ci95: NotRequired[Interval]


class LoadPoint(Latencies):
    concurrency: Count
    requests: Count
    tau_pooled: Number
    tokens_per_second: Number
    plain_tokens_per_second: Number
    speedup: Number
    speedup_ci95: Interval
    time_per_output_token_seconds: Spread | None
    plain_time_per_output_token_seconds: Spread | None


class DraftingPoint(DraftingForm):
    requests: Count
    tau_pooled: Number
    time_to_first_token_seconds: Spread | None
    inter_token_latency_seconds: Spread | None
    time_per_output_token_seconds: Spread | None


class SweepsForm(TypedDict, total=False):
    draft_length: list[LengthPoint]
    context_length: list[ContextPoint]
    concurrency: list[LoadPoint]
    draft_tree: list[DraftingPoint]


class DistributionForm(TypedDict):
    temperature: float
    prompts: Count
    samples: Count
    tokens: Count
    permutations: Count
    statistic: float
    p_value: float


class RecallForm(TypedDict):
    requests: Count
    anchors: Count
    recall_at_k: Annotated[
        dict[str, list[Share | None]],
        Meta(description="By k and slot: how often the answer's token is among the drafter's k best."),
    ]


class ReportForm(TypedDict):
    """report.json of dflash-eval"""

    schema_version: Literal[2]
    environment: EnvironmentForm
    arguments: ArgumentsForm
    bootstrap: BootstrapForm
    warnings: list[str]
    recommendation: RecommendationForm | None
    sweeps: SweepsForm
    distribution_test: DistributionForm | None
    draft_recall: RecallForm | None
    sections: Annotated[list[SectionForm], Meta(min_length=1)]


# ---- comparisons --------------------------------------------------------------------------------------------------


class StatisticsForm(BootstrapForm):
    permutations: Count


class RunForm(TypedDict):
    name: str
    report: Annotated[str, Meta(description="Where it was read.")]
    target: str | None
    drafter: str | None
    drafter_kind: str | None
    runtime: str | None
    block_size: Count | None
    device_name: str
    dtype: str
    threads: Count
    dflash_toolkit: str
    torch: str
    date: str


class Change(TypedDict):
    """A figure of a run minus that of the first; without interval and p-value for few requests."""

    value: Number
    ci95: Interval
    p_value: Share | None


class SlotChanges(TypedDict):
    value: list[Number] | None
    ci95: list[Interval] | None
    p_value: None


class Changes(TypedDict):
    """Differences by figure; null if it was not compared."""

    tau_pooled: Change | None
    tau_mean: Change | None
    tokens_per_second: Change | None
    speedup: Change | None
    accepted_per_position: SlotChanges | None


class RunFigures(TypedDict):
    name: str
    tau_pooled: Number
    tau_mean: Number
    tokens_per_second: Number
    speedup: Number
    accepted_per_position: list[Number] | None
    tau_pooled_ci95: Interval
    tau_mean_ci95: Interval
    tokens_per_second_ci95: Interval
    speedup_ci95: Interval
    accepted_per_position_ci95: list[Interval] | None
    identical_to_plain: Share | None
    same_answers: Annotated[Share | None, Meta(description="Conversations answered as by the first run.")]
    difference: NotRequired[Changes]


class Scope(TypedDict):
    requests: Annotated[int, Meta(ge=1, description="Conversations that all runs have.")]
    runs: Annotated[list[RunFigures], Meta(min_length=2)]


class ComparedSection(TypedDict):
    name: str
    sets: dict[str, Scope]
    overall: Scope


class ComparisonForm(TypedDict):
    """compare.json of dflash-eval compare"""

    schema_version: Literal[1]
    statistics: StatisticsForm
    warnings: list[str]
    runs: Annotated[list[RunForm], Meta(min_length=2)]
    sections: Annotated[list[ComparedSection], Meta(min_length=1)]


# ---- reading ------------------------------------------------------------------------------------------------------


def report_schema() -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of `report.json`."""
    return _schema(ReportForm)


def compare_schema() -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of `compare.json`."""
    return _schema(ComparisonForm)


def _schema(form: Any) -> dict[str, Any]:
    """Returns a schema that refuses keys it does not know, except of arguments."""
    found = msgspec.json.schema(form)
    parts = found["$defs"]
    for name, part in parts.items():
        if "properties" in part and name != "ArgumentsForm":
            part["additionalProperties"] = False
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **parts.pop(form.__name__), "$defs": parts}


def read_report(path: Path) -> dict[str, Any]:
    """Reads a report from a file or folder. Raises UserError if it is not a valid report, or of another version."""
    path = path / "report.json" if path.is_dir() else path
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: no report of dflash-eval ({error})") from error
    version = report.get("schema_version", report.get("schema")) if isinstance(report, dict) else None
    if version is None:
        raise UserError(f"{path}: no report of dflash-eval: it has no schema_version")
    if version != SCHEMA_VERSION:
        raise UserError(f"{path}: schema_version is {version}, but this release reads {SCHEMA_VERSION}; measure again")
    try:
        msgspec.convert(report, ReportForm)
        _check_requests(report)
    except (msgspec.ValidationError, ValueError) as error:
        raise UserError(f"{path}: no valid report of dflash-eval: {error}; measure again") from error
    return report


def _check_requests(report: dict[str, Any]) -> None:
    """Raises ValueError if the fields of a request contradict each other, which the schema cannot say."""
    for i, section in enumerate(report["sections"]):
        for name, found in section["sets"].items():
            for row, request in enumerate(found["per_request"]):
                if wrong := _contradiction(request, first=row == 0):
                    raise ValueError(f"{wrong} - at `$.sections[{i}].sets[{name!r}].per_request[{row}]`")


def _contradiction(request: dict[str, Any], first: bool) -> str | None:
    """Returns what contradicts itself in a request, in words. Args: first: of its set."""
    steps = {key: len(request[key]) for key in ("drafted_per_step", "accepted_per_step", "committed_per_step")}
    if set(steps.values()) != {request["steps"]}:
        return f"`steps` is {request['steps']}, but " + ", ".join(f"{key} has {count}" for key, count in steps.items())
    tokens = len(request["token_ids"])
    if not sum(request["committed_per_step"]) <= request["tokens"] == tokens:
        committed = sum(request["committed_per_step"])
        return f"`tokens` is {request['tokens']}, but token_ids has {tokens} and committed_per_step {committed}"
    plain = ("plain_tokens", "plain_time_to_first_token_seconds", "plain_decode_seconds")
    if len({request[key] is None for key in plain}) > 1:
        return f"some of {', '.join(plain)} are null"
    if first and request["turn"] != 1:
        return f"the first `turn` is {request['turn']}"
    return None


def split_places(words: Sequence[str], options: type) -> tuple[list[Path], list[str]]:
    """Splits a command line into the files at its start and the `options` after them."""
    keys = {key for key, _ in list_options(options)}
    count = next((i for i, word in enumerate(words) if word[:1] == "-" or word.partition("=")[0] in keys), len(words))
    return [Path(word) for word in words[:count]], list(words[count:])
