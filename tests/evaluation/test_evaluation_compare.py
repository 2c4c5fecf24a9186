"""`dflash-eval compare`: pairing, tests of differences, and incomparable runs."""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from conftest import make_drafter
from schemas import validate

from dflash_toolkit import Drafter, SamplingParams, Target, UserError, decode
from dflash_toolkit.decode import generate
from dflash_toolkit.evaluation import EncodedPrompt, ReferencePair, Report, evaluate, write_report
from dflash_toolkit.evaluation.cli import main
from dflash_toolkit.evaluation.compare import compare, named_runs
from dflash_toolkit.evaluation.report.comparison import render_markdown, verdicts
from dflash_toolkit.evaluation.report.schema import compare_schema
from dflash_toolkit.evaluation.stats.bootstrap import columns, figures
from dflash_toolkit.evaluation.stats.paired import difference_intervals, figure_differences, p_values
from dflash_toolkit.generation import Generation, Step

SETS = {
    "sky": [EncodedPrompt(name, [65 + i, 66, 67 + 2 * i]) for i, name in enumerate("abdefg")],
    "<b>": [EncodedPrompt("c", [70]), EncodedPrompt("c", [70])],  # two with the same id and text
}
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def measured(target: Target, right: int, name: str, params: SamplingParams = PARAMS, **more: Any) -> Report:
    """Returns a run of a drafter that drafts the first `right` tokens of a block correctly, and no others."""
    plain = {tuple(p.token_ids): generate(target, None, p.token_ids, params).tokens for p in chain(*SETS.values())}

    def propose(target: Target, drafter: Drafter, context: object, last: int, position: int) -> list[int]:
        slots = drafter.config.block_size - 1
        for prompt, answer in plain.items():
            if (at := position - len(prompt)) < len(answer) and answer[at] == last:
                drafts = (answer[at + 1 :] + [0] * slots)[:slots]
                return [token if i < right else (token + 1) % 200 for i, token in enumerate(drafts)]
        raise AssertionError("no answer goes on so")

    pair = ReferencePair(target, make_drafter(target, **more))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "propose", propose)
        return evaluate(pair, SETS, params, arguments={"drafter": name})


def values(report: Report) -> dict[str, Any]:
    return json.loads(json.dumps(report.to_json()))


@pytest.fixture(scope="module")
def runs(target: Target) -> list[Report]:
    """Returns reports of two drafters of one target; the second has shorter blocks and is better."""
    return [measured(target, 1, "out/first"), measured(target, 3, "out/second", block_size=4)]


@pytest.fixture(scope="module")
def reports(runs: list[Report]) -> list[dict[str, Any]]:
    """Returns JSON without the warning about a busy machine, which is not tested here."""
    return [values(report) | {"warnings": []} for report in runs]


Compared = Callable[..., dict[str, Any]]


@pytest.fixture
def compared(reports: list[dict[str, Any]]) -> Compared:
    """Returns a function that changes the second report and compares both."""

    def run(change: Callable[[dict[str, Any]], object] = lambda report: None) -> dict[str, Any]:
        other = copy.deepcopy(reports[1])
        change(other)
        return compare(named_runs([("A", reports[0]), ("B", other)]))

    return run


# ---- statistics -----------------------------------------------------------------------------------------------


def planted(rng: np.random.Generator, easy: np.ndarray[Any, Any], gain: float) -> np.ndarray[Any, Any]:
    """Returns columns of answers; each request accepts drafts with its own probability, raised by `gain`."""
    answers = []
    for chance in np.clip(easy + gain, 0, 1):
        accepted = (rng.random((12, 4)) < chance).cumprod(-1).sum(-1).tolist()
        steps = [Step(4, count, (7,) * (count + 1)) for count in accepted]
        answers.append(Generation(steps=steps, finish_reason="length", decode_s=12.0))
    return columns(answers, [], 5)


def tau(easy: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return sum((easy**k for k in range(5)), np.zeros_like(easy))


@pytest.mark.slow
def test_paired_tests_find_planted_differences_only() -> None:
    """Requests differ far more than the runs, so only pairing shows the difference."""
    seeds, gain, held, sure, wrong = 60, 0.05, 0, 0, 0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        easy = rng.uniform(0.2, 0.9, 25)
        first, second, same = (planted(rng, easy, more) for more in (0.0, gain, 0.0))
        low, high = difference_intervals(first, second, 5, False)["tau_pooled"]
        held += low <= EXPECTED_GAIN <= high
        sure += p_values(first, second, 5, False)["tau_pooled"] < 0.05
        wrong += p_values(first, same, 5, False)["tau_pooled"] < 0.05
    assert held >= 53
    assert wrong <= 7 < 18 <= sure


EVEN = np.linspace(0.2, 0.9, 10_001)
EXPECTED_GAIN = float(np.mean(tau(EVEN + 0.05) - tau(EVEN)))


def test_few_pairs_use_all_permutations() -> None:
    rng = np.random.default_rng(0)
    first, second = (planted(rng, np.full(4, easy), 0.0) for easy in (0.1, 0.9))
    found = p_values(first, second, 5, False)
    assert found["tau_pooled"] == found["tokens_per_second"] == 2 / 2**4, "only none and all swapped are as far apart"
    assert p_values(first, first, 5, False)["tau_pooled"] == 1.0
    assert "accepted_per_position" not in found


def test_many_pairs_use_seeded_random_permutations() -> None:
    rng = np.random.default_rng(0)
    easy = rng.uniform(0.2, 0.9, 30)
    first, second = planted(rng, easy, 0.0), planted(rng, easy, 0.02)
    found = p_values(first, second, 5, False)
    assert found == p_values(first, second, 5, False)
    assert found["tau_pooled"] == pytest.approx(p_values(second, first, 5, False)["tau_pooled"], abs=0.02)


def test_compare_schema_has_exactly_the_keys_of_a_comparison(compared: Compared) -> None:
    def elsewhere(report: dict[str, Any]) -> None:
        report["environment"]["device_name"] = "another"  # so that speeds are not compared

    for found in (compared(), compared(elsewhere)):
        validate(found, compare_schema)
    for change in (
        lambda found: found.pop("statistics"),
        lambda found: found["runs"][0].update(host="a"),
        lambda found: found["sections"][0]["overall"]["runs"][1]["difference"].pop("speedup"),
        lambda found: found["sections"][0]["sets"]["sky"]["runs"][0].update(tau_pooled="2"),
    ):
        broken = compared()
        change(broken)
        with pytest.raises(jsonschema.ValidationError):
            validate(broken, compare_schema)


# ---- a comparison ---------------------------------------------------------------------------------------------


def test_compared_figures_equal_those_of_the_reports(reports: list[dict[str, Any]], compared: Compared) -> None:
    found = compared()
    assert (found["schema_version"], [run["name"] for run in found["runs"]]) == (1, ["out/first", "out/second"])
    (section,) = found["sections"]
    assert section["name"] == "greedy" and list(section["sets"]) == ["sky", "<b>"]
    for name, scope in [*section["sets"].items(), ("overall", section["overall"])]:
        assert scope["requests"] == {"overall": 8, "sky": 6, "<b>": 2}[name]
        own = [report["sections"][0] for report in reports]
        own = [one["overall"] if name == "overall" else one["sets"][name] for one in own]
        first, second = scope["runs"]
        for key in ("tau_pooled", "tau_mean", "tokens_per_second", "speedup"):
            assert [first[key], second[key]] == pytest.approx([report[key] for report in own]), key
            assert first[f"{key}_ci95"] == pytest.approx(own[0][f"{key}_ci95"])
            difference = second["difference"][key]
            assert difference["value"] == pytest.approx(second[key] - first[key], abs=1e-9)
            if name == "<b>":
                assert difference["ci95"] is difference["p_value"] is None, "of fewer than 6 requests"
                continue
            assert difference["ci95"][0] <= difference["value"] <= difference["ci95"][1]
            assert 0 < difference["p_value"] <= 1
        assert second["accepted_per_position"] == own[1]["accepted_per_position"], "blocks of 4"
        assert first["accepted_per_position"] == pytest.approx(own[0]["accepted_per_position"][:3])
        # in fp32 the answers do not depend on the drafter
        assert (second["identical_to_plain"], second["same_answers"]) == (1.0, 1.0)
    assert found["warnings"] == []
    first, second = section["overall"]["runs"]
    assert second["tau_pooled"] > first["tau_pooled"] + 0.5 > 2


def test_only_shared_requests_are_compared(reports: list[dict[str, Any]], compared: Compared) -> None:
    def change(report: dict[str, Any]) -> None:
        rows = report["sections"][0]["sets"]["sky"]["per_request"]
        rows[0]["prompt_text"] += "!"

    found = compared(change)
    assert found["sections"][0]["sets"]["sky"]["requests"] == 5
    rows = reports[0]["sections"][0]["sets"]["sky"]["per_request"][1:]
    tau = sum(row["tau"] * row["steps"] for row in rows) / sum(row["steps"] for row in rows)
    assert found["sections"][0]["sets"]["sky"]["runs"][0]["tau_pooled"] == pytest.approx(tau)
    said = "out/first (greedy): 1 of 8 requests are skipped, because not all runs have them."
    assert said in found["warnings"]


def test_comparison_groups_turns_by_conversation(compared: Compared) -> None:
    def change(report: dict[str, Any]) -> None:
        for row in report["sections"][0]["sets"]["<b>"]["per_request"][1:]:
            row["turn"] = 2

    assert compared()["sections"][0]["sets"]["<b>"]["requests"] == 2
    found = compared(change)["sections"][0]["sets"]["<b>"]
    assert found["requests"] == 1 and found["runs"][1]["tau_pooled_ci95"] is None


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        (lambda r: r["arguments"].update(max_tokens=7), "decoded with another max_tokens than out/first: 7, not 12."),
        (lambda r: r["arguments"].update(kv_cache_dtype="fp8"), "another kv_cache_dtype than out/first: fp8, not"),
        (lambda r: r["arguments"].update(chat_template_sha256="0"), "decoded with another chat_template_sha256"),
        (
            lambda r: r["arguments"].update(target_sample_sha256="0"),
            "other weights than that of out/first, or another dtype",
        ),
        (lambda r: r.update(warnings=["A noisy machine."]), "out/second: A noisy machine."),
    ],
)
def test_differences_in_settings_cause_warnings(compared: Compared, change: Any, warning: str) -> None:
    assert any(warning in said for said in compared(change)["warnings"])


def test_unknown_target_weights_cause_no_warning(compared: Compared) -> None:
    found = compared(lambda report: report["arguments"].update(target_sample_sha256=None))
    assert not any("other weights" in said for said in found["warnings"])


def test_another_seed_causes_a_warning_only_when_sampling(reports: list[dict[str, Any]]) -> None:
    for temperature, warnings in (
        (0.0, []),
        (1.0, ["out/second was decoded with another seed than out/first: 5, not 0."]),
    ):
        first, second = copy.deepcopy(reports)
        for report in (first, second):
            report["sections"][0]["temperature"] = temperature
        second["arguments"]["seed"] = 5
        assert compare(named_runs([("A", first), ("B", second)]))["warnings"] == warnings


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        (
            lambda report: report["environment"].update(device_name="H200"),
            "out/second ran on another machine than out/first (H200, float32",
        ),
        (
            lambda report: report["arguments"].update(max_concurrency=8),
            "out/second had 8 requests in flight, out/first 1: ",
        ),
    ],
)
def test_speeds_of_other_machines_or_loads_are_not_compared(compared: Compared, change: Any, warning: str) -> None:
    found = compared(change)
    assert warning in found["warnings"][0]
    second = found["sections"][0]["overall"]["runs"][1]
    assert second["speedup"] > 0 and second["difference"]["speedup"] is None
    assert second["difference"]["tau_pooled"]["p_value"] is not None
    (judged,) = verdicts(found)
    assert judged.headline.startswith("out/second accepts more than out/first") and len(judged.points) == 1


def test_targets_with_equal_weights_may_differ_in_name(compared: Compared) -> None:
    assert compared(lambda report: report["arguments"].update(target="/models/tiny"))["warnings"] == []


def _other_target(report: dict[str, Any]) -> None:
    report["arguments"].update(target="large", target_sample_sha256="0")


def _other_texts(report: dict[str, Any]) -> None:
    for result in report["sections"][0]["sets"].values():
        for row in result["per_request"]:
            row["prompt_text"] = "?"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_target, "out/second was measured on large, out/first on tiny-llama: compare runs of one target"),
        (
            _other_texts,
            "no request of one set, id and text in common; their sets are out/first: sky, <b>; out/second: sky, <b>",
        ),
        (
            lambda r: r["sections"][0].update(name="temperature 1"),
            "no way of decoding in common: out/first: greedy; out/second: t",
        ),
    ],
)
def test_incomparable_runs_are_refused(compared: Compared, change: Any, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        compared(change)


def test_without_a_baseline_speedup_is_not_compared(target: Target, compared: Compared) -> None:
    def change(report: dict[str, Any]) -> None:
        for result in report["sections"][0]["sets"].values():
            for row in result["per_request"]:
                row.update(plain_tokens=None, plain_decode_seconds=None, identical=None)

    found = compared(change)
    text, second = render_markdown(found), found["sections"][0]["overall"]["runs"][1]
    assert "Tokens a second: " in text and "Speed-up" not in text
    assert "Speed-up" in render_markdown(compared())
    assert second["difference"]["speedup"] is None and second["difference"]["tokens_per_second"]["value"] is not None
    assert second["identical_to_plain"] is None


def test_answers_without_steps_are_not_compared(target: Target) -> None:
    reports = [values(measured(target, 0, name, SamplingParams(max_tokens=1))) for name in ("a", "b")]
    found = compare(named_runs([("A", reports[0]), ("B", reports[1])]))
    assert found["sections"][0]["overall"]["runs"][1]["difference"]["tau_pooled"]["value"] is None
    assert verdicts(found)[0].headline == "b and a: nothing to compare (greedy, 8 requests)."


def test_figures_of_sums_equal_acceptance() -> None:
    table = planted(np.random.default_rng(0), np.full(3, 0.5), 0.0)
    assert figure_differences(table, table, 5, False)["tau_pooled"].tolist() == [0.0] * 3
    assert figures(table, 5, False)["accepted_per_position"].shape == (4, 3)


def test_few_requests_give_no_verdict_and_one_note(reports: list[dict[str, Any]]) -> None:
    few = copy.deepcopy(reports)
    for report in few:
        del report["sections"][0]["sets"]["sky"]
    found = compare(named_runs([("A", few[0]), ("B", few[1])]))
    (judged,) = verdicts(found)
    assert judged.outcome == "unknown" and judged.headline.startswith("Too few requests to compare out/second with")
    text = render_markdown(found).partition("## Runs")[0]
    assert "p = " not in text and "95 %" not in text and "excludes 0" not in text
    assert text.count("Too few requests") == 1


def test_speed_differences_are_shown_in_per_cent(compared: Compared) -> None:
    first, second = compared()["sections"][0]["overall"]["runs"]
    share = second["tokens_per_second"] / first["tokens_per_second"] - 1
    assert f"({100 * share:+.1f} %)" in render_markdown(compared())


@pytest.mark.parametrize(
    ("drafters", "names"),
    [
        (["demo/drafter", "demo/other"], ["demo/drafter", "demo/other"]),
        (["a/out/drafter", "b/out/drafter"], ["a/out/drafter", "b/out/drafter"]),
        (["drafter", "/x/y/other"], ["drafter", "y/other"]),
        (["same/drafter", "same/drafter"], ["A", "B"]),
    ],
)
def test_runs_are_named_by_their_shortest_unique_path(
    reports: list[dict[str, Any]], drafters: list[str], names: list[str]
) -> None:
    arguments = [r["arguments"] | {"drafter": d} for r, d in zip(reports, drafters, strict=True)]
    found = [report | {"arguments": each} for report, each in zip(reports, arguments, strict=True)]
    assert [run.name for run in named_runs(list(zip("AB", found, strict=True)))] == names


def test_sets_of_the_same_file_are_matched_by_hash(reports: list[dict[str, Any]]) -> None:
    first, second = copy.deepcopy(reports)
    for report, name in ((first, "counting"), (second, "count")):
        report["sections"][0]["sets"][name] = report["sections"][0]["sets"].pop("sky")
        report["arguments"]["prompt_file_sha256"] = {name: "1" * 64, "<b>": "2" * 64}
    found = compare(named_runs([("A", first), ("B", second)]))
    assert found["sections"][0]["sets"]["counting"]["requests"] == 6
    assert (
        "Set 'count' of out/second is set 'counting' of out/first: both were read from the same file."
        in (found["warnings"])
    )
    second["arguments"]["prompt_file_sha256"]["count"] = "3" * 64
    assert list(compare(named_runs([("A", first), ("B", second)]))["sections"][0]["sets"]) == ["<b>"]


# ---- the command ----------------------------------------------------------------------------------------------


@pytest.fixture
def folders(runs: list[Report], tmp_path: Path) -> list[str]:
    """Returns reports of drafters named <i>0, <i>1 and <i>1."""
    for i, (report, drafter) in enumerate(zip([*runs, runs[0]], ("out/<i>0", "out/<i>1", "old/<i>1"), strict=True)):
        write_report(replace(report, arguments=report.arguments | {"drafter": drafter}), tmp_path / f"report{i}")
    return [str(tmp_path / f"report{i}") for i in range(3)]


def test_compare_writes_three_files(folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "compared"
    assert main(["compare", *folders[:2], "--output", str(output)]) == 0
    assert {file.name for file in output.iterdir()} == {"compare.json", "compare.md", "compare.html"}
    found = json.loads((output / "compare.json").read_text(), parse_constant=pytest.fail)
    second = found["sections"][0]["overall"]["runs"][1]
    markdown, page = (output / "compare.md").read_text(), (output / "compare.html").read_text()
    printed = capsys.readouterr().out
    assert "\n| " not in printed and "## Method" not in printed and str(output / "compare.html") in printed
    for text in (f"{second['tau_pooled']:.2f}", f"{second['difference']['tau_pooled']['value']:+.2f}"):
        assert text in markdown and text in page and text in printed
    (judged,) = verdicts(found)
    assert judged.headline in printed and escape(judged.headline) in page and "out/<i>1" in judged.headline
    assert f'class="card verdict {judged.outcome}"' in page
    assert not re.search(r"https?:|<script|<link|<img|@import|url\((?!#)|<i>", page)
    assert page.count('role="img"') == 4  # tau, two differences, slots


def test_runs_of_one_drafter_are_named_by_their_folders(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *folders]) == 0
    printed = capsys.readouterr().out
    assert all(f"greedy: {name} " in printed or f"sky: {name} " in printed for name in ("out/<i>0", "old/<i>1"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{0}"], "expected two reports or more before the options, got 1"),
        (["{0}", "{0}"], "a report is given twice"),
        (["{0}", "/no/such"], "/no/such: cannot be read (No such file"),
        (["{0}", "{1}", "--outptu", "x"], "did you mean --output?"),
        (["{0}", "{1}", "--output", "{0}/report.json"], "cannot write the report"),
    ],
)
def test_bad_input_is_one_line(
    folders: list[str], capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["compare", *(word.format(*folders) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and message in err and err.count("\n") == 1 and out == ""
