"""scripts/peers/vllm_decode.py without vllm: figures from counters, and comparison with our results."""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import make_drafter, make_target

from dflash_toolkit import SamplingParams
from dflash_toolkit.acceptance import Acceptance
from dflash_toolkit.config import UserError
from dflash_toolkit.evaluation.measure.measurement import EncodedPrompt
from dflash_toolkit.evaluation.measure.pairs import ReferencePair
from dflash_toolkit.evaluation.measure.run import evaluate
from dflash_toolkit.generation import Generation, Step
from scripts.peers import vllm_decode as program

PROMPTS = [EncodedPrompt("a/1", [1, 2, 3]), EncodedPrompt("a/2", [4, 5])]


@pytest.fixture
def result(tmp_path: Path) -> Path:
    """A result of bench/train_real.py with two runs, and the reports of the first."""

    def sets(tau: float) -> dict[str, Any]:
        return {"a": {"requests": 2, "tau_pooled": tau, "tokens_per_second": 100.0}}

    path = tmp_path / "result.json"
    runs = [{"name": "2m", "minutes": 2.0, "sets": sets(2.0)}, {"name": "8m", "minutes": 8.0, "sets": sets(4.0)}]
    path.write_text(json.dumps({"runs": runs}))
    for folder, name in (("report-2m", "b"), ("report-2m-plain", "a")):
        pair = ReferencePair(make_target(), make_drafter(make_target()))
        report = evaluate(pair, {name: PROMPTS}, SamplingParams(max_tokens=4), baseline=False).to_json()
        report["sections"][0]["sets"][name]["per_request"] = []
        report["arguments"] |= {"max_tokens": 512, "prompt_tokens_sha256": {name: "0" * 64}}
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "report.json").write_text(json.dumps(report))
    return path


# ---- counters ----------------------------------------------------------------------------------------------------


def test_tau_pooled_ignores_drafts_after_the_end_of_an_answer() -> None:
    # with blocks of 4, the last step of the first answer accepts two drafts after the stop token, which are cut off
    stopped = Generation([1, 2, 3, 4, 9], [Step(3, 2, (2, 3, 4)), Step(3, 1, (9,))], "stop", 0.5, 1.0)
    whole = Generation([1, 2, 3, 4], [Step(3, 0, (2,)), Step(3, 1, (3, 4))], "length", 0.5, 2.0)
    ours = Acceptance.of([stopped, whole], 4)
    counts = program.Counts(2, 9, seconds=4.0, decode_seconds=3.0, drafts=4, accepted=2 + 2 + 0 + 1, answers=[])
    found = program.figures(counts, {"tau_pooled": ours.tau_pooled, "tokens_per_second": 7.0, "speedup": 2.0})
    assert found["tau_pooled"] == ours.tau_pooled == 7 / 4 and found["tau_of_ours"] == 1
    assert found["tau"] == 1 + 5 / 4
    assert found["tokens_per_second"] == 9 / 4
    assert found["decode_tokens_per_second"] == round(ours.tokens_per_second, 4) == round(7 / 3, 4)
    assert found["ours"] == {"tau_pooled": 7 / 4, "tokens_per_second": 7.0}


def test_figures_without_drafter_have_no_drafts() -> None:
    found = program.figures(program.Counts(2, 9, 3.0, 2.0, None, None, []))
    assert set(found) == {
        "requests", "tokens", "seconds", "decode_seconds", "tokens_per_second", "decode_tokens_per_second",
    }  # fmt: skip


def test_missing_figures_are_null() -> None:
    found = program.figures(program.Counts(2, 2, 3.0, 0.0, 0, 0, []), {"tau_pooled": None, "tokens_per_second": None})
    assert found["tau"] is None and found["tau_pooled"] is None and found["decode_tokens_per_second"] is None
    assert found["ours"] == {} and "tau_of_ours" not in found


def test_equal_answers_are_compared_separately() -> None:
    theirs = [program.Answer("x", 9, 4), program.Answer("y", 101, 10), program.Answer("z", 5, 2)]
    ours = [program.Answer("x", 9, 2), program.Answer("other", 50, 1), program.Answer("z", 5, 2)]
    counts = program.Counts(3, 115, 4.0, 3.0, 16, 99, theirs)
    found = program.figures(counts, {"tau_pooled": 9.0}, ours)
    steps = {"requests": 2, "drafts": 6, "drafts_of_ours": 4}
    assert found["same_answers"] == steps | {"tau_pooled": 2.0, "ours": 3.0, "tau_of_ours": round(2 / 3, 4)}
    assert "answers" not in found
    assert "same_answers" not in program.figures(counts, {"tau_pooled": 9.0}, [])
    none = program.same_answers(theirs[:1], [program.Answer("w", 9, 2)])
    lengths = {"tau_pooled": None, "ours": None, "tau_of_ours": None}
    assert none == {"requests": 0, "drafts": 0, "drafts_of_ours": 0} | lengths


# ---- what it is compared with ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafter", "name", "chosen"),
    [("out/drafter-2m", None, "2m"), ("elsewhere/mine", None, "8m"), ("out/drafter-8m", "2m", "2m")],
)
def test_run_is_the_named_or_the_drafters_or_the_last(
    drafter: str, name: str | None, chosen: str, result: Path
) -> None:
    ours = program.read_ours(result, drafter, name)
    assert ours.run == chosen
    assert ours.sets["a"]["tau_pooled"] == {"2m": 2.0, "8m": 4.0}[chosen]
    assert len(ours.reports) == (2 if chosen == "2m" else 0) and ours.answers("a") == []


def test_reports_of_dflash_eval_can_be_compared(tmp_path: Path) -> None:
    target = make_target()
    runtime = ReferencePair(target, make_drafter(target))
    report = evaluate(runtime, {"a": PROMPTS}, SamplingParams(max_tokens=4), baseline=False).to_json()
    (tmp_path / "report.json").write_text(json.dumps(report))
    ours = program.read_ours(tmp_path / "report.json", "mine", None)
    assert [answer.tokens for answer in ours.answers("a")] == [4, 4] and len(ours.answers("a")[0].sha256) == 16
    assert ours.run is None and ours.sets["a"]["tau_pooled"] == report["sections"][0]["sets"]["a"]["tau_pooled"]
    assert report["arguments"]["prompt_tokens_sha256"]["a"] == program.prompts_digest(PROMPTS)
    program.check_same(ours, {"a": PROMPTS}, 4)
    with pytest.raises(UserError, match="other prompts of 'a'"):
        program.check_same(ours, {"a": PROMPTS[::-1]}, 4)
    with pytest.raises(UserError, match="--max-tokens 4, not 5"):
        program.check_same(ours, {"a": PROMPTS}, 5)
    report["sections"][0]["temperature"] = 0.6
    (tmp_path / "report.json").write_text(json.dumps(report))
    with pytest.raises(UserError, match=r"temperature .*greedily"):
        program.read_ours(tmp_path / "report.json", "mine", None)


def test_result_with_other_prompts_is_rejected(result: Path) -> None:
    last = program.read_ours(result, "mine", None)
    first = program.read_ours(result, "mine", "2m")
    program.check_same(last, {"a": PROMPTS}, 512)
    for ours, sets, said in (
        (last, {"a": PROMPTS[:1]}, "decoded 2 prompts of 'a', not 1"),
        (last, {"c": PROMPTS}, "has no set 'c': a"),
        (first, {"a": PROMPTS}, "other prompts of 'a'"),
    ):
        with pytest.raises(UserError, match=said):
            program.check_same(ours, sets, 512)


def test_invalid_result_is_one_line(result: Path) -> None:
    with pytest.raises(UserError, match=r"--run 4m: .* has 2m, 8m"):
        program.read_ours(result, "mine", "4m")
    for content in ("{", "[]", "{}", '{"runs": []}', '{"runs": [{}]}'):
        result.write_text(content)
        with pytest.raises(UserError, match="no result of bench/train_real") as raised:
            program.read_ours(result, "mine", None)
        assert "\n" not in str(raised.value)
    result.write_text('{"schema": 1, "sets": {}}')
    with pytest.raises(UserError, match="schema_version is 1, but"):
        program.read_ours(result, "mine", None)
    with pytest.raises(UserError, match="no result of"):
        program.read_ours(result.with_name("none.json"), "mine", None)


def test_finished_sets_are_kept_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of vllm that `decode` calls: vllm cannot run here."""

    def generate(prompts: list[dict[str, list[int]]], *_: Any, **__: Any) -> list[Any]:
        if prompts[0]["prompt_token_ids"] == [9]:
            raise ValueError("out of memory")
        metrics = SimpleNamespace(first_token_ts=1.0, last_token_ts=3.0)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5, 6, 7])], metrics=metrics)]

    core = SimpleNamespace(shutdown=lambda: None)
    llm = SimpleNamespace(generate=generate, llm_engine=SimpleNamespace(engine_core=core))
    vllm = SimpleNamespace(LLM=lambda **_: llm, SamplingParams=dict, __version__="0.33.0")
    monkeypatch.setattr(program, "import_vllm", lambda: vllm)
    output = tmp_path / "peer.json"
    keep = partial(program.save, output, {"versions": {"torch": "2"}, "target": "t"}, None)
    with pytest.raises(ValueError, match="out of memory"):
        program.decode(program.Work({}, {}, {"a": [[1], [2]], "b": [[9]]}), keep)
    result = json.loads(output.read_text())
    assert result["versions"] == {"torch": "2", "vllm": "0.33.0"} and result["target"] == "t"
    assert list(result["sets"]) == ["a"] and result["start_s"] >= 0
    assert result["sets"]["a"]["tokens"] == 6 and result["sets"]["a"]["decode_tokens_per_second"] == 1.0


# ---- the program -------------------------------------------------------------------------------------------------


def test_missing_vllm_is_one_line_before_reading_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert program.main(["--target", "none", "--drafter", "none", "--prompts", "a=none", "--output", "x.json"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: vllm is not installed here: pip install") and error.count("\n") == 1


def test_prompts_use_the_chat_template_and_plain_names_a_set(
    target_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "say.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(9)))
    sets = program.encoded(str(target_dir), [f"a={path}", f"b={path}[6:]"], 2)
    assert [prompt.id for prompt in sets["b"]] == ["say.jsonl/7", "say.jsonl/8"]
    chat = [{"role": "user", "content": "say 7"}]
    asked = make_target().tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert sets["b"][1].token_ids == asked
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda name: name)
    arguments = ["--target", str(target_dir), "--drafter", "none", "--prompts", f"a={path}", "--plain", "c"]
    assert program.main([*arguments, "--output", str(tmp_path / "x.json")]) == 2
    assert capsys.readouterr().err == "error: --plain c: not one of the sets: a\n"


def test_command_in_docstring_parses() -> None:
    args = program.parse(
        ["--target", "/m/model", "--drafter", "/o/drafter-8m", "--prompts", "a=/w/a.jsonl", "b=b.jsonl[8:]",
         "--ours", "/o/result.json", "--output", "/o/peer.json"]
    )  # fmt: skip
    assert args.prompts == ["a=/w/a.jsonl", "b=b.jsonl[8:]"] and args.max_tokens == 512 and args.run is None
