"""dflash-data from the outside: rows in the target's own words, resumed after any kill, and trained on."""

import fcntl
import functools
import os
import signal
from dataclasses import replace
from pathlib import Path

import forked
import pytest
import torch
from architectures import Architecture
from conftest import EOS, answers_of
from damage import damage
from programs import Program, altered, assistant, lines, says, user, write
from servers import Fake, whole

import dflash_toolkit.train.data_run
from dflash_toolkit import Drafter, SamplingParams, Target, UserError, generate
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.files import read_json, write_json
from dflash_toolkit.fingerprint import template_digest
from dflash_toolkit.runtime import Engine, EngineOptions
from dflash_toolkit.runtime.load import Parts
from dflash_toolkit.runtime.weights import DrafterWeights
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.data_options import DataOptions
from dflash_toolkit.train.responses import backends, collect
from dflash_toolkit.train.responses.file import Match, read_training_rows


def asked(target: Target, *texts: str) -> list[int]:
    return encode_chat(target.tokenizer, [user(text) for text in texts])


def greedy(target: Target, prompt: list[int], length: int = 12) -> list[int]:
    return generate(target, None, prompt, SamplingParams(max_tokens=length)).tokens


# ---- rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ["auto", "reference"])
def test_a_row_has_the_greedy_response_and_its_origin(runtime: str, target: Target, dflash_data: Program) -> None:
    assert "9 responses" in dflash_data("--runtime", runtime, output="out/a.jsonl")[-1]
    rows = sorted(dflash_data.rows("out/a.jsonl"), key=lambda row: row["index"])
    assert len(rows) == 9
    for i, row in enumerate(rows):
        ids = asked(target, f"ask {i} of it")
        answer = generate(target, None, ids, SamplingParams(max_tokens=12))
        assert row | {
            "index": i, "sample": 0, "part": 0, "parts": 1, "id": f"p.jsonl/{i + 1}",
            "tokens": ids + answer.tokens, "prompt_tokens": len(ids), "spans": [[len(ids), len(ids + answer.tokens)]],
            "finish_reason": answer.finish_reason, "target": str(dflash_data.target),
            "template_hash": template_digest(target.tokenizer),
        } == row  # fmt: skip
        assert row["messages"][0] == user(f"ask {i} of it") and row["messages"][1]["role"] == "assistant"
        assert row["sampler"]["temperature"] == 0.0 and row["sampler"]["max_tokens"] == 12


def test_the_reference_decodes_prompts_in_batches(dflash_data: Program, tmp_path: Path) -> None:
    target = Architecture("Phi", "PhiConfig").target()  # the engine does not compute it
    folder = tmp_path / "phi"
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    more = ("--target", folder, "--batch-size", 4)
    said = "the reference decodes, 4 prompts at a time; the engine cannot: "
    assert sum(line.startswith(said) for line in dflash_data(*more)) == 1
    for (i, _), tokens in dflash_data.answers().items():
        prompt = asked(target, f"ask {i} of it")
        assert tokens == prompt + greedy(target, prompt)
    assert "architecture 'phi'" in dflash_data.refuses(*more, "--runtime", "engine", output="e.jsonl")


def test_a_sample_has_the_same_seed_on_every_backend(dflash_data: Program, drafter_dir: Path) -> None:
    for name, more in {"e": (), "d": ("--drafter", drafter_dir), "r": ("--runtime", "reference")}.items():
        dflash_data("temperature=1.5", "samples=3", "top_k=50", "min_p=0.001", *more, output=name + ".jsonl")
    answers, *others = (dflash_data.answers(name + ".jsonl") for name in "edr")
    assert others == [answers, answers] and len(answers) == 27
    assert len({tuple(answers[0, sample]) for sample in range(3)}) == 3


def test_a_conversation_is_answered_turn_by_turn_by_the_target(
    target: Target, dflash_data: Program, tmp_path: Path
) -> None:
    first = greedy(target, asked(target, "one"), 5)
    # an answer must end for the next turn to be asked
    ended = altered(dflash_data.target, tmp_path / "t", generation_config={"eos_token_id": [EOS, first[4]]})
    talk = {"messages": [user("one"), assistant("theirs"), user("two"), user("three")]}
    dflash_data("--target", ended, "--data", write(tmp_path / "talk.jsonl", [talk]))
    rows = dflash_data.rows()
    assert [(row["part"], row["parts"]) for row in rows] == [(i, len(rows)) for i in range(len(rows))]
    spans = [(row["tokens"], start, end) for row in rows for start, end in row["spans"]]
    assert len(spans) == 2
    loaded = Target.load(str(ended))
    for tokens, start, end in spans:
        assert greedy(loaded, tokens[:start]) == tokens[start:end]
    last = rows[-1]["messages"]
    assert [m["role"] for m in last] == ["user", "assistant", "user", "user", "assistant"]
    assert last[1]["content"] == target.tokenizer.decode(first[:4], skip_special_tokens=True) != "theirs"
    assert spans[1][0][: spans[1][1]] == encode_chat(target.tokenizer, last[:-1])


def test_duplicates_are_dropped_and_untrainable_rows_counted(
    target: Target, dflash_data: Program, tmp_path: Path
) -> None:
    stop = greedy(target, asked(target, "quick"), 1)  # "quick" is answered by a stop token alone
    quick = altered(dflash_data.target, tmp_path / "t", generation_config={"eos_token_id": [EOS, *stop]})
    loaded = Target.load(str(quick))
    kept = next(text for text in ("ask me", "tell me", "ask you") if greedy(loaded, asked(target, text))[1:2])
    data = write(tmp_path / "p.jsonl", says(kept, kept.upper(), "quick", "long " * 20))
    *said, last = dflash_data("--target", quick, "--data", data, "prompts.max_length=60")
    assert any("3 prompts; left out: 1 duplicates" in line for line in said)
    assert "dropped 1 shorter than two tokens (first: p.jsonl/3), 1 too long" in last
    (row,) = dflash_data.rows()
    assert row["messages"][0] == user(kept) and len(row["tokens"]) <= 60


def test_max_prompts_takes_the_first_of_all_sources(dflash_data: Program, prompts: Path, tmp_path: Path) -> None:
    more = write(tmp_path / "q.jsonl", says(*(f"now {i} else" for i in range(4))))
    dflash_data("--data", prompts, more, "prompts.max_prompts=11")
    assert {row["messages"][0]["content"] for row in dflash_data.rows()} == {
        *(f"ask {i} of it" for i in range(9)), "now 0 else", "now 1 else",
    }  # fmt: skip


# ---- resume ----------------------------------------------------------------------------------------------------


def test_kill_9_again_and_again_loses_and_doubles_nothing(dflash_data: Program, tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl", says(*(f"ask {i} of it" for i in range(14))))
    sampled, output = ("temperature=1.2", "samples=2", "--batch-size", "4"), dflash_data.output
    dflash_data(*sampled, output="whole.jsonl")
    for answers in (3, 17):  # answers out of 28
        running = forked.start("dflash_toolkit.train.data_cli", dflash_data.words(*sampled), until=(output, answers))
        forked.wait_stopped(running)
        running.kill()
        running.join(60)
        assert running.exitcode == -signal.SIGKILL
    with open(output, "r+b") as handle:
        handle.truncate(output.stat().st_size - 7)  # a line torn by a crash of the machine
    dflash_data(*sampled)
    assert len(dflash_data.answers()) == 28

    def in_order(name: str) -> list[dict[str, object]]:
        return sorted(dflash_data.rows(name), key=lambda row: (row["index"], row["sample"]))

    assert in_order("a.jsonl") == in_order("whole.jsonl")
    before = output.read_bytes()
    dflash_data(*sampled)
    assert output.read_bytes() == before, "a finished run is left alone"


def test_parts_of_a_conversation_stay_together_when_the_file_is_cut(dflash_data: Program, tmp_path: Path) -> None:
    dflash_data()
    rows = dflash_data.rows()
    rows[-1]["parts"] = 2  # as if the second part had not been written any more
    write(dflash_data.output, rows)
    damage(tmp_path / "a.run.json", {"finished": None})
    dflash_data()
    assert len(dflash_data.answers()) == 9 and {row["parts"] for row in dflash_data.rows()} == {1}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("seed=1", "seed: 0, now 1"),
        ("prompts.similarity=0.5", "prompts.similarity: 0.8, now 0.5"),
        ("OTHER DATA", "data."),
    ],
)
def test_answers_of_another_run_are_not_mixed(change: str, named: str, dflash_data: Program, prompts: Path) -> None:
    dflash_data()
    before, file = dflash_data.output.read_bytes(), dflash_data.output.with_suffix(".run.json")
    record = read_json(file)
    del record["prompts"]["similarity"], record["sampler"]["seed"]  # as a release without these options wrote it
    write_json(file, record)
    dflash_data()
    if change == "OTHER DATA":
        write(prompts, says("other"))
    error = dflash_data.refuses(*([] if change == "OTHER DATA" else [change]))
    assert "holds responses of another run" in error and named in error
    assert dflash_data.output.read_bytes() == before


def test_two_runs_do_not_write_one_file(dflash_data: Program) -> None:
    with open(dflash_data.output, "ab") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert "being written by another run" in dflash_data.refuses()


def test_run_with_deleted_responses_is_not_finished(dflash_data: Program) -> None:
    dflash_data()
    dflash_data.output.unlink()
    assert "remove a.run.json to begin again" in dflash_data.refuses()


def test_a_damaged_list_of_chosen_prompts_is_named(dflash_data: Program, tmp_path: Path) -> None:
    dflash_data()
    chosen = tmp_path / "a.prompts.jsonl"
    whole = chosen.read_text()
    for damaged in (whole[:-9], whole.replace('"turns"', '"turn"', 1)):
        damage(tmp_path / "a.run.json", {"finished": None})
        chosen.write_text(damaged)
        said = dflash_data.refuses()
        assert said.startswith(f"{chosen}: damaged") and "choose the prompts again" in said
    chosen.unlink()
    dflash_data()
    assert chosen.read_text() == whole


# ---- mistakes --------------------------------------------------------------------------------------------------


def last_word(value: object) -> str:
    return value[-1] if isinstance(value, list) else ""


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["samples=2"], "at temperature 0 are all the same"),
        (["top_p=0"], "top_p is 0"),
        (["temprature=1"], "did you mean `temperature`"),
        (["prompts.similarity=2"], "prompts.similarity is 2"),
        (["server.timeout=1e12"], "server.timeout is 1000000000000.0; it must be in (0, 604800]"),
        (["server.retries=5000"], "server.retries is 5000"),
        (["--batch-size", "0"], "batch-size is 0"),
        (["--endpoint", "http://127.0.0.1:9", "--batch-size", "200000"], "batch-size is 200000; with endpoint"),
        (["--runtime", "sglang"], "not one of auto, engine, reference, vllm"),
        (["--runtime", "vllm", "--drafter", "x"], "runtime vllm excludes drafter"),
        (["--runtime", "reference", "--drafter", "/no/such"], "runtime reference excludes drafter"),
        (["--gpus", "2", "--endpoint", "http://127.0.0.1:9"], "gpus is 2"),
        (["--endpoint", "http://127.0.0.1:9", "--runtime", "engine"], "endpoint excludes"),
        (["--endpoint", "ftp://x"], "'ftp://x' is not an address"),
        (["--data", "/no/such.jsonl"], "/no/such.jsonl"),
        (["--data", "BROKEN"], "broken.jsonl, line 2: not valid JSON"),
        (["--data", "REPLIES"], "replies.jsonl, line 1: none of messages"),
        (["--target", "/no/such/model"], "/no/such/model"),
        (["--output", "answers.json"], "must end in .jsonl"),
        (["--output", "/proc/nowhere/a.jsonl"], "/proc/nowhere"),
    ],
    ids=last_word,
)
def test_a_user_error_of_dflash_data_is_one_line_without_files(
    change: list[str], named: str, dflash_data: Program, tmp_path: Path
) -> None:
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{nope\n')
    (tmp_path / "replies.jsonl").write_text('{"reply": "a"}\n')
    names = {"BROKEN": tmp_path / "broken.jsonl", "REPLIES": tmp_path / "replies.jsonl"}
    assert named in dflash_data.refuses("prompts.strict=true", *(names.get(word, word) for word in change))
    assert not dflash_data.output.exists() or not dflash_data.output.stat().st_size


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--device", "cuda:9"], "cuda:9"),
        (["--dtype", "int3"], "int3"),
        (["--drafter", "/no/such"], "/no/such"),
        (["--endpoint", "http://127.0.0.1:9"], "endpoint http://127.0.0.1:9/v1 does not answer"),
        (["--runtime", "vllm"], "runtime vllm needs vllm: pip install 'dflash-toolkit[vllm]'"),
    ],
    ids=last_word,
)
def test_the_backend_is_checked_before_prompts_are_read(
    more: list[str], named: str, dflash_data: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dflash_toolkit.train.data_run, "_choose", None)
    assert named in dflash_data.refuses(*more)


@pytest.mark.parametrize("token", [300, -5, 10**30])
def test_a_token_that_the_target_does_not_have_ends_it(token: int, fake: Fake, dflash_data: Program) -> None:
    fake.reply = lambda body, number: (200, whole("x", ids=[65, token]))
    said = dflash_data.refuses("--endpoint", fake.url)
    assert f"tiny answered with token {token}, outside the target's vocabulary of 300" in said
    assert not dflash_data.output.read_text()


def test_malformed_rows_are_counted_by_reason(dflash_data: Program, prompts: Path) -> None:
    prompts.write_text('{"prompt": "ask a of it"}\n{nope\n3\n{"prompt": "ask b of it"}\n{ no\n{"prompt": "\\ud83d"}\n')
    said = "\n".join(dflash_data())
    first = [(1, "expected an object, got int", ", line 3"), (2, "not valid JSON", ", line 2")]
    reasons = [f"{count} {reason} (first: {prompts}{row})" for count, reason, row in first]
    assert f"2 prompts; left out: {', '.join(reasons)}, 1 not valid text (first: p.jsonl/6)" in said


def test_ignored_repetition_penalty_is_reported(dflash_data: Program, tmp_path: Path) -> None:
    penalised = altered(dflash_data.target, tmp_path / "t", generation_config={"repetition_penalty": 1.3})
    said = [line for line in dflash_data("--target", penalised) if "repetition_penalty 1.3" in line]
    assert len(said) == 1 and said[0].startswith("warning:") and "--sampling-defaults openai" in said[0]


@pytest.mark.parametrize("name", ["a.prompts.jsonl", "a.jsonl", "a.run.json"])
def test_a_source_is_never_a_file_that_the_run_writes(
    name: str, dflash_data: Program, prompts: Path, tmp_path: Path
) -> None:
    source = tmp_path / name
    source.write_bytes(prompts.read_bytes())
    for given in (source, tmp_path, f"{tmp_path}/a*"):
        assert "holds a file that this run would overwrite" in dflash_data.refuses("--data", given)
    assert source.read_bytes() == prompts.read_bytes() and len(list(tmp_path.iterdir())) == 2


# ---- training on them ------------------------------------------------------------------------------------------


def test_dflash_train_takes_the_answers_as_they_are(
    dflash_data: Program, dflash_train: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tuple(str(tmp_path / f"{seed}.jsonl") for seed in (0, 1))
    for seed, name in enumerate(files):
        dflash_data("temperature=1.2", "samples=2", f"seed={seed}", output=name)
    monkeypatch.setattr(collect, "open_decoder", None)  # nothing is answered again
    dflash_train.data = None
    dflash_train("--responses", *files, "optim.steps=2")
    record = dflash_train.record()
    assert record["config"]["response_files"] == [*files] and record["result"]["answers"] == 28
    assert [sampler["seed"] for sampler in record["samplers"]] == [0, 1]
    config = TrainConfig(target=str(dflash_data.target), response_files=files, prompts=DataOptions(held_out=2))
    rows, held_out = answers_of(config, Target.load(config.target, "cpu").tokenizer, tmp_path / "again")
    trained = {tuple(row.tokens[: row.prompt_tokens]) for row in rows}
    assert len(held_out) == 2 and len(rows) == 28
    assert not trained & {tuple(ids) for ids in held_out}, "nor from the other file"


def test_all_answers_to_a_held_out_prompt_stay_out_of_training(
    target: Target, dflash_data: Program, tmp_path: Path
) -> None:
    dflash_data("temperature=1.2", "samples=3")
    config = TrainConfig(
        target=str(dflash_data.target), response_files=(str(dflash_data.output),), prompts=DataOptions(held_out=4)
    )
    rows, held_out = answers_of(config, target.tokenizer, tmp_path / "again")
    asked = {tuple(row.tokens[: row.prompt_tokens]) for row in rows}
    assert len(rows) == 15 and len(held_out) == 4 and len(asked) == 5
    assert not asked & {tuple(ids) for ids in held_out}
    assert len({row.index for row in rows}) == 15, "features are kept by this number"


def test_responses_of_another_target_are_refused_by_line(dflash_data: Program, dflash_train: Program) -> None:
    dflash_data()
    rows = dflash_data.rows()
    rows[3]["template_hash"] = "0" * 64
    dflash_train.data = None
    said = dflash_train.refuses("--responses", write(dflash_data.output, rows))
    assert f"{dflash_data.output}, line 4" in said and "another chat template" in said


def test_answers_are_matched_by_the_weights_that_wrote_them(
    dflash_data: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    dflash_data()
    output = dflash_data.output
    row = dflash_data.rows()[0]
    same = Match("/elsewhere/another-name", row["target_digest"], row["vocab_size"], row["template_hash"])
    assert len(read_training_rows([str(output)], same)) == 9
    capsys.readouterr()
    # another's answers under the same name are not taken, unless that is said to be right
    name = f"/elsewhere/{os.path.basename(dflash_data.target)}"
    other = replace(same, target=name, digest="0" * 64)
    with pytest.raises(UserError, match=r"line 1: .*weights .*--trust-responses"):
        read_training_rows([str(output)], other)
    trusted = replace(other, template="f" * 64, trust=True)
    assert len(read_training_rows([str(output)], trusted)) == 9
    assert capsys.readouterr().err.count("are trusted to be of") == 1
    # of a model whose weights are elsewhere, or in files from before there were digests, the name must do
    for match, drop in ((replace(same, target=name, digest=None), False), (replace(same, target=name), True)):
        if drop:
            write(output, [{k: v for k, v in each.items() if k != "target_digest"} for each in lines(output)])
        assert len(read_training_rows([str(output)], match)) == 9
        assert capsys.readouterr().err.count("by name") == 1
        with pytest.raises(UserError, match=r"line 1: .* vocabulary, .* is other with"):
            read_training_rows([str(output)], replace(match, target="other"))


def test_the_drafter_of_dflash_data_drafts(
    drafter: Drafter, drafter_dir: Path, dflash_data: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Engine, DrafterWeights | None]] = []
    real = Parts.engine

    def make(parts: Parts, options: EngineOptions) -> Engine:
        made.append((real(parts, options), parts.drafter))
        return made[0][0]

    monkeypatch.setattr(Parts, "engine", make)
    # whole blocks, or it might find that drafting does not pay
    monkeypatch.setattr(backends, "EngineOptions", functools.partial(EngineOptions, num_speculative_tokens=7))
    dflash_data("--drafter", drafter_dir)
    ((engine, draft),) = made
    assert draft is not None and draft.config == drafter.config
    assert torch.equal(draft.fc.bfloat16(), drafter.fc.weight.bfloat16())
    assert engine.stats.requests == 9 and engine.stats.drafted > 0
