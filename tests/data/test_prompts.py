"""Prompt files of every usual shape, and what is refused with the number of its line."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import make_tokenizer
from programs import says, user

from dflash_toolkit import UserError
from dflash_toolkit.data.benchmarks import PLACEHOLDER
from dflash_toolkit.data.conversations import Conversation
from dflash_toolkit.data.prompts import encode_chat, parse_prompt_sets, read_prompt_sets, read_prompts, warn_of_thinking
from dflash_toolkit.data.sources import Malformed, Source
from dflash_toolkit.fingerprint import files_digest, template_digest


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write rows (or raw lines) to a JSONL file."""

    def write(*rows: Any, name: str = "prompts.jsonl") -> Path:
        text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


# ---- forms of benchmarks ------------------------------------------------------------------------

CODE = 'def f(x):\n    """{x} and {prompt} stay as they are."""\n'
# the prompt of dflash-eval's figures, letter for letter
STEPS = "Please reason step by step, and put your final answer within \\boxed{}."
SOLVE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\nCODE\n```"
TESTED = "Write f.\nYour code should pass this test:\nassert f(1)"
FORMED: dict[str, tuple[dict[str, Any], str]] = {
    "gsm8k": ({"question": " 1 + 1? ", "answer": "2"}, f"1 + 1?\n{STEPS}"),
    "math500": ({"problem": "1 + 1?", "solution": "It is 2.", "answer": "2"}, f"1 + 1?\n{STEPS}"),
    "math": ({"problem": "1 + 1?"}, f"1 + 1?\n{STEPS}"),
    "aime": ({"question": "1 + 1?", "answer": 2}, f"1 + 1?\n{STEPS}"),
    "humaneval": ({"prompt": CODE, "entry_point": "f", "task_id": "HumanEval/0"}, SOLVE.replace("CODE", CODE[:-1])),
    "mbpp": ({"text": "Write f.", "test_list": ["assert f(1)", "assert f(2)"]}, TESTED),
    "mt_bench": ({"turns": [" First \n", "Second"]}, "First"),
}


@pytest.mark.parametrize("form", FORMED)
def test_a_benchmark_template_needs_its_name_or_form(
    form: str, write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    row, expected = FORMED[form]
    path = write(row, row)

    def ask(item: str, **options: Any) -> str:
        (found,) = read_prompt_sets([item], **options).values()
        assert len(found) == 2 and found[0].messages == found[1].messages
        return found[0].messages[0]["content"]

    assert ask(f"{form}={path}") == expected
    assert f"{form}: asked in the form of the benchmark {form}\n" in capsys.readouterr().err
    assert ask(f"shop={path}", form=form) == expected
    (again, _) = Source(f"{form}={path}[0:2]").read()
    assert isinstance(again, Conversation) and again.turns[0] == (user(expected),)
    plain = next(str(row[key]) for key in ("question", "problem", "prompt", "text", "turns") if key in row)
    plain = "First" if form == "mt_bench" else plain
    for found in (ask(f"{form}={path}", form="none"), ask(f"shop={path}"), ask(f"{form}_2={path}")):
        assert found == plain
    said = capsys.readouterr().err
    assert f"{form}_2: no benchmark form is applied to the name '{form}_2'; {form}={path} applies that one\n" in said
    if form != "mt_bench":
        assert said.count("shop: asked as its rows are; ") == 1
        (way,) = re.findall(rf"shop: asked as its rows are; .*?(\w+={re.escape(str(path))}) .*benchmark does\n", said)
        assert ask(way) == expected  # the suggested command works


@pytest.mark.parametrize(
    ("form", "row", "needed"),
    [
        ("gsm8k", {"prompt": "a"}, "question or problem"),
        ("humaneval", {"text": "a"}, "prompt"),
        ("humaneval", {"prompt": [user("a")]}, "prompt"),
        ("mbpp", {"text": "a"}, "text or prompt and a test_list"),
        ("mbpp", {"text": "a", "test_list": []}, "text or prompt and a test_list"),
        ("mt_bench", {"turns": []}, "turns or prompt"),
        ("math500", {"problem": 3}, "question or problem"),
    ],
)
def test_a_row_that_does_not_fit_the_form_is_named(
    form: str, row: dict[str, Any], needed: str, write: Callable[..., Path]
) -> None:
    path = write(FORMED[form][0], row)
    message = f"the form {form} needs {needed} in each row; form none reads rows as they are"
    with pytest.raises(UserError) as caught:
        read_prompts(f"{form}={path}")
    assert str(caught.value) == f"{path}, line 2: {message}"
    _, odd = Source(str(path), form).read()
    assert odd == Malformed(f"{path}, line 2", message)


def test_an_unknown_form_is_an_error(write: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"form 'gsm8': .* gsm8k"):
        read_prompts(write({"prompt": "a"}), form="gsm8")


def test_a_row_is_named_by_its_id_or_task_id_or_its_file_and_line(write: Callable[..., Path]) -> None:
    path = write({"prompt": "a", "id": 7}, "", {"prompt": "b", "task_id": "t/1"}, {"prompt": "c"})
    assert [p.id for p in read_prompts(path)] == ["7", "t/1", "prompts.jsonl/4"]


def test_rows_after_the_limit_are_not_read(write: Callable[..., Path]) -> None:
    path = write(*says("a", "b"), "not json at all")
    assert [p.messages[0]["content"] for p in read_prompts(path, limit=2)] == ["a", "b"]
    with pytest.raises(UserError, match="line 3"):
        read_prompts(path)


# ---- sets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "limit", "rows"),
    [
        ("a=FILE", None, "01234"),
        ("a=FILE", 2, "01"),
        ("a=FILE[1:3]", None, "12"),
        ("a=FILE[1:3]", 1, "1"),
        ("a=FILE[1:]", 2, "12"),
        ("a=FILE[:2]", 3, "01"),
        ("a=FILE[3:9]", None, "34"),
    ],
)
def test_a_range_selects_rows_of_the_file(write: Callable[..., Path], item: str, limit: int | None, rows: str) -> None:
    path = write(*says(*"01234"))
    (found,) = read_prompt_sets([item.replace("FILE", str(path))], limit).values()
    assert "".join(prompt.messages[0]["content"] for prompt in found) == rows


def test_a_bare_source_is_named_after_itself(write: Callable[..., Path]) -> None:
    path = write(*says("a", "b"))
    assert [len(rows) for rows in read_prompt_sets([str(path)]).values()] == [2]
    assert list(read_prompt_sets([f"{path}[1:]"])) == [path.stem]
    assert [each.name for each in parse_prompt_sets(["openai/gsm8k:main[:9]", "a.b/mt.jsonl"])] == ["gsm8k", "mt"]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["a.jsonl", "out/a.jsonl[1:2]"], "'out/a.jsonl[1:2]': the name 'a' is used twice"),
        (["=FILE"], "'=FILE': expected NAME=SOURCE or"),
        (["a="], "'a=': expected NAME=SOURCE or"),
        (["a=FILE", "a=OTHER"], "'a=OTHER': the name 'a' is used twice"),
        (["a=FILE[2:2]"], "no such rows"),
        (["a=FILE[:0]"], "no such rows"),
    ],
)
def test_items_without_a_set_are_errors(items: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_prompt_sets(items)
    with pytest.raises(UserError, match=re.escape(message)):
        read_prompt_sets(items)


def test_a_range_without_rows_is_an_error(write: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="no such rows; the range begins with row 1"):
        read_prompt_sets([f"a={write({'prompt': 'x'})}[1:]"])


# ---- chats -----------------------------------------------------------------------------------------


def test_encode_chat_ends_before_the_first_answer_token() -> None:
    tokenizer = make_tokenizer()
    ids = encode_chat(tokenizer, [{"role": "system", "content": "Be brief."}, user("Hi")])
    assert all(type(i) is int for i in ids)
    assert tokenizer.decode(ids) == "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"


@pytest.mark.parametrize(("thinking", "template", "warning"), [
    (True, "{{ messages[0].content }}", "warning: thinking=true changes nothing"), (None, "{{ messages }}", ""),
    (False, "{% if enable_thinking %}{% endif %}", ""),
])  # fmt: skip
def test_a_missing_thinking_mode_is_a_warning(
    thinking: bool | None, template: str, warning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    warn_of_thinking(tokenizer, thinking)
    said = capsys.readouterr().err
    assert said.startswith(warning) and bool(said) == bool(warning)


@pytest.mark.parametrize(("thinking", "tail"), [(None, "unset"), (True, "on"), (False, "off")])
def test_thinking_reaches_the_template_only_when_it_is_set(thinking: bool | None, tail: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{{ messages[0]['content'] }}"
        "{% if enable_thinking is not defined %}unset{% elif enable_thinking %}on{% else %}off{% endif %}"
    )
    assert tokenizer.decode(encode_chat(tokenizer, (user("a "),), thinking)) == f"a {tail}"


REFUSES = "the chat template refuses these messages"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "no chat template; give one with --chat-template FILE"),
        ("{{ raise_exception('roles must alternate') }}", REFUSES),
        ("{% if %}", REFUSES),
    ],
)
def test_a_missing_or_failing_chat_template_is_a_user_error(template: str | None, said: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=said):
        encode_chat(tokenizer, [user("Hi")])


# ---- hashes ----------------------------------------------------------------------------------------


def test_the_template_hash_is_that_of_the_template_text() -> None:
    tokenizer = make_tokenizer()
    for more in ("", " "):
        tokenizer.chat_template += more
        assert template_digest(tokenizer) == hashlib.sha256(tokenizer.chat_template.encode()).hexdigest()


def test_the_file_hash_is_that_of_the_contents_in_order(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"x" * 3_000_000)
    second.write_bytes(b"y")
    expected = hashlib.sha256(b"x" * 3_000_000 + b"y").hexdigest()
    assert files_digest([str(first), str(second)]) == expected
    assert files_digest([str(second), str(first)]) != expected
    with pytest.raises(UserError, match=r"nothing: cannot be read \(No such file"):
        files_digest([str(tmp_path / "nothing")])


# ---- benchmarks by name ------------------------------------------------------------------------------------------


def test_a_set_that_is_only_named_is_read_from_the_hub() -> None:
    first, second = parse_prompt_sets(["gsm8k", "mt_bench[2:4]"])
    assert (first.name, first.source.place, first.split, first.source.applied) == (
        "gsm8k", "openai/gsm8k:main", "test", "gsm8k",
    )  # fmt: skip
    assert (second.source.place, second.source.start, second.source.stop) == ("HuggingFaceH4/mt_bench_prompts", 2, 4)
    assert second.split == "train" and second.contents("test") == "HuggingFaceH4/mt_bench_prompts/train"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("spec_bench", "no dataset that can be streamed; give spec_bench=FILE, data/spec_bench/question.jsonl of"),
        ("speed_bench", "no dataset that can be streamed; give speed_bench=FILE, made by prepare_data.py of"),
        ("gsm9k", "no such file; sets known by name are gsm8k, math500, "),
    ],
)
def test_an_unknown_set_error_lists_the_known_ones(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"prompts '{name}': {message}"):
        parse_prompt_sets([name])


def test_hub_rows_and_file_rows_give_equal_prompts(tmp_path: Path) -> None:
    rows = {
        "mt_bench": {"prompt": ["One?", "Two?"], "category": "math"},
        "livecodebench": {"question_content": "Add.", "starter_code": "def add():"},
    }
    found = {}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        (found[name],) = read_prompts(f"{name}={tmp_path / name}.jsonl")
    assert found["mt_bench"].messages[0]["content"] == "One?" and found["mt_bench"].category == "math"
    assert [turn[0]["content"] for turn in found["mt_bench"].later] == ["Two?"]
    assert "```python\nAdd.\ndef add():\n```" in found["livecodebench"].messages[0]["content"]


@pytest.mark.parametrize("turns", [[PLACEHOLDER + " USING SPECDEC_BENCH"], ["Add 1.", PLACEHOLDER + "\n\n{question}"]])
def test_row_that_only_references_its_prompt_is_skipped(tmp_path: Path, turns: list[str]) -> None:
    path = tmp_path / "qualitative.jsonl"
    path.write_text(json.dumps({"turns": ["Why?"], "category": "qa"}) + "\n" + json.dumps({"turns": turns}) + "\n")
    assert read_prompts(f"speed_bench={path}", 1)[0].category == "qa"
    with pytest.raises(UserError, match=r"qualitative\.jsonl/2: SPEED-Bench"):
        read_prompts(f"speed_bench={path}")
