"""dflash-eval compare: compares runs of the same requests and tests their differences."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..command_line import parse_cli, run_command
from ..config import UserError, option
from ..files import finite
from ..generation import Generation, Step
from .report.schema import COMPARE_VERSION, read_report, split_places
from .stats.bootstrap import CONFIDENCE, RESAMPLES, SEED, Array, columns, figures, intervals_of, resampled_sums
from .stats.paired import PERMUTATIONS, difference_intervals, figure_differences, p_values

PROG = "dflash-eval compare REPORT REPORT ..."
DESCRIPTION = """\
Compares reports of dflash-eval (report.json, or its directory). All figures are of the requests that every report has.
Every report is compared with the first: differences with intervals of a paired bootstrap over requests, and p-values
of a paired permutation test."""
EXAMPLE = "dflash-eval compare report-before report-after --output comparison"

COMPARED = ("tau_pooled", "tau_mean", "tokens_per_second", "speedup", "accepted_per_position")
SPEEDS = ("tokens_per_second", "speedup")
LEAST_PAIRS = 6  # with fewer, a permutation test cannot have a p-value below 0.05
SAMPLED = ("top_p", "top_k", "min_p", "seed", "draft_sample_method")  # do not affect greedy answers
SAMPLING = ("max_tokens", "ignore_eos", "multi_turn", "chat_template_sha256", "kv_cache_dtype", *SAMPLED)
OLDER = {"kv_cache_dtype": "auto"}  # arguments of reports that do not have them

Row = dict[str, Any]
Key = tuple[str, str, str, int]  # set, id and text of the first prompt, and a number for duplicates


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareConfig:
    """The options of `dflash-eval compare`."""

    output: str | None = option(
        None,
        "directory for compare.json, compare.md and compare.html (default: print only)",
        common=True,
        metavar="PATH",
    )


@dataclass(frozen=True, slots=True)
class Run:
    """A report and its name in the comparison."""

    name: str
    place: str
    report: dict[str, Any]
    renamed: tuple[tuple[str, str], ...] = ()  # its own names of sets, and those of the first run

    @property
    def arguments(self) -> dict[str, Any]:
        return self.report["arguments"]

    @property
    def machine(self) -> tuple[Any, ...]:
        """Hardware, dtype and threads, which affect speed."""
        environment = self.report["environment"]
        threads = environment["threads"] if environment["device"] == "cpu" else None
        return environment["device_name"], environment["dtype"], threads

    @property
    def load(self) -> int:
        """Number of concurrent requests."""
        return int(self.arguments.get("max_concurrency", 1))


def main(argv: Sequence[str]) -> int:
    """Runs the command on the words after `compare`; returns its exit code."""
    return run_command(lambda: _run(*parse(argv)))


def parse(argv: Sequence[str]) -> tuple[list[Path], CompareConfig]:
    """Raises UserError if the command line is not reports and options."""
    places, rest = split_places(argv, CompareConfig)
    config = parse_cli(CompareConfig, rest, PROG, DESCRIPTION, EXAMPLE)
    if len(places) < 2:
        raise UserError(f"expected two reports or more before the options, got {len(places)}: {PROG}")
    return places, config


def _run(places: Sequence[Path], config: CompareConfig) -> None:
    comparison = compare(named_runs([(str(place), read_report(place)) for place in places]))
    # imports torch, which errors should not wait for
    from .report.comparison import show_comparison, write_comparison

    output = None if config.output is None else Path(config.output)
    if output is not None:
        write_comparison(comparison, output)
    show_comparison(comparison, output)


def named_runs(reports: Sequence[tuple[str, dict[str, Any]]]) -> list[Run]:
    """Names each run by its drafter, or by its place where two runs have the same drafter.

    Raises:
        UserError: a report is given twice.
    """
    places = [place for place, _ in reports]
    drafters = [str(report["arguments"].get("drafter") or place) for place, report in reports]
    names = _short_names(drafters) or _short_names(places)
    if names is None:
        raise UserError(f"{', '.join(places)}: a report is given twice")
    return [Run(name, place, report) for name, (place, report) in zip(names, reports, strict=True)]


def _short_names(paths: Sequence[str]) -> list[str] | None:
    """Returns the shortest endings, of two parts or more, that differ; None if two paths are the same."""
    parts = [[part for part in Path(path).parts if part != "/"] for path in paths]
    for length in range(2, max(2, *map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return None


def compare(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the contents of compare.json, as strict JSON values.

    Raises:
        UserError: the targets differ, or no request was decoded by all runs in the same setting.
    """
    first = runs[0]
    for run in runs[1:]:
        _check_target(first, run)
    names = [s["name"] for s in first.report["sections"] if all(_section(run, s["name"]) is not None for run in runs)]
    if not names:
        raise UserError(
            "the runs have no way of decoding in common: "
            + "; ".join(f"{run.name}: {', '.join(s['name'] for s in run.report['sections'])}" for run in runs)
        )
    runs = [first, *(_with_sets_of(first, run) for run in runs[1:])]
    warnings = [warning for run in runs[1:] for warning in _warnings(first, run)]
    same_machine = all((run.machine, run.load) == (first.machine, first.load) for run in runs)
    sections = [_compared(runs, name, same_machine, warnings) for name in names]
    return finite(
        {
            "schema_version": COMPARE_VERSION,
            "statistics": {
                "confidence": CONFIDENCE,
                "resamples": RESAMPLES,
                "permutations": PERMUTATIONS,
                "seed": SEED,
            },
            "warnings": list(dict.fromkeys(warnings)),
            "runs": [_described(run) for run in runs],
            "sections": sections,
        }
    )


def _described(run: Run) -> dict[str, Any]:
    environment, arguments = run.report["environment"], run.arguments
    shown = ("target", "drafter", "drafter_kind", "runtime", "block_size")
    return {
        "name": run.name,
        "report": run.place,
        **{key: arguments.get(key) for key in shown},
        **{key: environment[key] for key in ("device_name", "dtype", "threads", "dflash_toolkit", "torch", "date")},
    }


# ---- conditions of a comparison -----------------------------------------------------------------------------------


def _check_target(first: Run, run: Run) -> None:
    here, there = ((r.arguments.get("target"), r.arguments.get("target_sample_sha256")) for r in (first, run))
    # one target has other hashes in other dtypes, and other names on other machines
    if here[0] != there[0] and (here[1] != there[1] or here[1] is None):
        raise UserError(f"{run.name} was measured on {there[0]}, {first.name} on {here[0]}: compare runs of one target")


def _with_sets_of(first: Run, run: Run) -> Run:
    """Gives sets of a run the names that the first run has for the same prompt file, if that is unambiguous."""
    here, there = (r.arguments.get("prompt_file_sha256") or {} for r in (first, run))
    free = {name: digest for name, digest in here.items() if name not in there}
    renamed = {}
    for own, digest in there.items():
        same = [name for name, other in free.items() if other == digest]
        if own not in here and len(same) == 1 and list(there.values()).count(digest) == 1:
            renamed[own] = same[0]
    if not renamed:
        return run
    sections = [
        section | {"sets": {renamed.get(name, name): found for name, found in section["sets"].items()}}
        for section in run.report["sections"]
    ]
    return replace(run, report=run.report | {"sections": sections}, renamed=tuple(renamed.items()))


def _warnings(first: Run, run: Run) -> list[str]:
    """Returns differences in settings that may change figures."""
    found = []
    here, there = (OLDER | run.arguments for run in (first, run))
    sampled = any(section["temperature"] for section in run.report["sections"])
    for key in SAMPLING:
        if here.get(key) != there.get(key) and (sampled or key not in SAMPLED):
            values = f": {there.get(key)}, not {here.get(key)}" if not key.endswith("sha256") else ""
            found.append(f"{run.name} was decoded with another {key} than {first.name}{values}.")
    weights = {arguments.get("target_sample_sha256") for arguments in (here, there)} - {
        None
    }  # servers do not show theirs
    if len(weights) > 1:
        found.append(f"The target of {run.name} has other weights than that of {first.name}, or another dtype.")
    if run.machine != first.machine:
        found.append(
            f"{run.name} ran on another machine than {first.name} ({_machine_label(run.machine)}, "
            f"not {_machine_label(first.machine)}): speeds are shown, but not compared."
        )
    if run.load != first.load:
        found.append(
            f"{run.name} had {run.load} requests in flight, {first.name} {first.load}: speeds are shown, but "
            f"not compared."
        )
    for own, name in run.renamed:
        found.append(f"Set {own!r} of {run.name} is set {name!r} of {first.name}: both were read from the same file.")
    return found + [f"{r.name}: {warning}" for r in (first, run) for warning in r.report["warnings"]]


def _machine_label(machine: tuple[Any, ...]) -> str:
    name, dtype, threads = machine
    return f"{name}, {dtype}" + (f", {threads} threads" if threads else "")


def _section(run: Run, name: str) -> dict[str, Any] | None:
    return next((section for section in run.report["sections"] if section["name"] == name), None)


def _conversations(section: Mapping[str, Any]) -> dict[Key, list[Row]]:
    """Returns the requests of a section, grouped by conversation."""
    found: dict[Key, list[Row]] = {}
    seen: Counter[tuple[str, str, str]] = Counter()
    for name, result in section["sets"].items():
        for row in result["per_request"]:
            if row["turn"] == 1:
                prompt = name, row["id"], row["prompt_text"]
                current = found[(*prompt, seen[prompt])] = []
                seen[prompt] += 1
            current.append(row)
    return found


# ---- figures ------------------------------------------------------------------------------------------------------


def _compared(runs: Sequence[Run], name: str, same_machine: bool, warnings: list[str]) -> dict[str, Any]:
    """Returns a section of compare.json; adds a warning for skipped requests."""
    requests = [_conversations(_section(run, name) or {}) for run in runs]
    shared = [key for key in requests[0] if all(key in found for found in requests)]
    if not shared:
        sets = "; ".join(
            f"{run.name}: {', '.join(dict.fromkeys(key[0] for key in found))}"
            for run, found in zip(runs, requests, strict=True)
        )
        raise UserError(f"the runs ({name}) have no request of one set, id and text in common; their sets are {sets}")
    for run, found in zip(runs, requests, strict=True):
        if len(found) > len(shared):
            warnings.append(
                f"{run.name} ({name}): {len(found) - len(shared)} of {len(found)} requests are skipped, because "
                f"not all runs have them."
            )
    by_set = {one: [key for key in shared if key[0] == one] for one in dict.fromkeys(key[0] for key in shared)}
    pooled = [(_section(run, name) or {})["overall"] for run in runs]
    block_size = min(len(summary["accepted_lengths"]) for summary in pooled)
    repeats = [summary["identical_to_plain"] is not None for summary in pooled]

    def scope(keys: Iterable[Key]) -> dict[str, Any]:
        rows = [[found[key] for key in keys] for found in requests]
        return _figures_of(runs, rows, block_size, same_machine, repeats)

    return {
        "name": name,
        "sets": {one: scope(keys) for one, keys in by_set.items()},
        "overall": scope(shared),
    }


def _figures_of(
    runs: Sequence[Run],
    rows: Sequence[Sequence[list[Row]]],
    block_size: int,
    same_machine: bool,
    repeats: Sequence[bool],
) -> dict[str, Any]:
    """Returns the figures of each run for some requests, and its difference from the first run.

    Args:
        repeats: whether the answers of each run must equal the plain ones.
    """
    flat = [[row for turns in run for row in turns] for run in rows]
    plain = all(row["plain_decode_seconds"] is not None for run in flat for row in run)
    tables = [_columns(run, block_size, plain) for run in flat]
    answers = [[[row["answer_sha256"] for row in turns] for turns in run] for run in rows]
    found = []
    for place, (run, table) in enumerate(zip(runs, tables, strict=True)):
        figures_here = figures(table.sum(0, keepdims=True), block_size, plain)
        within = intervals_of(figures(resampled_sums(table), block_size, plain), len(table))
        found.append(
            {
                "name": run.name,
                **{key: _values(figures_here.get(key)) for key in COMPARED},
                **{f"{key}_ci95": within.get(key) for key in COMPARED},
                "identical_to_plain": _share([row["identical"] for row in flat[place]]) if repeats[place] else None,
                "same_answers": _share([a == b for a, b in zip(answers[place], answers[0], strict=True)]),
            }
        )
        if place:
            found[-1]["difference"] = _difference(tables[0], table, block_size, plain, same_machine)
    return {"requests": len(rows[0]), "runs": found}


def _difference(first: Array, second: Array, block_size: int, plain: bool, same_machine: bool) -> dict[str, Any]:
    """Returns each figure of the second run minus the first's; None for speeds of different machines.

    Intervals and p-values need at least LEAST_PAIRS requests.
    """
    sums = first.sum(0, keepdims=True), second.sum(0, keepdims=True)
    apart = figure_differences(*sums, block_size, plain)
    enough = len(first) >= LEAST_PAIRS
    within = (
        difference_intervals(first, second, block_size, plain)
        if enough
        else {"accepted_per_position": (None,) * (block_size - 1)}
    )
    chance = p_values(first, second, block_size, plain) if enough else {}
    return {
        key: {"value": _values(apart[key]), "ci95": within.get(key), "p_value": chance.get(key)}
        if key in apart and (same_machine or key not in SPEEDS)
        else None
        for key in COMPARED
    }


def _columns(rows: Sequence[Row], block_size: int, plain: bool) -> Array:
    """Returns `bootstrap.columns` of requests in a report, one row per conversation."""
    drafted = [
        Generation(
            steps=[
                Step(proposed, accepted, (0,) * committed)
                for proposed, accepted, committed in zip(
                    row["drafted_per_step"], row["accepted_per_step"], row["committed_per_step"], strict=True
                )
            ],
            finish_reason=row["finish_reason"],
            decode_s=row["decode_seconds"],
        )
        for row in rows
    ]
    without = [
        Generation(steps=[Step(0, 0, (0,))] * (row["plain_tokens"] - 1), decode_s=row["plain_decode_seconds"])
        for row in rows
        if plain
    ]
    return columns(drafted, without, block_size, [row["turn"] == 1 for row in rows])


def _values(found: Array | None) -> Any:
    """Returns a figure of one sum: a number, one per slot, or None."""
    return None if found is None else found[..., 0].tolist()


def _share(same: Sequence[bool | None]) -> float | None:
    return None if None in same else sum(map(bool, same)) / len(same)
