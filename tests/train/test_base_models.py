"""Base models: prompts completed as they are, or rendered by a chat template from a file, in every command."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import EOS, TEMPLATE, make_tokenizer
from live_server import client_of, make_engine, serving
from programs import Program, lines, write

from dflash_toolkit import Target, load_drafter
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.doctor.cli import main as examine
from dflash_toolkit.evaluation.cli import main as evaluate
from dflash_toolkit.models.dflash.checkpoint import PROVENANCE_KEY
from dflash_toolkit.models.target_files import load_tokenizer
from dflash_toolkit.serve.cli import main as serve
from dflash_toolkit.train.responses.conversation import recorded_rows
from dflash_toolkit.train.responses.corpus import Corpus

TEXT = ("--prompt-format", "text")


@pytest.fixture
def base(target_dir: Path, tmp_path: Path) -> Path:
    """The tiny target without a chat template."""
    folder = shutil.copytree(target_dir, tmp_path / "base")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    assert load_tokenizer(str(folder)).chat_template is None
    return folder


def reported(base: Path, drafter: Path, prompts: Path, output: Path, *more: str) -> int:
    words = ["--target", base, "--drafter", drafter, "--prompts", f"p={prompts}", "--output", output]
    return evaluate([*map(str, words), "--device", "cpu", "--max-tokens", "8", "--limit", "3", *more])


def test_plain_text_goes_through_data_train_eval_and_serve(
    base: Path, dflash_data: Program, dflash_train: Program, prompts: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(base))
    dflash_data("--target", base, *TEXT)
    assert "--prompt-format text" in dflash_data.out
    for row, prompt in zip(dflash_data.rows(), lines(prompts), strict=True):
        assert row["tokens"][: row["prompt_tokens"]] == tokenizer.encode(prompt["prompt"])
    dflash_train("--target", base, *TEXT, "--responses", dflash_data.output, "optim.steps=2", "data=[]")
    exported = dflash_train.output
    note = json.loads((exported / "config.json").read_text())[PROVENANCE_KEY]
    assert note["prompt_format"] == "text" and "without a chat template" in (exported / "README.md").read_text()
    assert reported(base, exported, prompts, tmp_path / "report", *TEXT) == 0
    report = (tmp_path / "report/report.json").read_text()
    assert "ask 0 of it" in report and "<|user|>" not in report
    with serving(make_engine(Target.load(str(base), "cpu"), load_drafter(str(exported)))) as url:
        text = lines(prompts)[0]["prompt"]
        answer = client_of(url).completions.create(model="org/tiny", prompt=text, max_tokens=12, temperature=0)
        assert answer.usage.prompt_tokens == len(tokenizer.encode(text))
        first = next(row["tokens"][row["prompt_tokens"] :] for row in dflash_data.rows() if row["index"] == 0)
        assert answer.choices[0].text == tokenizer.decode(first, skip_special_tokens=True)


@pytest.mark.parametrize("regenerate", [True, False])
def test_training_completes_or_reads_plain_text(
    base: Path, short_run: Program, tmp_path: Path, regenerate: bool
) -> None:
    rows = [{"prompt": f"number {i} is", "completion": f" {i}, and then {i + 1}"} for i in range(8)]
    data = write(tmp_path / "texts.jsonl", rows)
    short_run("--target", base, *TEXT, "--data", data, f"responses.regenerate={str(regenerate).lower()}")
    corpus = Corpus.open(short_run.output / "work/corpus")
    tokenizer = load_tokenizer(str(base))
    prompts = {tuple(tokenizer.encode(row["prompt"])) for row in rows}
    found = [
        (tuple(row.tokens[: row.prompt_tokens]), tokenizer.decode(row.tokens[row.prompt_tokens :])) for row in corpus
    ]
    assert found and {prompt for prompt, _ in found} <= prompts
    assert all(text.startswith(" ") and "and then" in text for _, text in found) != regenerate


def test_a_template_file_equals_the_target_s_own(base: Path, dflash_data: Program, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    dflash_data("--target", base, "--chat-template", file, output="file.jsonl")
    assert f"--chat-template {file}" in dflash_data.out
    dflash_data(output="own.jsonl")
    assert dflash_data.answers("file.jsonl") == dflash_data.answers("own.jsonl")
    assert dflash_data.rows("file.jsonl")[0]["template_hash"] == dflash_data.rows("own.jsonl")[0]["template_hash"]
    assert "cannot be read" in dflash_data.refuses("--chat-template", tmp_path / "none", output="none.jsonl")
    assert "remove --chat-template" in dflash_data.refuses("--chat-template", file, *TEXT, output="none.jsonl")


def test_a_base_model_without_either_is_refused_with_both_ways(
    base: Path, dflash_data: Program, dflash_train: Program, drafter_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    ways = "--chat-template FILE", "--prompt-format text"
    for program in (dflash_data, dflash_train):
        assert all(way in program.refuses("--target", base) for way in ways)
    assert reported(base, drafter_dir, prompts, tmp_path / "report") == 2
    error = dflash_data.capsys.readouterr().err
    assert all(way in error for way in ways)
    assert examine(["--target", str(base), "--drafter", str(drafter_dir), "--device", "cpu"]) == 2
    error = dflash_data.capsys.readouterr().err
    assert all(way in error for way in ways)


def test_plain_text_refuses_rows_with_several_messages(base: Path, dflash_data: Program, tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    rows = write(tmp_path / "chats.jsonl", [{"messages": chat}])
    assert "none of 1 responses" in dflash_data.refuses("--target", base, *TEXT, "--data", rows)
    tokenizer = load_tokenizer(str(base), prompt_format="text")
    with pytest.raises(Exception, match="messages of system, user"):
        encode_chat(tokenizer, chat)


def test_recorded_completions_follow_their_prompt_and_end(base: Path) -> None:
    tokenizer = load_tokenizer(str(base), prompt_format="text")
    pair = [{"role": "user", "content": "def f"}, {"role": "assistant", "content": "oo(): pass"}]
    (row,), lost = recorded_rows(tokenizer, pair, (), {EOS})
    assert not lost and row.tokens == [*tokenizer.encode("def f"), *tokenizer.encode("oo(): pass"), EOS]
    assert row.spans == ((len(tokenizer.encode("def f")), len(row.tokens)),)


def test_a_server_reads_its_template_file_before_it_starts(base: Path, tmp_path: Path, capfd: Any) -> None:
    words = ["--target", str(base), "--port", "0", "--device", "cpu", "--chat-template", str(tmp_path / "none")]
    assert serve(words) == 2
    assert "cannot be read" in capfd.readouterr().err
