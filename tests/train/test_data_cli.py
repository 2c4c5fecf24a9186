"""dflash-data from the outside: rows in the target's own words, resumed after any kill, and trained on."""

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import pytest
from conftest import EOS, answers_of

from dflash_toolkit import SamplingParams, Target, UserError, generate
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.fingerprint import template_digest
from train import cli
from train.config import DataOptions, TrainConfig
from train.data_cli import main
from train.responses import collect
from train.responses.file import Match, read_training_rows

SHORT = "max_tokens=12"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "p.jsonl", [{"prompt": f"ask {i} of it"} for i in range(9)])


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def argv(target: Path, data: Path, output: Path, *more: str) -> list[str]:
    return ["--target", str(target), "--data", str(data), "--output", str(output), SHORT, *more]


def with_stop(target_dir: Path, path: Path, stop: int) -> Path:
    """The target with one more end-of-sequence token."""
    shutil.copytree(target_dir, path)
    config = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [EOS, stop]}))
    return path


# ---- rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ["auto", "reference"])
def test_a_row_is_the_target_s_greedy_answer_and_says_what_wrote_it(
    runtime: str, target: Target, target_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out" / "a.jsonl"
    assert main(argv(target_dir, prompts, output, "--runtime", runtime)) == 0
    assert "9 answers" in capsys.readouterr().err
    rows = sorted(lines(output), key=lambda row: row["index"])
    assert [row["index"] for row in rows] == list(range(9))
    for i, row in enumerate(rows):
        ids = encode_chat(target.tokenizer, [user(f"ask {i} of it")])
        answer = generate(target, None, ids, SamplingParams(max_new_tokens=12))
        assert row["tokens"] == ids + answer.tokens and row["prompt_tokens"] == len(ids)
        assert row["spans"] == [[len(ids), len(ids) + len(answer.tokens)]]
        assert row["finish_reason"] == answer.finish_reason and (row["part"], row["parts"]) == (0, 1)
        assert row["id"] == f"p.jsonl, line {i + 1}" and row["sample"] == 0
        assert row["messages"][0] == user(f"ask {i} of it") and row["messages"][1]["role"] == "assistant"
        assert row["template_hash"] == template_digest(target.tokenizer) and row["target"] == str(target_dir)
        assert row["sampler"]["temperature"] == 0.0 and row["sampler"]["max_tokens"] == 12


def test_every_sample_has_a_seed_of_its_own_and_the_same_on_every_backend(
    target: Target, target_dir: Path, drafter_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    sampled = ("temperature=1.5", "samples=3", "top_k=50", "min_p=0.001")
    answers = []
    for name, more in {"e": (), "d": ("--drafter", str(drafter_dir)), "r": ("--runtime", "reference")}.items():
        assert main(argv(target_dir, prompts, tmp_path / f"{name}.jsonl", *sampled, *more)) == 0
        rows = lines(tmp_path / f"{name}.jsonl")
        answers.append({(row["index"], row["sample"]): row["tokens"] for row in rows})
    assert answers[0] == answers[1] == answers[2] and len(answers[0]) == 27
    assert len({tuple(answers[0][0, sample]) for sample in range(3)}) == 3


def test_a_conversation_is_answered_turn_by_turn_by_the_target(
    target: Target, target_dir: Path, tmp_path: Path
) -> None:
    first = generate(target, None, encode_chat(target.tokenizer, [user("one")]), SamplingParams(max_new_tokens=5))
    ended = with_stop(target_dir, tmp_path / "t", first.tokens[4])  # an answer must end for the next turn to be asked
    talk = {"messages": [user("one"), {"role": "assistant", "content": "theirs"}, user("two"), user("three")]}
    assert main(argv(ended, write(tmp_path / "p.jsonl", [talk]), tmp_path / "a.jsonl")) == 0
    rows = lines(tmp_path / "a.jsonl")
    assert [(row["part"], row["parts"]) for row in rows] == [(i, len(rows)) for i in range(len(rows))]
    spans = [(row["tokens"], start, end) for row in rows for start, end in row["spans"]]
    assert len(spans) == 2
    loaded = Target.load(str(ended))
    for tokens, start, end in spans:
        assert generate(loaded, None, tokens[:start], SamplingParams(max_new_tokens=12)).tokens == tokens[start:end]
    last = rows[-1]["messages"]
    assert [m["role"] for m in last] == ["user", "assistant", "user", "user", "assistant"]
    assert last[1]["content"] == target.tokenizer.decode(first.tokens[:4], skip_special_tokens=True) != "theirs"
    assert spans[1][0][: spans[1][1]] == encode_chat(target.tokenizer, last[:-1])


def test_near_duplicates_go_and_what_cannot_be_trained_on_is_counted(
    target: Target, target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = generate(target, None, encode_chat(target.tokenizer, [user("quick")]), SamplingParams(max_new_tokens=2))
    quick = with_stop(target_dir, tmp_path / "t", first.tokens[0])  # "quick" is answered by a stop token alone
    kept = next(
        text for text in ("ask me", "tell me", "ask you")
        if generate(Target.load(str(quick)), None, encode_chat(target.tokenizer, [user(text)])).tokens[1:2]
    )  # fmt: skip
    data = write(tmp_path / "p.jsonl", [{"prompt": p} for p in (kept, kept.upper(), "quick", "long " * 20)])
    output = tmp_path / "a.jsonl"
    assert main(argv(quick, data, output, "prompts.max_length=60")) == 0
    said = capsys.readouterr().err
    assert "3 prompts; left out: 1 near duplicates" in said
    assert "dropped 1 shorter than two tokens, 1 too long" in said.splitlines()[-1]
    (row,) = lines(output)
    assert row["messages"][0] == user(kept) and len(row["tokens"]) <= 60


def test_max_prompts_takes_the_first_of_all_sources(target_dir: Path, prompts: Path, tmp_path: Path) -> None:
    more = write(tmp_path / "q.jsonl", [{"prompt": f"now {i} else"} for i in range(4)])
    command = ["--target", str(target_dir), "--data", str(prompts), str(more), "--output", str(tmp_path / "a.jsonl")]
    assert main([*command, SHORT, "prompts.max_prompts=11"]) == 0
    assert {row["messages"][0]["content"] for row in lines(tmp_path / "a.jsonl")} == {
        *(f"ask {i} of it" for i in range(9)), "now 0 else", "now 1 else",
    }  # fmt: skip


# ---- resume ----------------------------------------------------------------------------------------------------


def by_key(path: Path) -> dict[tuple[int, int], dict[str, Any]]:
    rows = {(row["index"], row["sample"]): row for row in lines(path)}
    assert len(rows) == len(lines(path)), "an answer is there twice"
    return rows


def test_kill_9_again_and_again_loses_and_doubles_nothing(target_dir: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "p.jsonl", [{"prompt": f"ask {i} of it"} for i in range(14)])
    sampled = ("temperature=1.2", "samples=2", "--batch-size", "4")
    assert main(argv(target_dir, data, tmp_path / "whole.jsonl", *sampled)) == 0
    output = tmp_path / "a.jsonl"
    for answers in (3, 17):  # of 28
        running = forked.start("train.data_cli", argv(target_dir, data, output, *sampled), until=(output, answers))
        forked.wait_stopped(running)
        running.kill()
        running.join(60)
        assert running.exitcode == -signal.SIGKILL
    with open(output, "r+b") as handle:
        handle.truncate(output.stat().st_size - 7)  # a line torn by a crash of the machine
    assert main(argv(target_dir, data, output, *sampled)) == 0
    assert by_key(output) == by_key(tmp_path / "whole.jsonl")
    before = output.read_bytes()
    assert main(argv(target_dir, data, output, *sampled)) == 0
    assert output.read_bytes() == before, "a finished run is left alone"


def test_parts_of_a_conversation_stay_together_when_the_file_is_cut(
    target_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "a.jsonl"
    assert main(argv(target_dir, prompts, output)) == 0
    rows = lines(output)
    rows[-1]["parts"] = 2  # as if the second part had not been written any more
    write(output, rows)
    record = tmp_path / "a.run.json"
    record.write_text(json.dumps({k: v for k, v in json.loads(record.read_text()).items() if k != "finished"}))
    assert main(argv(target_dir, prompts, output)) == 0
    assert [row["parts"] for row in by_key(output).values()] == [1] * 9


def test_the_prompts_of_a_run_stay_when_a_source_cannot_be_read_again(
    target_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "a.jsonl"
    assert main(argv(target_dir, prompts, output)) == 0
    assert [row["turns"][0][0]["content"] for row in lines(tmp_path / "a.prompts.jsonl")] == [
        f"ask {i} of it" for i in range(9)
    ]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["seed=1"], "seed: 0, now 1"),
        (["prompts.similarity=0.5"], "prompts.similarity: 0.8, now 0.5"),
        (["OTHER DATA"], "data."),
    ],
)
def test_answers_of_another_run_are_not_mixed(
    change: list[str], named: str, target_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "a.jsonl"
    assert main(argv(target_dir, prompts, output)) == 0
    before = output.read_bytes()
    if change == ["OTHER DATA"]:
        write(prompts, [{"prompt": "other"}])
        change = []
    assert main(argv(target_dir, prompts, output, *change)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "holds answers of another run" in error and named in error
    assert output.read_bytes() == before


def test_two_runs_do_not_write_one_file(target_dir: Path, prompts: Path, tmp_path: Path, capsys: Any) -> None:
    import fcntl

    with open(tmp_path / "a.jsonl", "ab") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert main(argv(target_dir, prompts, tmp_path / "a.jsonl")) == 2
    assert "being written by another run" in capsys.readouterr().err


# ---- mistakes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["samples=2"], "at temperature 0 are all the same"),
        (["top_p=0"], "top_p is 0"),
        (["temprature=1"], "did you mean `temperature`"),
        (["prompts.similarity=2"], "prompts.similarity is 2"),
        (["--batch-size", "0"], "batch_size is 0"),
        (["--runtime", "sglang"], "not one of auto, engine, reference, vllm"),
        (["--runtime", "vllm"], "runtime vllm needs vllm: pip install 'dflash-toolkit[vllm]'"),
        (["--runtime", "vllm", "--drafter", "x"], "runtime vllm excludes drafter"),
        (["--runtime", "reference", "--drafter", "/no/such"], "runtime reference excludes drafter"),
        (["--gpus", "2"], "gpus is 2"),
        (["--endpoint", "http://127.0.0.1:9", "--runtime", "engine"], "endpoint excludes"),
        (["--endpoint", "http://127.0.0.1:9"], "endpoint http://127.0.0.1:9/v1 does not answer"),
        (["--endpoint", "ftp://x"], "'ftp://x' is no address"),
        (["--data", "/no/such.jsonl"], "/no/such.jsonl"),
        (["--data", "BROKEN"], "broken.jsonl, line 2: not valid JSON"),
        (["--data", "BROKEN", "prompts.strict=false", "--device", "cuda:9"], "cuda:9"),
        (["--data", "REPLIES"], "replies.jsonl, line 1: none of messages"),
        (["--target", "/no/such/model"], "/no/such/model"),
        (["--output", "answers.json"], "must end in .jsonl"),
        (["--output", "/proc/nowhere/a.jsonl"], "/proc/nowhere"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_leaves_no_answers(
    change: list[str], named: str, target_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{nope\n')
    (tmp_path / "replies.jsonl").write_text('{"reply": "a"}\n')
    names = {"BROKEN": str(tmp_path / "broken.jsonl"), "REPLIES": str(tmp_path / "replies.jsonl")}
    arguments = argv(target_dir, prompts, tmp_path / "a.jsonl", *(names.get(word, word) for word in change))
    assert main(arguments) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and named in errors[0]
    assert not (tmp_path / "a.jsonl").exists() or not (tmp_path / "a.jsonl").stat().st_size


def test_malformed_rows_are_counted_if_asked(
    target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "ask a of it"}\n{nope\n3\n{"prompt": "ask b of it"}\n')
    assert main(argv(target_dir, tmp_path / "p.jsonl", tmp_path / "a.jsonl", "prompts.strict=false")) == 0
    assert "2 prompts; left out: 0 near duplicates, 2 malformed rows" in capsys.readouterr().err


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(word in shown for word in ("--endpoint", "samples", "prompts.similarity", "server.retries"))


# ---- training on them ------------------------------------------------------------------------------------------

TRAIN = ("drafter.layers=1", "drafter.taps=2", "drafter.block_size=4", "loss.anchors=4", "optim.steps=2",
         "run.evaluate_tokens=8", "prompts.held_out=2")  # fmt: skip


def test_dflash_train_takes_the_answers_as_they_are(
    target_dir: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for seed in (0, 1):
        files.append(str(tmp_path / f"{seed}.jsonl"))
        sampled = ("temperature=1.2", "samples=2", f"seed={seed}")
        assert main(argv(target_dir, prompts, Path(files[-1]), *sampled)) == 0
    monkeypatch.setattr(collect, "open_decoder", None)  # nothing is answered again
    output = tmp_path / "drafter"
    assert cli.main(["--target", str(target_dir), "--responses", *files, "--output", str(output), *TRAIN]) == 0
    record = json.loads((output / "run.json").read_text())
    assert record["config"]["answer_files"] == files and record["result"]["answers"] == 28
    assert [sampler["seed"] for sampler in record["samplers"]] == [0, 1]
    config = TrainConfig(target=str(target_dir), answer_files=tuple(files), prompts=DataOptions(held_out=2))
    rows, held_out = answers_of(config, Target.load(str(target_dir), "cpu").tokenizer, tmp_path / "again")
    trained = {tuple(row.tokens[: row.prompt_tokens]) for row in rows}
    assert len(held_out) == 2 and len(rows) == 28
    assert not trained & {tuple(ids) for ids in held_out}, "nor from the other file"


def test_all_answers_to_a_held_out_prompt_stay_out_of_training(
    target: Target, target_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "a.jsonl"
    assert main(argv(target_dir, prompts, output, "temperature=1.2", "samples=3")) == 0
    config = TrainConfig(target=str(target_dir), answer_files=(str(output),), prompts=DataOptions(held_out=4))
    rows, held_out = answers_of(config, target.tokenizer, tmp_path / "again")
    asked = {tuple(row.tokens[: row.prompt_tokens]) for row in rows}
    assert len(rows) == 15 and len(held_out) == 4 and len(asked) == 5
    assert not asked & {tuple(ids) for ids in held_out}
    assert len({row.index for row in rows}) == 15, "features are kept by this number"


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("template_hash", "0" * 64, "another chat template"),
        ("target_digest", "0" * 64, "with other weights (000000000000)"),
        ("vocab_size", 7, "with 7 tokens in its vocabulary"),
        ("spans", [], "not a row that dflash-data wrote"),
        ("spans", [[9, 4]], "not a row that dflash-data wrote"),
        ("spans", None, "not a row that dflash-data wrote"),
        ("tokens", ["a"], "not a row that dflash-data wrote"),
        ("index", None, "not a row that dflash-data wrote"),
    ],
)
def test_answers_of_something_else_are_refused_by_line(
    key: str, value: Any, named: str, target_dir: Path, prompts: Path, tmp_path: Path, capsys: Any
) -> None:
    output = tmp_path / "a.jsonl"
    assert main(argv(target_dir, prompts, output)) == 0
    rows = lines(output)
    rows[3][key] = value
    write(output, rows)
    command = ["--target", str(target_dir), "--responses", str(output), "--output", str(tmp_path / "d"), *TRAIN]
    assert cli.main(command) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{output}, line 4" in error and named in error


def test_answers_are_matched_by_the_weights_that_wrote_them(
    target_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "a.jsonl"
    assert main(argv(target_dir, prompts, output)) == 0
    row = lines(output)[0]
    same = Match("/elsewhere/another-name", row["target_digest"], row["vocab_size"], row["template_hash"])
    assert len(read_training_rows([str(output)], same)) == 9
    capsys.readouterr()
    # another's answers under the same name are not taken, unless that is said to be right
    name = f"/elsewhere/{os.path.basename(target_dir)}"
    other = replace(same, target=name, digest="0" * 64)
    with pytest.raises(UserError, match=r"line 1: written by .* with other weights .* give --trust-answers"):
        read_training_rows([str(output)], other)
    trusted = replace(other, template="f" * 64, trust=True)
    assert len(read_training_rows([str(output)], trusted)) == 9
    assert capsys.readouterr().err.count("are trusted to be of") == 1
    # of a model whose weights are elsewhere, or in files from before there were digests, the name must do
    for match, drop in ((replace(same, target=name, digest=None), False), (replace(same, target=name), True)):
        if drop:
            write(output, [{k: v for k, v in each.items() if k != "target_digest"} for each in lines(output)])
        assert len(read_training_rows([str(output)], match)) == 9
        assert capsys.readouterr().err.count("by the name alone") == 1
        with pytest.raises(UserError, match=r"line 1: written by .* tokens in its vocabulary, and the target is other"):
            read_training_rows([str(output)], replace(match, target="other"))


def test_data_and_answers_together_are_a_mistake(target_dir: Path, prompts: Path, capsys: Any) -> None:
    assert cli.main(["--target", str(target_dir), "--data", str(prompts), "--responses", "a.jsonl"]) == 2
    assert "give one of them" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.prompts.jsonl", "a.jsonl", "a.run.json"])
def test_a_source_is_never_a_file_that_the_run_writes(
    name: str, target_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / name
    source.write_bytes(prompts.read_bytes())
    assert main(argv(target_dir, source, tmp_path / "a.jsonl")) == 2
    assert "is a file that this run would write" in capsys.readouterr().err
    assert source.read_bytes() == prompts.read_bytes() and len(list(tmp_path.iterdir())) == 2


def test_answers_that_are_gone_are_not_finished(
    target_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "a.jsonl"
    assert main(argv(target_dir, prompts, output)) == 0
    output.unlink()
    assert main(argv(target_dir, prompts, output)) == 2
    assert "remove a.run.json to begin again" in capsys.readouterr().err
