"""Prompts that the target writes itself: the user's turn of any template, filters, resume, and both commands."""

import signal
from pathlib import Path
from typing import Any

import forked
import pytest
from conftest import make_tokenizer
from programs import Program, altered, lines, write
from prompt_writing import ANSWER, ASKED, FOOD, REFUSAL, WHERE, make_writing

from dflash_toolkit import UserError
from dflash_toolkit.files import read_json
from dflash_toolkit.train.prompts.quality import fault_of
from dflash_toolkit.train.prompts.user_turn import user_turn

CHATML = (
    "{% if messages[0].role != 'system' %}<|system|>You help.<|end|>\n{% endif %}{% for m in messages %}<|{{ m.role }}"
    "|>{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content }}<|end|>{% endif %}{% endfor %}"
)
WORDS = (
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
BARE = "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
ENDLESS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
CHINESE = "\u5199\u4e00\u9996\u5173\u4e8e\u96e8\u7684\u77ed\u8bd7\u5427\u597d\u5417"
RUSSIAN = "\u043d\u0430\u043f\u0438\u0448\u0438 \u043c\u043d\u0435 \u0441\u0442\u0438\u0445\u0438"
TWICE = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "opening", "stops", "written", "words"),
    [
        (CHATML, "<|system|>You help.<|end|>\n<|user|>", {256, 258, 259, 260}, "Why is it so?", "Why is it so?"),
        (BRACKETS, "[INST]", set(), " Why is it so? [/INST] Since", "Why is it so?"),
        (WORDS, "User:", set(), " Why is it so?\n\nAssistant: Since", "Why is it so?"),
    ],
)
def test_the_users_turn_is_found_in_any_template(
    template: str, opening: str, stops: set[int], written: str, words: str
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    turn = user_turn(tokenizer, [])
    assert tokenizer.decode(turn.opening) == opening and {*turn.stop_ids} == stops
    assert turn.words_in(written)[0] == words
    later = user_turn(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert len(later.opening) > len(turn.opening) and later.end == turn.end


@pytest.mark.parametrize("template", [BARE, ENDLESS, TWICE, None])
def test_a_template_without_a_users_turn_is_refused(template: str | None) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match="chat template"):
        user_turn(tokenizer, [])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Write a poem about rain.", None), (CHINESE, None),
        ("Solve 3x + 4 = 19 for x.", None), ("hello", "too short"), ("\ufffd\ufffd what is this", "unreadable"),
        ("@@ ## $$ %% ^^ && ** (( ))", "unreadable"), ("Say it again. " * 40, "repetitive"),
        ("Assistant: I think that", "with marks of a template"), ("Tell me <|im_end|> now", "with marks of a template"),
        ("I'm sorry, but I cannot do it.", "like an answer or a refusal"),
        ("I\u2019m sorry, but no, I will not.", "like an answer or a refusal"),
        ("Sure! Here is a poem about rain.", "like an answer or a refusal"),
    ],
)  # fmt: skip
def test_texts_that_are_not_prompts_are_dropped(text: str, reason: str | None) -> None:
    assert fault_of(text) == reason


def test_prompts_in_another_script_are_dropped() -> None:
    assert fault_of("Write a poem about rain.", "latin") is None
    assert fault_of(RUSSIAN, "latin") == "in another script"


# ---- the commands ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def writing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("writing")
    target = make_writing()
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def synthesis(dflash_data: Program, writing: Path) -> Program:
    dflash_data.target = writing
    dflash_data.argv = lambda target, data, output, *more: [
        "--target", str(target), "--output", str(output), "--synthesize-prompts", "12", "max_tokens=4", "--samples",
        "1", "--no-greedy-first", "--temperature", "0", *more,
    ]  # fmt: skip
    return dflash_data


def own(program: Program, name: str = "a") -> list[dict[str, Any]]:
    return lines(program.output.parent / f"{name}.self.jsonl")


def test_the_target_writes_distinct_prompts_and_answers_them(synthesis: Program, tmp_path: Path) -> None:
    synthesis()
    asked = [row["messages"][0]["content"] for row in own(synthesis)]
    assert len({*asked}) == len(asked) == 12
    assert {*asked} <= {a + b + c for a in ASKED for b in FOOD for c in WHERE}
    meta = read_json(tmp_path / "a.self.run.json")
    assert meta["counts"]["left_out"]["like an answer or a refusal"] > 0
    assert meta["counts"]["attempts"] == 12 + sum(meta["counts"]["left_out"].values())
    assert [row["messages"][0]["content"] for row in synthesis.rows()] == asked
    assert {row["messages"][1]["content"] for row in synthesis.rows()} == {ANSWER}
    assert REFUSAL not in asked


def test_own_prompts_follow_from_the_seed(synthesis: Program) -> None:
    for name, more in {"a": (), "b": ("--batch-size", 3), "c": ("--seed", 5)}.items():
        synthesis(*more, output=f"{name}.jsonl")
    assert own(synthesis, "a") == own(synthesis, "b") != own(synthesis, "c")


def test_a_killed_synthesis_resumes_with_the_same_prompts(synthesis: Program, tmp_path: Path) -> None:
    synthesis(output="whole.jsonl")
    journal = tmp_path / "a.self.attempts.jsonl"
    running = forked.start("dflash_toolkit.train.data_cli", synthesis.words("--batch-size", "4"), until=(journal, 5))
    forked.wait_stopped(running)
    running.kill()
    running.join(60)
    assert running.exitcode == -signal.SIGKILL
    with open(journal, "a") as handle:
        handle.write('{"attempt": 99, "mess')  # torn
    synthesis()
    assert own(synthesis) == own(synthesis, "whole") and not journal.exists()


def test_several_turns_have_the_targets_answers_between(synthesis: Program) -> None:
    synthesis("synthesis.turns=3", "--synthesize-prompts", "6")
    roles = [[m["role"] for m in row["messages"]] for row in own(synthesis)]
    assert all(each == ["user", "assistant"] * (len(each) // 2) + ["user"] for each in roles)
    assert max(map(len, roles)) == 5, "three user turns"
    assert {m["content"] for row in own(synthesis) for m in row["messages"] if m["role"] == "assistant"} == {ANSWER}


def test_topics_are_read_and_without_lines_refused(synthesis: Program, tmp_path: Path) -> None:
    topics = tmp_path / "topics.txt"
    topics.write_text("tea\n\nbread\n")
    synthesis("--topics", topics)
    assert len(own(synthesis)) == 12
    topics.write_text("\n")
    assert "holds no topics" in synthesis.refuses("--topics", topics, output="b.jsonl")


def test_prompts_of_another_run_are_refused(synthesis: Program) -> None:
    synthesis()
    assert "prompts of another run" in synthesis.refuses("--synthesize-prompts", "13")
    assert "is complete" in "\n".join(synthesis())


def test_a_target_that_writes_no_prompts_ends_the_run(dflash_data: Program) -> None:
    dflash_data.argv = lambda target, data, output, *more: [
        "--target", str(target), "--output", str(output), "--synthesize-prompts", "5", "synthesis.max_tokens=8",
    ]  # fmt: skip
    said = dflash_data.refuses()
    assert "usable prompts in 500 attempts" in said and "--data" in said


def test_endpoints_do_not_write_prompts(synthesis: Program) -> None:
    assert "endpoint excludes --synthesize-prompts" in synthesis.refuses("--endpoint", "http://127.0.0.1:9")


def test_training_on_own_prompts_is_training_on_their_file(
    dflash_train: Program, writing: Path, tmp_path: Path
) -> None:
    dflash_train.target, dflash_train.data = writing, None
    dflash_train("--data", "self:12", "optim.steps=2", output="self")
    file = dflash_train.place("self") / "self.jsonl"
    assert len(lines(file)) == 12
    dflash_train("--data", file, "optim.steps=2", output="file")
    one, other = (read_json(dflash_train.place(name) / "run.json") for name in ("self", "file"))
    assert one["data_hash"] == other["data_hash"] and one["result"]["steps"] == 2
    assert "finished" in dflash_train("--data", "self:12", "optim.steps=2", output="self")[-1]


def test_a_refused_template_leaves_no_output(dflash_train: Program, writing: Path, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = BARE
    dflash_train.target, dflash_train.data = altered(dflash_train.target, tmp_path / "bare", tokenizer), None
    said = dflash_train.refuses("--data", "self:12", output="bare-run")
    assert "does not mark the beginning and the end" in said and not dflash_train.place("bare-run").exists()


def test_two_sources_of_own_prompts_are_refused(dflash_train: Program) -> None:
    dflash_train.data = None
    assert "give one" in dflash_train.refuses("--data", "self:12", "self:5")
    assert "responses.regenerate" in dflash_train.refuses("--data", "self:12", "responses.regenerate=false")


def test_own_prompts_are_estimated(dflash_train: Program) -> None:
    dflash_train.data = None
    dflash_train("--data", "self:1234", "--estimate")
    assert "1,234 prompts" in dflash_train.out


def test_own_prompts_join_those_of_files(synthesis: Program, tmp_path: Path) -> None:
    more = write(tmp_path / "more.jsonl", [{"prompt": "What is a kettle made of?"}])
    synthesis("--data", more)
    assert len(synthesis.rows()) == 13
