"""`dflash-eval` from its arguments to its files: reports, resuming and errors."""

import fcntl
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from conftest import make_drafter
from reports import REPORT_FILES, load, untimed, write_prompts

from dflash_toolkit import Drafter, SamplingParams, Target, UserError, save_drafter
from dflash_toolkit.evaluation import EncodedPrompt, EnginePair, evaluate, write_report
from dflash_toolkit.evaluation.cli import main
from dflash_toolkit.evaluation.measure import run
from dflash_toolkit.evaluation.measure.measurement import Difference, Measurement, measure
from dflash_toolkit.evaluation.measure.pairs import Pair
from dflash_toolkit.evaluation.report.results import Section, noise


@pytest.fixture(scope="session")
def arguments(tmp_path_factory: pytest.TempPathFactory, target_dir: Path, drafter_dir: Path) -> list[str]:
    """Returns arguments of a small run over two sets; the name of one looks like an HTML tag."""
    folder = tmp_path_factory.mktemp("prompts")
    sky = write_prompts(folder / "sky.jsonl", "Why is the sky blue?", "What is 2+2?")
    tag = write_prompts(folder / "tag.jsonl", "Count to ten.")
    return [
        "--target", str(target_dir), "--drafter", str(drafter_dir), "--device", "cpu", "--dtype", "float32",
        "--max-tokens", "24", "--prompts", f"sky={sky}", f"<b>={tag}",
    ]  # fmt: skip


@pytest.fixture(scope="session")
def finished(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a finished report."""
    output = tmp_path_factory.mktemp("finished")
    assert main([*arguments, "--output", str(output)]) == 0
    return output


@pytest.fixture(scope="session")
def runtime(target: Target, drafter: Drafter) -> Pair:
    return EnginePair.load(target, drafter)


# ---- the report ---------------------------------------------------------------------------------------


def test_report_json_has_the_expected_values(finished: Path) -> None:
    report = load(finished)
    assert report["schema_version"] == 2 and report["sections"][0]["name"] == "greedy"
    assert report["environment"].items() >= {"device": "cpu", "dtype": "float32"}.items()
    arguments = {"runtime": "engine", "block_size": 8, "target_layer_ids": [1, 2, 3], "target_num_layers": 6}
    assert report["arguments"] == report["arguments"] | arguments | {"max_tokens": 24}
    assert len(report["arguments"]["chat_template_sha256"]) == 64
    assert set(report["sets"]) == {"sky", "<b>"}
    for result in report["sets"].values():
        assert len(result["per_request"]) == result["requests"]
        assert (len(result["accepted_per_position"]), len(result["accepted_lengths"])) == (7, 8)
        # in fp32 on a CPU, greedy answers equal the plain ones
        assert (result["identical_to_plain"], result["differences"]) == (1.0, [])
        assert sum(result["accepted_lengths"]) == result["verify_steps"]
        assert result["speedup"] == pytest.approx(result["tokens_per_second"] / result["plain_tokens_per_second"])
    first = report["sets"]["sky"]["per_request"][0]
    assert first["id"] == "q0" and first["tokens"] == len(first["token_ids"]) == len(first["token_texts"]) <= 24
    assert first["prompt_text"] == "<|user|>Why is the sky blue?<|end|><|assistant|>"
    assert sum(first["committed_per_step"]) == first["tokens"] - 1 and len(first["accepted_per_step"]) == first["steps"]
    assert sum(row["decode_seconds"] for row in report["sets"]["sky"]["per_request"]) == pytest.approx(
        report["sets"]["sky"]["decode_seconds"]
    )
    assert first["tau"] == pytest.approx((first["tokens"] - 1) / first["steps"])
    hashes = [row["answer_sha256"] for row in report["sets"]["sky"]["per_request"]]
    assert all(re.fullmatch("[0-9a-f]{16}", answer) for answer in hashes) and len(set(hashes)) == len(hashes)
    assert {f.name for f in finished.iterdir()} == REPORT_FILES


def test_overall_pools_the_sets(finished: Path) -> None:
    report = load(finished)
    for key in ("requests", "generated_tokens", "verify_steps", "prefill_seconds", "decode_seconds"):
        assert report["overall"][key] == pytest.approx(sum(s[key] for s in report["sets"].values()))


def test_markdown_and_page_hold_the_figures(finished: Path) -> None:
    report = load(finished)
    markdown, page = (finished / "report.md").read_text(), (finished / "report.html").read_text()
    for summary in (report["overall"], *report["sets"].values()):
        for text in (f"{summary['tau_pooled']:.2f}", f"{summary['tokens_per_second']:,.1f}"):
            assert text in markdown and text in page
    assert "| \\<b\\> | 1 |" in markdown
    assert "| 3 of 3 |" in markdown  # identical answers of all sets
    assert re.search("<b><i[^>]*>✓</i> 3 of 3</b>", page)


def test_page_is_self_contained_and_escaped(finished: Path) -> None:
    page = (finished / "report.html").read_text()
    assert not re.search(r"https?:|<script|<link|<img|@import|url\((?!#)", page)
    assert page.count('role="img"') == 7  # 2 bar charts, 2 curves, 3 histograms
    assert "&lt;b&gt;" in page
    body = page.partition("<main>")[2]
    assert body.count("<b>") == body.count("</b>") == 4  # in the tiles


def test_evaluation_without_baseline_has_no_speedup(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--output", str(tmp_path), "--no-baseline", "limit=1", "num_speculative_tokens=2"]) == 0
    report = load(tmp_path)
    overall = report["overall"]
    assert overall["requests"] == 2
    assert len(overall["accepted_lengths"]) == report["arguments"]["block_size"] == 3
    for key in ("identical_to_plain", "speedup", "plain_tokens_per_second", "plain_decode_seconds"):
        assert overall[key] is None
    page = (tmp_path / "report.html").read_text().partition("What the figures mean")[0]
    assert page.count("Speed-up") == page.count("Speed-up not measured: ") == 1 and "plain tokens/s" not in page.lower()
    assert "report.html" in capsys.readouterr().out


def test_set_names_may_equal_option_names(arguments: list[str], tmp_path: Path) -> None:
    sky = arguments[-2].partition("=")[2]
    command = [*arguments, "--output", str(tmp_path), "--no-baseline", "--prompts", f"thinking={sky}[1:2]"]
    assert main(command) == 0
    (result,) = load(tmp_path)["sets"].items()
    assert result[0] == "thinking" and [row["id"] for row in result[1]["per_request"]] == ["q1"]


def test_category_figures_pool_the_requests_of_the_category(arguments: list[str], tmp_path: Path) -> None:
    rows = [{"prompt": "Why?", "category": "why"}, {"prompt": "How?", "domain": "how"}, {"prompt": "When?"}]
    (tmp_path / "kinds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [*arguments, "--output", str(tmp_path / "report"), "--prompts", str(tmp_path / "kinds.jsonl")]
    assert main([*command, "--no-baseline"]) == 0
    result = load(tmp_path / "report")["sets"]["kinds"]
    assert [row["category"] for row in result["per_request"]] == ["why", "how", None]
    assert set(result["categories"]) == {"why", "how"}
    assert result["categories"]["how"]["generated_tokens"] == result["per_request"][1]["tokens"]


def test_evaluation_of_one_token_answers_has_no_drafts(arguments: list[str], tmp_path: Path) -> None:
    assert main([*arguments, "--output", str(tmp_path), "max_tokens=1"]) == 0
    overall = load(tmp_path)["overall"]
    assert (overall["verify_steps"], overall["tau_pooled"], overall["speedup"]) == (0, None, None)
    assert overall["accepted_per_position"] == [None] * 7
    assert overall["identical_to_plain"] == 1.0


def test_every_temperature_and_mode_has_a_section(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def encode(tokenizer: Any, messages: Any, thinking: bool | None, tools: Any) -> list[int]:
        return [65, 66 + int(thinking or 0)]

    monkeypatch.setattr("dflash_toolkit.evaluation.measure.encoding.encode_chat", encode)
    quick = [*arguments, "--output", str(tmp_path), "limit=1", "max_tokens=3"]
    assert main([*quick, "--temperature", "0", "0.6", "--thinking", "on", "off"]) == 0
    sections = load(tmp_path)["sections"]
    assert [(s["name"], s["temperature"], s["thinking"]) for s in sections] == [
        ("greedy, thinking", 0.0, True),
        ("temperature 0.6, thinking", 0.6, True),
        ("greedy, no thinking", 0.0, False),
        ("temperature 0.6, no thinking", 0.6, False),
    ]
    texts = [s["sets"]["sky"]["per_request"][0]["prompt_text"] for s in sections]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert all(s["overall"]["identical_to_plain"] == 1.0 for s in sections)
    assert "temperature 0.6, no thinking\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "modes"),
    [
        ([], [None]),
        (["--thinking"], [True]),
        (["--no-thinking"], [False]),
        (["thinking=false"], [False]),
        (["thinking=[on,off]", "temperature=0.5"], [True, False]),
    ],
)
def test_thinking_reaches_the_template(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], modes: list[bool | None]
) -> None:
    seen: list[bool | None] = []

    def encode(tokenizer: Any, messages: Any, thinking: bool | None, tools: Any) -> list[int]:
        seen.append(thinking)
        return [65, 66]

    monkeypatch.setattr("dflash_toolkit.evaluation.measure.encoding.encode_chat", encode)
    assert main([*arguments, "--output", str(tmp_path), "--no-baseline", "limit=1", "max_tokens=1", *words]) == 0
    assert seen == modes * 2


def test_later_turns_follow_the_earlier_answers(arguments: list[str], tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "two", "turns": ["Why?", "And how?"]},
        {"id": "chat", "messages": [
            {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "recorded"},
            {"role": "user", "content": "When?"},
        ]},
        {"id": "one", "prompt": "Where?"},
    ]  # fmt: skip
    (tmp_path / "turns.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [*arguments, "--output", str(tmp_path / "report"), "--prompts", str(tmp_path / "turns.jsonl")]
    assert main([*command, "--max-tokens", "8"]) == 0
    assert [row["turn"] for row in load(tmp_path / "report")["sets"]["turns"]["per_request"]] == [1, 1, 1]
    assert main([*command, "--max-tokens", "8", "--multi-turn"]) == 0
    result = load(tmp_path / "report")["sets"]["turns"]
    found = {(row["id"], row["turn"]): row for row in result["per_request"]}
    assert list(found) == [("two", 1), ("two", 2), ("chat", 1), ("chat", 2), ("one", 1)]
    for name, asked in (("two", "And how?"), ("chat", "When?")):
        first, second = found[name, 1], found[name, 2]
        assert second["prompt_text"].startswith(first["prompt_text"])
        assert second["prompt_text"].endswith(f"<|end|><|user|>{asked}<|end|><|assistant|>")
        assert "recorded" not in second["prompt_text"]
        assert second["prompt_tokens"] > first["prompt_tokens"] + len(asked)
    assert result["identical_to_plain"] == 1.0


# ---- resuming -----------------------------------------------------------------------------------------


class Killed(Exception):
    """Replaces the end of the process."""


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Counts decoded requests, and optionally stops before a request."""

    def install(stop_before: int | None = None) -> list[str]:
        decoded: list[str] = []

        def counted(runtime: Pair, prompt: EncodedPrompt, *rest: Any, **more: Any) -> Measurement:
            if len(decoded) == stop_before:
                raise Killed
            decoded.append(prompt.id)
            return measure(runtime, prompt, *rest, **more)

        monkeypatch.setattr(run, "measure", counted)
        return decoded

    return install


def test_resume_after_a_torn_journal_line(arguments: list[str], finished: Path, tmp_path: Path, interrupt: Any) -> None:
    command = [*arguments, "--output", str(tmp_path)]
    interrupt(stop_before=2)
    with pytest.raises(Killed):
        main(command)
    partial = tmp_path / "partial.jsonl"
    whole = partial.read_bytes()
    assert whole.count(b"\n") == 2
    assert not (tmp_path / "report.json").exists()
    partial.write_bytes(whole[:-40])
    kept = json.loads(whole.splitlines()[0])["measurement"]["drafted"]

    decoded = interrupt()
    assert main(command) == 0
    assert decoded == ["q1", "q0"]  # the torn line of `sky`, and `<b>`
    report = load(tmp_path)
    assert untimed(report) == untimed(load(finished))
    assert report["sets"]["sky"]["per_request"][0]["decode_seconds"] == kept["decode_s"]
    assert {f.name for f in tmp_path.iterdir()} == REPORT_FILES


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: content.replace(b'"key": "', b'"key": "0'), id="other run"),
        pytest.param(lambda content: content[:20], id="torn first line"),
        pytest.param(lambda content: b'{"fingerprint": "0"}\n' + content, id="of an earlier version"),
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(lambda content: b"\x00" * 512, id="zeros"),
    ],
)
def test_journal_lines_of_other_runs_are_ignored(runtime: Pair, tmp_path: Path, interrupt: Any, damage: Any) -> None:
    sets = {"s": [EncodedPrompt("a", [65, 66]), EncodedPrompt("b", [67])]}
    partial, params = tmp_path / "partial.jsonl", SamplingParams(max_tokens=4)
    evaluate(runtime, sets, params, partial=partial)
    decoded = interrupt()
    evaluate(runtime, sets, params, partial=partial)
    assert decoded == []
    partial.write_bytes(damage(partial.read_bytes()))
    for _ in range(2):
        evaluate(runtime, sets, params, partial=partial)
        assert decoded == ["a", "b"]


def test_resume_keeps_results_after_changed_limit_or_threads(
    runtime: Pair, tmp_path: Path, interrupt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = {"s": [EncodedPrompt("a", [65, 66])]}
    partial, params, decoded = tmp_path / "partial.jsonl", SamplingParams(max_tokens=4), interrupt()
    assert evaluate(runtime, sets, params, partial=partial).warnings == ()
    more = {"first": [EncodedPrompt("z", [70])], "s": [*sets["s"], EncodedPrompt("b", [67])]}
    monkeypatch.setattr("torch.get_num_threads", lambda: 77)
    report = evaluate(runtime, more, params, partial=partial)
    assert decoded == ["a", "z", "b"]
    assert "another number of threads (1 and 77)" in report.warnings[0] and report.environment.threads == 77
    assert evaluate(runtime, sets, params, partial=partial).overall.drafted.tokens == 4
    assert decoded == ["a", "z", "b"]


def test_unusable_rows_are_skipped_and_counted(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_prompts(tmp_path / "own.jsonl", "Count to ten.", "word " * 4000, "What is 2+2?")
    path.write_text('{"text": 7}\n' + path.read_text())
    given = [*arguments[: arguments.index("--prompts")], "--no-baseline", "--prompts", f"own={path}"]
    assert main([*given, "--output", str(tmp_path / "out"), "limit=3"]) == 0
    said = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("skipped rows: "))
    assert f"(first: {path}, line 1)" in said and "1 longer than the context (first: set 'own', prompt 'q1')" in said
    report = load(tmp_path / "out")
    assert report["sets"]["own"]["requests"] == 2, "the limit counts rows that can be read"
    assert sorted(report["arguments"]["skipped_rows"].values()) == [1, 1]
    assert main([*given, "--output", str(tmp_path / "strict"), "--strict"]) == 2
    assert f"{path}, line 1: " in capsys.readouterr().err and not (tmp_path / "strict").exists()


def test_another_seed_or_prompt_is_measured_again(runtime: Pair, tmp_path: Path, interrupt: Any) -> None:
    partial, decoded = tmp_path / "partial.jsonl", interrupt()
    for name, ids, seed in (("a", [65], 0), ("a", [65], 1), ("a", [66], 1), ("b", [66], 1)):
        params = SamplingParams(max_tokens=4, temperature=1.0, seed=seed)
        evaluate(runtime, {"s": [EncodedPrompt(name, ids)]}, params, partial=partial)
    assert decoded == ["a", "a", "a", "b"]
    evaluate(runtime, {"t": [EncodedPrompt("a", [65])]}, SamplingParams(max_tokens=4, temperature=1.0), partial=partial)
    assert decoded == ["a", "a", "a", "b"], "none of them is lost"


# ---- from Python --------------------------------------------------------------------------------------


def test_differences_are_reported(runtime: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(runtime: Pair, prompt: EncodedPrompt, *rest: Any, **more: Any) -> Measurement:
        found = measure(runtime, prompt, *rest, **more)
        if prompt.id == "b":
            found.drafted.tokens[1] += 1
            found = replace(found, difference=Difference(1, 5, 6, "a", "b", float("nan")))
        return found

    monkeypatch.setattr(run, "measure", wrong)
    sets = {"s": [EncodedPrompt("a", [65, 66]), EncodedPrompt("b", [67])]}
    report = evaluate(runtime, sets, SamplingParams(max_tokens=4, ignore_eos=True))
    write_report(report, tmp_path)
    result = load(tmp_path)["sets"]["s"]
    assert result["identical_to_plain"] == 0.5
    assert result["differences"] == [
        {"id": "b", "position": 1, "plain_token": 5, "drafted_token": 6, "plain_text": "a", "drafted_text": "b",
         "regret_nats": None}
    ]  # fmt: skip
    assert "| s | b | 1 | 'a' | 'b' | - |" in (tmp_path / "report.md").read_text()


def test_uneven_plain_speed_causes_a_warning(runtime: Pair) -> None:
    sets = {"calm": [EncodedPrompt("a", [65, 66])], "busy": [EncodedPrompt("b", [67])]}
    (section,) = evaluate(runtime, sets, SamplingParams(max_tokens=6, ignore_eos=True)).sections
    for busy, warned in ((10.0, True), (1.2, False)):
        for (m,), slower in zip((s.measurements for s in section.sets.values()), (1.0, busy), strict=True):
            m.plain.decode_s = slower
        measured = {name: result.measurements for name, result in section.sets.items()}
        found = noise([Section.of(measured, 0.0, None, 8)])
        assert len(found) == warned
        assert not warned or "(greedy) was not equally fast in all sets (calm 5.0, busy 0.5 tokens/s)" in found[0]


def test_one_oversized_prompt_stops_the_run_before_decoding(runtime: Pair, interrupt: Any) -> None:
    decoded = interrupt()
    fitting, long, empty = EncodedPrompt("a", [65]), EncodedPrompt("b", [65] * 512), EncodedPrompt("c", [])
    for prompts, message in [([fitting, long], "set 's', prompt 'b'"), ([empty], "prompt 'c'"), ([], "no prompts")]:
        with pytest.raises(UserError, match=message):
            evaluate(runtime, {"s": prompts})
    with pytest.raises(UserError, match="no prompt set"):
        evaluate(runtime, {})
    assert decoded == []


def test_a_full_disk_leaves_no_partial_report(runtime: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = evaluate(runtime, {"s": [EncodedPrompt("a", [65])]}, SamplingParams(max_tokens=4))
    write = Path.write_text

    def full(path: Path, content: str, **more: Any) -> int:
        if path.name.startswith(".report.html"):
            raise OSError(28, "No space left on device")
        return write(path, content, **more)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_report(report, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_while_decoding_is_one_line(runtime: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("dflash_toolkit.files.open", full, raising=False)
    with pytest.raises(UserError, match=r"partial\.jsonl.*No space left"):
        evaluate(runtime, {"s": [EncodedPrompt("a", [65])]}, partial=tmp_path / "partial.jsonl")


# ---- refusals -----------------------------------------------------------------------------------------


@pytest.fixture
def files(target: Target, tmp_path: Path) -> dict[str, Path]:
    """Returns the files named in the arguments below."""
    named = {name: tmp_path / name for name in ("sky", "long", "bad", "other", "report")}
    write_prompts(named["sky"], "Hello")
    write_prompts(named["long"], "x" * 700)
    named["bad"].write_text('{"prompt": "x"}\n{"prompt"\n')
    save_drafter(make_drafter(target, hidden_size=48), named["other"])
    return named


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(["--prompts", "a={sky}", "a={sky}"], "'a' is used twice", id="two sets of one name"),
        pytest.param(["--prompts", "={sky}"], "expected NAME=SOURCE", id="empty name"),
        pytest.param(["--prompts", "a="], "expected NAME=SOURCE", id="empty file name"),
        pytest.param(["prompts=[]"], "prompts is empty", id="no set"),
        pytest.param(["--prompts", "a=/no/such.jsonl"], "/no/such.jsonl: no such file", id="no file"),
        pytest.param(["--prompts", "a={bad}", "--strict"], "line 2: not valid JSON", id="broken row"),
        pytest.param(["--prompts", "a={long}"], "none of its 1 prompts can be used", id="long prompt"),
        pytest.param(["--limit", "0"], "limit is 0", id="limit"),
        pytest.param(["--temperature", "0", "0"], "temperature is [0.0, 0.0]; give each value once", id="twice"),
        pytest.param(["--temperature", "0", "-1"], "temperature", id="one temperature of two"),
        pytest.param(["--top-p", "2"], "top-p is 2.0", id="sampling"),
        pytest.param(["--num-speculative-tokens", "0"], "num-speculative-tokens is 0", id="block size"),
        pytest.param(["--target", "/no/such"], "target /no/such: no such directory", id="target"),
        pytest.param(["--drafter", "/no/such"], "drafter /no/such: no such directory", id="drafter"),
        pytest.param(["--drafter", "{other}"], "hidden size is 48, the target's 32", id="drafter of another target"),
        pytest.param(["--runtime", "vllm"], "'vllm' is not one of auto, engine, reference", id="runtime"),
        pytest.param(["--runtime", "reference", "draft_dtype=fp8"], "only --runtime engine", id="draft dtype"),
        pytest.param(["--runtime", "reference", "kv_cache_dtype=fp8"], "only --runtime engine", id="cache"),
        pytest.param(["--kv-cache-dtype", "int8"], "'int8' is not one of auto, bfloat16, fp8", id="another cache"),
        pytest.param(["--draft-tree", "64"], "the engine takes 63 nodes at most, --runtime ref", id="large tree"),
        pytest.param(["--draft-tree", "-1"], "draft-tree is -1", id="tree"),
        pytest.param(["draft_tree=8", "draft_sample_method=probabilistic"], "draft_tree is 8", id="tree of samples"),
        pytest.param(["--draft-dtype", "int4"], "'int4' is not one of auto, fp8, full", id="another draft dtype"),
        pytest.param(["--device", "cuda:77"], "cuda:77", id="device"),
        pytest.param(["tempersture=1"], "did you mean `temperature`", id="typo"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], files: dict[str, Path], capfd: pytest.CaptureFixture[str], change: list[str], message: str
) -> None:
    capfd.readouterr()
    assert main([*arguments, "--output", str(files["report"]), *(word.format(**files) for word in change)]) == 2
    out, err = capfd.readouterr()
    *before, last = err.splitlines()
    assert last.startswith("error: ") and message in last
    assert not before or (before[0].startswith("dflash-eval: target ") and len(before) == 1)
    assert out == "" and not files["report"].exists()


def test_output_must_not_be_a_file(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report").write_text("mine")
    assert main([*arguments, "--output", str(tmp_path / "report")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert (tmp_path / "report").read_text() == "mine"


def test_two_runs_cannot_share_an_output_folder(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert main([*arguments, "--output", str(tmp_path)]) == 2
    finally:
        os.close(handle)
    assert "is being written by another run" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main([*arguments, "--output", str(tmp_path)]) == 0


def test_the_command_prints_table_verdict_and_next_command(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--output", str(tmp_path / "report"), "max_tokens=4", "limit=1"]) == 0
    printed = capsys.readouterr().out
    report = load(tmp_path / "report")
    row = next(line.split() for line in printed.splitlines() if line.split()[:1] == ["sky"])
    assert row[2] == f"{report['sets']['sky']['tau_pooled']:.2f}" and "|" not in printed and "\\" not in printed
    low, high = report["overall"]["speedup_ci95"]
    (headline,) = (line for line in printed.splitlines() if f"95 % interval {low:.2f}x to {high:.2f}x) the" in line)
    assert headline.startswith(("Faster", "Slower", "No clear difference"))
    assert "tokens" not in headline and "shields.io" not in printed
    *_, where, following = printed.splitlines()
    assert where == f"Report: {tmp_path / 'report/report.html'}"
    advice = report["recommendation"]
    slower = headline.startswith("Slower") or advice["use_drafter"] is False or advice["max_concurrency"] == 0
    drafter = "" if slower else f"--drafter {arguments[3]} "  # the command follows the verdict, whatever the speed
    served = f"dflash-serve --target {arguments[1]} {drafter}--device cpu --dtype float32"
    assert following.split(maxsplit=1) == ["Next:", served]
    page = (tmp_path / "report/report.html").read_text()
    assert '<pre class="prompt">Why is the sky blue?</pre>' in page and "&lt;|user|&gt;" not in page
    assert page.count("<details") == 1
