"""`dflash-eval check`: held and missed limits, and invalid arguments."""

import functools
import json
import operator
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import LONG_RUN
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT

from dflash_toolkit import Drafter, SamplingParams, Target
from dflash_toolkit.evaluation import EncodedPrompt, EnginePair, evaluate, write_report
from dflash_toolkit.evaluation.cli import main

SETS = {"sky": [EncodedPrompt("a", [65, 66, 67]), EncodedPrompt("b", [68, 69])], "<b>": [EncodedPrompt("c", [70])]}


@pytest.fixture(scope="module")
def pair(target: Target, drafter: Drafter) -> EnginePair:
    return EnginePair.load(target, drafter)


@pytest.fixture(scope="module")
def folder(pair: EnginePair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a real report."""
    output = tmp_path_factory.mktemp("report")
    write_report(evaluate(pair, SETS, SamplingParams(max_tokens=12, ignore_eos=True)), output)
    return output


@pytest.fixture
def changed(folder: Path, tmp_path: Path) -> Callable[[Callable[[dict[str, Any]], object]], Path]:
    """Returns a function that writes a changed copy of the report."""

    def write(change: Callable[[dict[str, Any]], object]) -> Path:
        report = json.loads((folder / "report.json").read_text())
        change(report)
        (tmp_path / "report.json").write_text(json.dumps(report))
        return tmp_path

    return write


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    return (folder / "report.json").read_text()


def figures(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())["sections"][0]


def test_check_reports_held_and_missed_limits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = figures(folder)
    sky, pooled, speedup = section["sets"]["sky"], section["overall"], section["overall"]["speedup"]
    held = ["--min-tau", f"sky={sky['tau_pooled']}", "<b>=1", "--min-tau", str(pooled["tau_pooled"])]
    held += ["--max-regret", "0", "--min-speedup", str(speedup)]
    assert main(["check", str(folder), *held]) == 0
    *table, end = capsys.readouterr().out.splitlines()
    assert end == f"{folder}: 5 of 5 limits hold (greedy)" and sum("holds" in line for line in table) == 5

    above = f"{sky['tau_pooled'] + 0.01:.6f}"
    missed = ["--min-tau", f"sky={above}", "--min-tau", "<b>=1", "--min-speedup", str(speedup + 1)]
    assert main(["check", str(folder / "report.json"), *missed]) == 1
    low, high = sky["tau_pooled_ci95"]
    *table, end = capsys.readouterr().out.splitlines()
    first, second = (" ".join(line.split()) for line in table if line.endswith("missed"))
    expected = f"{sky['tau_pooled']:.3f} [{low:.3f}, {high:.3f}] at least {float(above):g} missed"
    assert first == f"sky acceptance length {expected}" and end.endswith("1 of 3 limits hold (greedy)")
    assert second.startswith(f"all sets speed-up {speedup:.3f} [")


def test_regret_is_checked_per_set_and_nan_misses_the_limit(changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def differ(*regrets: float | None) -> Path:
        def change(report: dict[str, Any]) -> None:
            found = report["sections"][0]["sets"]["sky"]
            numbers = {"position": 0, "plain_token": 1, "drafted_token": 2, "plain_text": "", "drafted_text": ""}
            found["differences"] = [{"id": "a", **numbers, "regret_nats": regret} for regret in regrets]

        return changed(change)

    assert main(["check", str(differ(0.1, 0.3)), "--max-regret", "<b>=0", "sky=0.3", "0.3"]) == 0
    assert main(["check", str(differ(0.1, 0.3)), "--max-regret", "<b>=0", "sky=0.2", "0.3"]) == 1
    assert main(["check", str(differ(0.1, None)), "--max-regret", "99"]) == 1
    missed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.endswith("missed")]
    assert missed == [
        "sky regret in nats 0.300 at most 0.2 missed",
        "all sets regret in nats nan at most 99 missed",
    ]


def test_check_selects_a_section_by_name(changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def add(report: dict[str, Any]) -> None:
        warm = json.loads(json.dumps(report["sections"][0])) | {"name": "temperature 1", "temperature": 1.0}
        warm["sets"]["sky"]["tau_pooled"] = 0.5
        report["sections"].append(warm)

    folder = str(changed(add))
    assert main(["check", folder, "--min-tau", "sky=1"]) == 0
    assert main(["check", folder, "--min-tau", "sky=1", "--section", "temperature 1"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("0 of 1 limits hold (temperature 1)")
    assert main(["check", folder, "--min-tau", "1", "--section", "warm"]) == 2
    assert "no section 'warm'; it has 'greedy', 'temperature 1'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["{report}", "--min-tau", "gsm8k=2"], "no set 'gsm8k'; it has 'sky', '<b>'", id="unknown set"),
        pytest.param(["{report}", "--min-tau", "sky=much"], "min-tau: 'sky=much' is not a limit", id="no number"),
        pytest.param(["{report}", "--min-tau", "=2"], "'=2' is not a limit; give a number, or SET=NUMBER", id="no set"),
        pytest.param(["{report}", "--max-regret", "nan"], "max-regret: 'nan' is not a limit", id="NaN"),
        pytest.param(["{report}"], "no limit to check; give at least one of --min-tau", id="no limit"),
        pytest.param(["--min-tau", "2"], "expected one report before the options, got 0", id="no report"),
        pytest.param(["{report}", "{report}", "--min-tau", "2"], "got 2", id="two reports"),
        pytest.param(["{report}", "--min-tua", "2"], "did you mean --min-tau?", id="typo"),
        pytest.param(["/no/such.json", "--min-tau", "2"], "/no/such.json: cannot be read (No such file", id="no file"),
    ],
)
def test_invalid_check_arguments_are_refused_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["check", *(word.format(report=folder) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and message in err and err.count("\n") == 1 and out == ""


def test_an_old_schema_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_text('{"schema": 1, "sets": {}}')
    assert main(["check", str(tmp_path), "--min-tau", "2"]) == 2
    assert "schema_version is 1, but" in capsys.readouterr().err


def test_check_refuses_an_incomplete_report(changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(changed(lambda report: report.pop("sections"))), "--min-tau", "2"]) == 2
    assert "missing required field `sections`; measure again" in capsys.readouterr().err


def first_set(report: dict[str, Any]) -> dict[str, Any]:
    return report["sections"][0]["sets"]["sky"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda report: first_set(report).pop("tau_pooled"), "required field `tau_pooled` - at `$.sections[0].sets"),
        (lambda report: report["sections"].clear(), "length >= 1 - at `$.sections`"),
        (lambda report: report["sections"][0].pop("overall"), "required field `overall` - at `$.sections[0]`"),
        (lambda report: report["sections"][0].update(sets={}), "length >= 1 - at `$.sections[0].sets`"),
        (lambda report: report["sections"][0]["overall"].update(tau_pooled=True), "got `bool` - at `$.sections[0]"),
        (lambda report: report["sections"][0]["overall"].update(tau_pooled="12"), "got `str` - at `$.sections[0]"),
        (lambda report: report["arguments"].update(max_concurrency="all"), "got `str` - at `$.arguments"),
        (lambda report: first_set(report)["per_request"][0]["drafted_per_step"].pop(), "but drafted_per_step has"),
        (lambda report: first_set(report)["per_request"][0].update(turn=2), "the first `turn` is 2"),
        (lambda report: first_set(report)["per_request"][0].update(plain_tokens=None), "some of plain_tokens, "),
        (lambda report: first_set(report)["per_request"][1].update(token_ids=[1]), "token_ids has 1"),
    ],
    ids=range(11),
)
@pytest.mark.parametrize("command", ["check", "compare"])
def test_an_invalid_report_is_one_line(
    command: str, change: Any, said: str, folder: Path, changed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--min-tau", "1", "--max-regret", "9"] if command == "check" else [str(folder)]
    assert main([command, str(changed(change)), *more]) == 2
    out, err = capsys.readouterr()
    assert "no valid report of dflash-eval: " in err and said in err and err.count("\n") == 1 and not out


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every value inside nested lists and mappings."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*above, key)
        yield from places(value[key], (*above, key))


ODD = [None, True, False, 0, 1, -1, 3, 2**31, 10**30, 0.5, 1e300, "", "12", [], [None], [1, 2], {}, {"a": 1}]


@pytest.mark.sampled
@settings(max_examples=300 if LONG_RUN else 75, deadline=None, derandomize=True)
@given(st.data())
def test_a_changed_report_never_ends_in_a_traceback(folder: Path, text: str, data: st.DataObject) -> None:
    report = json.loads(text)
    for _ in range(data.draw(st.integers(1, 2))):
        *above, key = data.draw(st.sampled_from(list(places(report))))
        parent = functools.reduce(operator.getitem, above, report)
        if data.draw(st.integers(0, 2)):
            parent[key] = data.draw(st.sampled_from(ODD))
        else:
            del parent[key]
    with tempfile.TemporaryDirectory() as there:
        path = Path(there, "report.json")
        path.write_text(json.dumps(report))
        assert main(["check", str(path), "--min-tau", "1", "sky=1", "--min-speedup", "1", "--max-regret", "1"]) in (
            0, 1, 2,
        )  # fmt: skip
        assert main(["compare", str(folder), str(path), "--output", str(Path(there, "out"))]) in (0, 2)
        assert main(["compare", str(path), str(folder)]) in (0, 2)


def test_check_of_speedup_needs_a_plain_endpoint(changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def alone(report: dict[str, Any]) -> None:
        report["arguments"]["baseline"], report["environment"]["device"] = False, "endpoint"

    assert main(["check", str(changed(alone)), "--min-speedup", "2"]) == 2
    assert "was not decoded without a drafter; measure with --plain-endpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "words", "message"),
    [
        ({"baseline": False}, ["--min-speedup", "2"], "no speed-up of its sets: it was measured by --no-baseline"),
        ({"baseline": False}, ["--max-regret", "sky=2"], "no regret in nats of sky: it was measured by --no-baseline"),
        ({"max_tokens": 1}, ["--min-tau", "2"], "no answer took a step; measure with more --max-tokens"),
        ({"temperature": 1.0}, ["--max-regret", "1"], "drafts were sampled; measure with --temperature 0"),
    ],
)
def test_check_names_the_option_for_a_missing_figure(
    target: Target,
    drafter: Drafter,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    setting: dict[str, Any],
    words: list[str],
    message: str,
) -> None:
    pair = EnginePair.load(target, drafter, draft_sample_method="probabilistic")
    params = SamplingParams(**{"max_tokens": 4, **{key: value for key, value in setting.items() if key != "baseline"}})
    write_report(evaluate(pair, SETS, params, baseline=setting.get("baseline", True)), tmp_path)
    assert main(["check", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err


def test_check_imports_no_torch(folder: Path) -> None:
    probe = (
        "import sys; from dflash_toolkit.evaluation.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    words = ["check", str(folder), "--min-tau", "999"]
    done = subprocess.run([sys.executable, "-c", probe, *words], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
