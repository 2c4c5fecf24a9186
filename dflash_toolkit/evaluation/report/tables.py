"""The tables of a report and the definitions of its figures, for Markdown and HTML."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..measure.drafting import drafts_of
from .results import Report, Section, Summary
from .table import MISSING, Table, between, number, percent, times

SHOWN_DIFFERENCES = 20

DEFINITIONS = (
    (
        "Acceptance length τ",
        "Tokens committed per verify step, including the target's bonus token. Pooled: all tokens over all steps; "
        "mean: the average τ of the requests. The first token of an answer comes from the prefill and belongs to no "
        "step.",
    ),
    (
        "Intervals",
        "95 % intervals in brackets, by a bootstrap over requests: 95 of 100 repetitions with other requests of the "
        "same kind would give a figure inside.",
    ),
    (
        "Accepted at slot k",
        "The share of steps that accepted at least k drafts, among steps in which slot k was judged. A slot is judged "
        "if it was drafted (blocks are cut near the token limit) and is part of the answer (not after a stop token). "
        "Given the slot before: the same, among the steps that accepted at least k-1 drafts.",
    ),
    (
        "Tokens per second",
        "Tokens committed by steps over the time of those steps, without the prefill. The rate is per request, also "
        "with concurrent requests (max_concurrency). Decoding with and without the drafter uses the same runtime "
        "(`engine` is the one of dflash-serve, `reference` the readable definition on Hugging Face modules), machine "
        "and run. Every step with the drafter drafts a full block.",
    ),
    (
        "Identical to plain",
        "Requests with the same tokens as without a drafter. For the others, the regret at the first difference of "
        "greedy answers is the target's log-probability of its best token minus that of the drafted one, in nats and "
        "fp32. Near zero it is a tie decided by rounding; a large regret is a defect. Answers with sampled drafts "
        "(draft_sample_method probabilistic) have the same distribution as the plain ones but differ from them, so "
        "they are not compared.",
    ),
)


def identical(summary: Summary) -> str:
    """Writes the number of answers equal to the plain ones; a share would round one defect in thousands to 100 %."""
    return MISSING if summary.identical is None else f"{summary.identical:,} of {summary.drafted.answers:,}"


def summary_table(report: Report | Section, caption: str = "Results per prompt set") -> Table:
    """Returns the main figures; without a baseline, columns that need one are absent."""
    return _summary_table(caption, report.labelled, bool(report.overall.plain))


def _summary_table(caption: str, labelled: Iterable[tuple[str, Summary]], baseline: bool, label: str = "Set") -> Table:
    header = [label, "Requests", "Tokens", "Steps", "τ pooled", "τ mean", "Tokens/s"]
    if baseline:
        header += ["Plain tokens/s", "Speed-up", "Identical to plain"]
    rows = []
    for name, summary in labelled:
        drafted, plain = summary.drafted, summary.plain
        row = [name, *(f"{n:,}" for n in (drafted.answers, drafted.tokens, drafted.steps))]
        within = summary.intervals
        row += [between(number(drafted.tau_pooled), within["tau_pooled"])]
        row += [between(number(drafted.tau_mean), within["tau_mean"]), number(drafted.tokens_per_second, 1)]
        if plain:
            row += [number(plain.tokens_per_second, 1), between(times(summary.speedup), within["speedup"])]
            row += [identical(summary)]
        rows.append(tuple(row))
    return Table(caption, tuple(header), tuple(rows))


def ways_table(report: Report) -> Table | None:
    """Returns the pooled figures by section; None for one section."""
    ways = [(section.name, section.overall) for section in report.sections]
    found = _summary_table("All sets, by the way of decoding", ways, bool(report.overall.plain))
    return found if len(ways) > 1 else None


def category_table(section: Section) -> Table | None:
    """Returns the figures by category of sets with several; None if there is no such set."""
    kinds = [
        (f"{name}: {kind}", summary)
        for name, result in section.sets.items()
        for kind, summary in result.categories.items()
        if len(result.categories) > 1
    ]
    return _summary_table("Results by category", kinds, bool(section.overall.plain)) if kinds else None


def prompt_length_table(section: Section) -> Table | None:
    """Returns the figures by the prompt's length; None if all prompts are in one group."""
    groups = section.by_prompt_tokens.items()
    caption = "All sets, by the prompt's length in tokens"
    return _summary_table(caption, groups, bool(section.overall.plain), "Prompt tokens") if groups else None


PERCENTILES = ("First token, ms: p50", "p90", "p99", "Between steps, ms: p50", "p90", "p99")


def latency_table(section: Section) -> Table:
    """Returns latencies, and the energy per token."""
    header = ["Set", *PERCENTILES, "J/token"]
    plain = bool(section.overall.plain)
    rows = []
    for name, summary in section.labelled:
        for prefix, how in (("", ", drafted"), ("plain_", ", plain"))[: 1 + plain]:
            row = [name + (how if plain else ""), *_percentiles(summary.latencies, prefix)]
            joules = summary.plain_joules_per_token if prefix else summary.joules_per_token
            rows.append((*row, number(joules, 3)))
    return Table("Latency and energy", tuple(header), tuple(rows))


def load_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """Returns latencies by concurrency."""
    rows = []
    for point in points:
        plain = point["plain_tokens_per_second"] is not None
        for prefix, how in (("", ", drafted"), ("plain_", ", plain"))[: 1 + plain]:
            rows.append((f"{point['concurrency']:,}{how if plain else ''}", *_percentiles(point, prefix)))
    return Table("Latency by requests at a time", ("Requests at a time", *PERCENTILES), tuple(rows))


def _percentiles(latencies: Mapping[str, Any], prefix: str) -> list[str]:
    """Returns the cells of `PERCENTILES`, from figures by their names in `report.json`."""
    found = [latencies[f"{prefix}{name}_seconds"] or {} for name in ("time_to_first_token", "inter_token_latency")]
    return [number(_milli(spread.get(p)), 1) for spread in found for p in ("p50", "p90", "p99")]


def _milli(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


SWEPT = {
    "draft_length": ("num_speculative_tokens", "Drafted tokens a step"),
    "concurrency": ("concurrency", "Requests at a time"),
    "context_length": ("context_length", "Tokens of the prompt"),
}


def sweep_tables(sweeps: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Table]:
    """Returns the points of every sweep, and latencies under load."""
    found = [sweep_table(name, points) for name, points in sweeps.items() if name in SWEPT]
    if loads := sweeps.get("concurrency"):
        found.append(load_table(loads))
    if drafting := sweeps.get("draft_tree"):
        found.append(drafting_table(drafting))
    return found


def drafting_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """Returns the figures of each way to draft at each load."""
    header = (
        "Drafts, requests at a time",
        "Requests",
        "τ pooled",
        "Tokens/s",
        "Over blocks",
        "Time per token, p50, ms",
    )
    rows = [
        (
            f"{drafts_of(point).name}, {point['concurrency']:,}",
            f"{point['requests']:,}",
            number(point["tau_pooled"]),
            number(point["tokens_per_second"], 1),
            between(times(point["over_blocks"]), point["over_blocks_ci95"]),
            number(_milli((point["time_per_output_token_seconds"] or {}).get("p50")), 2),
        )
        for point in points
    ]
    return Table("Ways to draft, as a server runs them", header, tuple(rows))


def sweep_table(name: str, points: Sequence[Mapping[str, Any]]) -> Table:
    """Returns the points of a sweep."""
    key, what = SWEPT[name]
    by_length = all("tau_over_shortest" in point for point in points)
    over = ("τ over the shortest",) if by_length else ()
    header = (what, "Requests", "τ pooled", *over, "Tokens/s", "Plain tokens/s", "Speed-up")
    rows = [
        (
            f"{point[key]:,}",
            f"{point['requests']:,}",
            between(number(point["tau_pooled"]), point.get("tau_pooled_ci95")),
            *((between(times(point["tau_over_shortest"]), point["tau_over_shortest_ci95"]),) if by_length else ()),
            number(point["tokens_per_second"], 1),
            number(point["plain_tokens_per_second"], 1),
            between(times(point["speedup"]), point["speedup_ci95"]),
        )
        for point in points
    ]
    return Table(f"{what}: every point", header, tuple(rows))


def slot_tables(report: Report) -> tuple[Table, Table]:
    """Returns acceptance per slot: at least k drafts accepted, and slot k accepted given slot k - 1."""
    header = ("Set", *(str(slot) for slot in range(1, report.block_size)))

    def rows(shares: Iterable[tuple[str, tuple[float, ...]]]) -> tuple[tuple[str, ...], ...]:
        return tuple((name, *(percent(share, 0) for share in values)) for name, values in shares)

    return (
        Table(
            "Share of steps that accept at least k drafts, by slot k",
            header,
            rows((name, summary.drafted.accepted_per_position) for name, summary in report.labelled),
        ),
        Table(
            "Share of those with slot k-1 accepted that accept slot k, by slot k",
            header,
            rows((name, summary.drafted.accepted_given_previous) for name, summary in report.labelled),
        ),
    )


def recall_table(report: Report) -> Table | None:
    """Returns how often the target's token is among the drafter's best; None if it was not measured."""
    if report.recall is None:
        return None
    found = report.recall["recall_at_k"]
    return Table(
        f"Share of {report.recall['anchors']:,} drafts with the target's token among the drafter's best of slot k",
        ("Among the best", *(str(slot) for slot in range(1, report.block_size))),
        tuple((best, *(percent(share, 0) for share in shares)) for best, shares in found.items()),
    )


def lengths_table(report: Report) -> Table:
    """Returns how many steps committed 1..S tokens."""
    return Table(
        "Verify steps by the number of tokens they committed",
        ("Set", *(str(length) for length in range(1, report.block_size + 1))),
        tuple((name, *(f"{n:,}" for n in summary.drafted.accepted_lengths)) for name, summary in report.labelled),
    )


def differences_table(report: Report) -> Table | None:
    """Returns the first differences from plain answers, largest regret first; None if there are none."""
    found = [(name, request, d) for name, result in report.sets.items() for request, d in result.differences]
    if not found:
        return None
    # NaN comes first: the target's logits are broken
    regrets = (0.0 if d.regret_nats is None else d.regret_nats for _, _, d in found)
    order = {i: math.inf if math.isnan(regret) else regret for i, regret in enumerate(regrets)}
    shown = [found[i] for i in sorted(order, key=lambda i: order[i], reverse=True)[:SHOWN_DIFFERENCES]]
    rest = "" if len(shown) == len(found) else f" (the {len(shown)} largest of {len(found)}; report.json has all)"
    return Table(
        f"First differences from plain decoding{rest}",
        ("Set", "Request", "Position", "Plain token", "Drafted token", "Regret, nats"),
        tuple(
            (
                name,
                request.removeprefix(f"{name}/"),
                str(d.position),
                repr(d.plain_text),
                repr(d.drafted_text),
                number(d.regret_nats, 4),
            )
            for name, request, d in shown
        ),
    )


def setup_table(report: Report) -> Table:
    """Lists environment and arguments that have a value.

    For names in both (`device`, `dtype`) it shows the value that was used, not the requested one.
    """
    found = asdict(report.environment)
    values = found | report.arguments | found
    cells = ((name, _plain(_short(value) if "sha256" in name else value)) for name, value in values.items())
    rows = tuple(row for row in cells if row[1] != MISSING)
    return Table("Environment and arguments", ("Name", "Value"), rows, numeric=False)


def _short(value: object) -> object:
    """Shortens hashes; report.json has all of them."""
    if isinstance(value, dict):
        return {key: _short(v) for key, v in value.items()}
    return f"{value[:12]}…" if isinstance(value, str) else value


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_plain(v)}" for key, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return MISSING if value is None else str(value)
