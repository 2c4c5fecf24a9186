"""dflash-train from the outside: what a run leaves, the target's own answers, and every mistake as one line."""

import json
import shutil
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from conftest import EOS, prompts_of
from test_train_loop import argv

from dflash_toolkit import SamplingParams, Target, generate, load_drafter
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.evaluation.measure import held_out_acceptance
from dflash_toolkit.models.dflash.checkpoint import PROVENANCE_KEY
from dflash_toolkit.models.target import load_tokenizer
from dflash_toolkit.record import export_record
from train.cli import main
from train.config import DataOptions, TrainConfig
from train.responses.corpus import Corpus


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"word {i}"}, {"role": "assistant", "content": f"reply {i}"}]}
            for i in range(8)]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_run_leaves_a_checkpoint_its_record_and_its_metrics(
    target_dir: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "drafter"
    assert main(argv(target_dir, data, output, "run.speculators=true")) == 0
    assert '"num_speculative_tokens": 3' in capsys.readouterr().out
    drafter = load_drafter(str(output))
    assert load_drafter(str(output / "speculators")).config == drafter.config
    record = json.loads((output / "run.json").read_text())
    assert record["config"]["optim"]["steps"] == 24 and record["drafter"]["block_size"] == 4
    for field in fields(TrainConfig):
        assert field.name in record["config"]
        if is_dataclass(field.type):
            assert set(record["config"][field.name]) == {option.name for option in fields(field.type)}
    assert set(record["versions"]) == {"dflash_toolkit", "git", "python", "torch", "transformers"}
    assert len(record["data_hash"]) == len(record["template_hash"]) == 64
    assert record["argv"] and record["finished"] and record["result"]["steps"] == 24
    lines = [json.loads(line) for line in (output / "work/metrics.jsonl").read_text().splitlines()]
    assert {"loss", "slot_accuracy", "recall_at_4", "estimated_acceptance_length", "tokens_per_second"} <= lines[
        0
    ].keys()
    measured = [line["acceptance_length"] for line in lines if "acceptance_length" in line]
    assert len(measured) == 3 and record["result"]["acceptance_length"] == pytest.approx(max(measured), abs=1e-5)
    assert not list(output.rglob("*.partial*"))

    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    assert main(argv(target_dir, data, output, "run.speculators=true")) == 0
    assert "finished" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}


def test_the_speculators_form_can_be_asked_for_later_and_holds_the_exported_weights(
    target_dir: Path, data: Path, tmp_path: Path
) -> None:
    output = tmp_path / "drafter"
    assert main(argv(target_dir, data, output)) == 0
    assert not (output / "speculators").exists()
    exported = (output / "model.safetensors").read_bytes()
    assert main(argv(target_dir, data, output, "run.speculators=true")) == 0
    assert (output / "model.safetensors").read_bytes() == exported, "nothing was trained again"
    a, b = (dict(load_drafter(str(path)).named_parameters()) for path in (output, output / "speculators"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    ours, theirs = (json.loads((path / "config.json").read_text()) for path in (output, output / "speculators"))
    assert theirs[PROVENANCE_KEY] == ours[PROVENANCE_KEY] and ours[PROVENANCE_KEY]["record"]


def test_what_is_exported_is_measured_on_all_prompts_and_recorded(
    target_dir: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of two prompts is decoded while the run goes on; with one prompt nothing is clear, so the end is exported."""
    output = tmp_path / "drafter"
    often = ("run.evaluate_every=2", "run.evaluate_prompts=1", "optim.learning_rate=3e-2")
    assert main(argv(target_dir, data, output, *often)) == 0
    said = capsys.readouterr().err.splitlines()[-1]
    lines = [json.loads(line) for line in (output / "work/metrics.jsonl").read_text().splitlines()]
    measured = [line["acceptance_length"] for line in lines if "acceptance_length" in line]
    assert len(measured) == 12 and max(measured) > min(measured), "there is something to choose"
    target, drafter = Target.load(str(target_dir)), load_drafter(str(output), dtype=torch.float32)
    last = torch.load(output / "work/state.pt")["drafter"]
    assert all(torch.equal(p, last[name].bfloat16().float()) for name, p in drafter.named_parameters())
    _, asked = prompts_of(
        TrainConfig(target=str(target_dir), data=(str(data),), prompts=DataOptions(held_out=2)),
        target.tokenizer,
        tmp_path / "again",
    )
    again = held_out_acceptance(target, drafter, asked, SamplingParams(max_new_tokens=8))
    assert again.answers == 2
    provenance = json.loads((output / "config.json").read_text())["dflash_toolkit"]
    assert provenance["record"] == export_record(drafter, target), "of what was written, and no step later"
    assert provenance["target_digest"]
    result = json.loads((output / "run.json").read_text())["result"]
    for record, step in ((provenance, provenance["step"]), (result, result["exported_step"])):
        assert step == 24 and record["acceptance_length"] == pytest.approx(again.tau_pooled, abs=1e-3)
        assert record["acceptance_length_error"] >= 0
        assert list(record["acceptance_length_by_source"].values()) == [record["acceptance_length"]]
        assert record["measured_on"] == {"prompts": 2, "tokens": again.tokens - 2}
    assert f"{again.tau_pooled:.3f} +- " in said and said.endswith("on 2 held-out prompts")
    assert (result["prompts"], result["held_out_prompts"], result["answers"]) == (6, 2, 6)
    assert result["tokens"] > result["answer_tokens"] > 0 and sum(result["left_out"].values()) == 0
    highest = max(range(12), key=lambda i: (measured[i], i))
    assert (output / "best").exists() == (highest < 11 and measured[highest] > measured[-1])


def test_answers_stay_within_the_target_s_context(target_dir: Path, data: Path, tmp_path: Path) -> None:
    small = Path(shutil.copytree(target_dir, tmp_path / "small"))
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40}))
    assert main(argv(small, data, tmp_path / "run", "optim.steps=1", "answers.max_tokens=90")) == 0
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["config"]["prompts"]["max_length"] == 40, "not the default: the record says what was used"
    target = Target.load(str(small))
    rows = Corpus.open(tmp_path / "run/work/corpus")
    assert max(len(row.tokens) for row in rows) == 40
    for row in rows:
        prompt, answer = row.tokens[: row.prompt_tokens].tolist(), row.tokens[row.prompt_tokens :].tolist()
        assert generate(target, None, prompt, SamplingParams(max_new_tokens=90)).tokens == answer


def test_a_run_json_of_something_else_is_no_finished_run(target_dir: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for text in ("{", "[]", '{"finished": true}', '{"finished": "x", "config": 3}'):
        (tmp_path / "run/run.json").write_text(text)
        assert main(argv(target_dir, data, tmp_path / "run", "optim.steps=1")) == 0
        assert json.loads((tmp_path / "run/run.json").read_text())["result"]["steps"] == 1


def test_all_turns_are_answered_and_a_conversation_that_is_held_out_is_so_whole(
    target: Target, target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def asks(*turns: str) -> dict[str, object]:
        reply = {"role": "assistant", "content": "?"}
        return {"messages": [message for turn in turns for message in ({"role": "user", "content": turn}, reply)]}

    path, long = tmp_path / "talks.jsonl", "x" * 90
    rows = [asks(f"word {i}", f"more {i}", f"and {i}") for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [asks(long), *rows, rows[0]]))
    given = ("answers.max_tokens=6", "prompts.max_length=90", "optim.steps=2")
    # answers that stop, so that there is a next turn: tokens that this target writes early
    mine = Path(shutil.copytree(target_dir, tmp_path / "mine"))
    prompts = [encode_chat(target.tokenizer, row["messages"][:1]) for row in rows]
    written = [generate(target, None, prompt, SamplingParams(max_new_tokens=5)).tokens for prompt in prompts]
    ends = sorted({token for tokens in written for token in tokens} - {tokens[0] for tokens in written})
    settings = json.loads((mine / "generation_config.json").read_text())
    (mine / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [EOS, *ends]}))
    assert main(argv(mine, path, tmp_path / "run", *given)) == 0
    said = capsys.readouterr().err
    assert "1 too long (prompts.max_length is 90)" in said and "1 near duplicates" in said
    written = [json.loads(line) for line in (tmp_path / "run/work/answers.jsonl").read_text().splitlines()]
    assert {row["index"] for row in written} < set(range(9)) and len({row["index"] for row in written}) == 6
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert all(row["target_digest"] == record["target_digest"] for row in written)
    assert record["data"] == {"prompts": 7, "held_out": 2, "found": 10, "duplicates": 1, "too long": 1} | {
        key: record["data"][key] for key in record["data"] if "short" in key
    }
    corpus = Corpus.open(tmp_path / "run/work/corpus")
    assert len(corpus) == len(written)
    for row, line in zip(corpus, sorted(written, key=lambda line: (line["index"], line["part"])), strict=True):
        assert row.tokens.tolist() == line["tokens"] and [*map(list, row.spans)] == line["spans"]
    held = [target.tokenizer.decode(each["tokens"]) for each in corpus.meta["held_out"]]
    words = {text.split()[1].split("<")[0] for text in held}
    assert len(words) == 2
    for line in written:
        assert not any(f"{word} {i}" in json.dumps(line["messages"]) for word in ("word", "more", "and") for i in words)


def test_the_data_s_own_answers_are_used_when_asked(target_dir: Path, data: Path, tmp_path: Path) -> None:
    assert main(argv(target_dir, data, tmp_path / "run", "answers.regenerate=false", "optim.steps=2")) == 0
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["result"]["answer_tokens"] == 6 * len("reply 0") + 6  # the end-of-sequence token too


def broken(tmp_path: Path, text: str) -> str:
    path = tmp_path / "broken.jsonl"
    path.write_text(text)
    return str(path)


def without_weights(target_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(target_dir, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors")))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--target", "/no/such/model"], "/no/such/model"),
        (["--target", "NOT-THERE/at-all"], "NOT-THERE/at-all"),
        (["--target", "NO WEIGHTS"], "cannot load its weights"),
        (["drafter.block_size=1"], "block_size"),
        (["drafter.layers=0"], "at least one layer"),
        (["drafter.taps=5"], "no 5 distinct layers"),
        (["drafter.target_layer_ids=[1,1]"], "names a layer twice"),
        (["drafter.num_heads=3"], "num_heads 3 is not a multiple of num_kv_heads 2"),
        (["drafter.mask_token_id=257"], "257 is the end-of-sequence or padding token"),
        (["drafter.target_layer_ids=[1,5]"], "layer 5, the target's last"),
        (["drafter.mask_token_id=256"], "256 is the end-of-sequence"),
        (["drafter.blok_size=8"], "did you mean `block_size`"),
        (["optim.batch_size=many"], "expected int"),
        (["loss.weights=cubic"], "not one of decay, dpace"),
        (["optim.warmup=1.5"], "optim.warmup"),
        (["optim.steps=2.5"], "expected int"),
        (["optim.nested.deep=1"], "unknown key"),
        (["prompts.max_length=4"], "prompts.max_length is 4"),
        (["prompts.held_out=-1"], "prompts.held_out is -1"),
        (["answers.top_p=0"], "answers: top_p is 0"),
        (["answers.top_k=-1"], "answers: top_k is -1"),
        (["loss.alpha=2"], "loss.alpha is 2"),
        (["loss.ce=0"], "loss.ce, loss.kl, loss.tv, loss.lk, loss.lk_hybrid are all 0"),
        (["loss.tv=-1"], "loss.tv is -1"),
        (["loss.kl=inf"], "loss.kl: expected a finite number, got inf"),
        (["optim.learning_rate=nan"], "optim.learning_rate: expected a finite number"),
        (["run.feature_cache_gb=inf"], "run.feature_cache_gb: expected a finite number"),
        (["run.seed=99999999999999999999"], "run.seed is 99999999999999999999"),
        (["answers.temperature=1e-9"], "answers: temperature is 1e-09; it must be 0 or in"),
        (["loss.temperature=0"], "loss.temperature is 0"),
        (["optim.schedule=linear"], "not one of cosine, wsd"),
        (["optim.decay=0"], "optim.decay must be in (0, 1]"),
        (["optim.schedule=wsd", "optim.decay=0.99"], "at most 1 - optim.warmup"),
        (["optim.ema=1"], "optim.ema is 1.0"),
        (["run.evaluate_runtime=vllm"], "not one of auto, engine, reference"),
        (["run.save_every=-1"], "save_every"),
        (["run.save_minutes=0"], "save_minutes"),
        (["no-equals-sign"], "expected key=value"),
        (["device=cuda:9"], "cuda:9"),
        (["prompts.max_length=9"], "too long (prompts.max_length is 9)"),
        (["--data", "/no/such/file.jsonl"], "/no/such/file.jsonl"),
        (["--data", "MALFORMED"], "line 2"),
        (["--data", "EMPTY"], "holds no prompts"),
        (["--data", "NO QUESTION"], "line 3"),
        (["--data", "BARE", "answers.regenerate=false"], "1 without an answer; answers.regenerate=true"),
        (["--data", "SHORT", "answers.regenerate=false"], "1 shorter than two tokens"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(
    change: list[str], named: str, target_dir: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {
        "MALFORMED": '{"prompt": "a"}\n{nope\n',
        "EMPTY": "\n",
        "NO QUESTION": '{"prompt": "a"}\n\n{"reply": "b"}\n',
        "BARE": '{"prompt": "a"}\n{"prompt": "b"}\n',
        "SHORT": '{"prompt": "a", "response": ""}\n{"prompt": "b", "response": ""}\n',
    }
    arguments = argv(target_dir, data, tmp_path / "run")
    for name, text in texts.items():
        change = [broken(tmp_path, text) if c == name else c for c in change]
    if change[0] == "--target":
        arguments[1] = str(without_weights(target_dir, tmp_path)) if change[1] == "NO WEIGHTS" else change[1]
    elif change[0] == "--data":
        arguments[3] = change[1]
        arguments += change[2:]
    else:
        arguments = [*arguments, *change]
    assert main(arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and named in lines[0]
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()], "nothing was begun"


def test_an_unsupported_architecture_is_named(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert main(["--target", str(tmp_path), "--data", str(data)]) == 2
    assert "'gpt2' is not supported" in capsys.readouterr().err


def test_rows_of_a_public_dataset_become_prompts_or_are_left_out(
    monkeypatch: pytest.MonkeyPatch, target_dir: Path, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    chats = [[{"from": "human", "value": f"ask {i}"}, {"from": "gpt", "value": "answer"}] for i in range(6)]
    odd = [[{"from": "tool", "value": "x"}], [{"from": "human", "value": "long " * 40}], []]
    made = datasets.Dataset.from_dict({"conversations": chats + odd})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made.to_iterable_dataset())
    config = TrainConfig(target=str(target_dir), prompts=DataOptions(held_out=2, max_length=64))
    training, held_out = prompts_of(config, load_tokenizer(str(target_dir)), tmp_path)
    assert len(held_out) == 2 and all(len(ids) <= 62 for ids in held_out)
    assert len(training) == 5, "the long one is passed over when it is asked"
