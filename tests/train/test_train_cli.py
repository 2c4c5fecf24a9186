"""dflash-train from the outside: what a run leaves, the target's own answers, and every mistake as one line."""

import json
import shutil
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from conftest import EOS, prompts_of
from programs import Program, altered, assistant, lines, says, user, write

from dflash_toolkit import SamplingParams, Target, generate, load_drafter
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.evaluation.measure.measurement import held_out_acceptance
from dflash_toolkit.models.dflash import shape
from dflash_toolkit.models.dflash.checkpoint import PROVENANCE_KEY, read_json
from dflash_toolkit.record import export_record
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.data_options import DataOptions
from dflash_toolkit.train.responses.corpus import Corpus


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"messages": [user(f"word {i}"), assistant(f"reply {i}")]} for i in range(8)]
    return write(tmp_path_factory.mktemp("data") / "prompts.jsonl", rows)


def measured(lines: list[dict[str, float]]) -> list[float]:
    return [line["acceptance_length"] for line in lines if "acceptance_length" in line]


def test_a_run_leaves_a_checkpoint_its_record_and_its_metrics(dflash_train: Program) -> None:
    dflash_train("run.speculators=true")
    assert '"num_speculative_tokens": 3' in dflash_train.out
    output = dflash_train.output
    drafter = load_drafter(str(output))
    assert load_drafter(str(output / "speculators")).config == drafter.config
    record = dflash_train.record()
    assert record["config"]["optim"]["steps"] == 12 and record["drafter"]["block_size"] == 4
    for field in fields(TrainConfig):
        assert field.name in record["config"]
        if is_dataclass(field.type):
            assert set(record["config"][field.name]) == {option.name for option in fields(field.type)}
    assert set(record["versions"]) == {"dflash_toolkit", "git", "python", "torch", "transformers"}
    assert len(record["data_hash"]) == len(record["template_hash"]) == 64
    assert record["argv"] and record["finished"] and record["result"]["steps"] == 12
    metrics = dflash_train.metrics()
    asked = {"loss", "gpu_minutes", "slot_accuracy", "recall_at_4", "estimated_acceptance_length", "tokens_per_second"}
    assert asked <= metrics[0].keys()
    found = measured(metrics)
    assert len(found) == 2 and record["result"]["acceptance_length"] == pytest.approx(max(found), abs=1e-5)
    assert not list(output.rglob("*.partial*"))

    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    assert "finished" in "".join(dflash_train("run.speculators=true"))
    assert before == {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}


def test_speculators_export_can_be_added_later(dflash_train: Program) -> None:
    dflash_train()
    output = dflash_train.output
    assert not (output / "speculators").exists()
    exported = (output / "model.safetensors").read_bytes()
    dflash_train("run.speculators=true")
    assert (output / "model.safetensors").read_bytes() == exported, "nothing was trained again"
    a, b = (dict(load_drafter(str(path)).named_parameters()) for path in (output, output / "speculators"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    ours, theirs = (json.loads((path / "config.json").read_text()) for path in (output, output / "speculators"))
    assert theirs[PROVENANCE_KEY] == ours[PROVENANCE_KEY] and ours[PROVENANCE_KEY]["record"]


def test_the_export_is_measured_on_unseen_prompts_at_full_length(dflash_train: Program, tmp_path: Path) -> None:
    """One of three prompts is decoded during the run; with two others nothing is clear, so the last is exported."""
    lines = dflash_train("run.evaluate_every=2", "prompts.held_out=3", "optim.learning_rate=3e-2")
    said = lines[-1]
    assert any("2 held-out prompts, responses of at most 12 tokens, at most " in line for line in lines)
    assert any(line.startswith("the final measurement took ") for line in lines)
    output, found = dflash_train.output, measured(dflash_train.metrics())
    assert len(found) == 6 and max(found) > min(found), "there is something to choose"
    target, drafter = Target.load(str(dflash_train.target)), load_drafter(str(output), dtype=torch.float32)
    last = torch.load(output / "work/state.pt")["drafter"]
    assert all(torch.equal(p, last[name].bfloat16().float()) for name, p in drafter.named_parameters())
    config = TrainConfig(target=target.name, data=(str(dflash_train.data),), prompts=DataOptions(held_out=3))
    _, (_, *unseen) = prompts_of(config, target.tokenizer, tmp_path / "again")
    again = held_out_acceptance(target, drafter, unseen, SamplingParams(max_tokens=12))
    assert again.answers == 2
    provenance = json.loads((output / "config.json").read_text())["dflash_toolkit"]
    assert provenance["record"] == export_record(drafter, target), "of what was written, and no step later"
    assert provenance["target_digest"]
    result = dflash_train.record()["result"]
    for record, step in ((provenance, provenance["step"]), (result, result["exported_step"])):
        assert step == 12 and record["acceptance_length"] == pytest.approx(again.tau_pooled, abs=1e-3)
        assert record["acceptance_length_error"] >= 0
        assert list(record["acceptance_length_by_source"].values()) == [record["acceptance_length"]]
        assert record["measured_on"] == {
            "prompts": 2, "tokens": again.tokens - 2, "max_tokens": 12, "temperature": 0.0, "thinking": "none",
        }  # fmt: skip
    during = result["measured_during_training"]
    assert (during["prompts"], during["max_tokens"]) == (1, 8)
    assert during["acceptance_length"] == pytest.approx(found[-1], abs=1e-3)
    assert f"{again.tau_pooled:.3f} +- " in said
    assert said.endswith("on 2 held-out prompts, greedy responses of at most 12 tokens")
    assert (result["prompts"], result["held_out_prompts"], result["answers"]) == (5, 3, 5)
    card = (output / "README.md").read_text()
    assert "greedy responses (temperature 0) of at most 12 tokens to 2 prompts" in card
    assert "1 other prompt, with responses of at most 8 tokens" in card
    assert result["tokens"] > result["answer_tokens"] > 0 and sum(result["left_out"].values()) == 0
    highest = max(range(len(found)), key=lambda i: (found[i], i))
    assert (output / "best").exists() == (highest < len(found) - 1 and found[highest] > found[-1])


def test_answers_stay_within_the_target_s_context(dflash_train: Program, tmp_path: Path) -> None:
    small = altered(dflash_train.target, tmp_path / "small", config={"max_position_embeddings": 40})
    dflash_train("--target", small, "optim.steps=1", "responses.max_tokens=90")
    length = dflash_train.record()["config"]["prompts"]["max_length"]
    assert length == 40, "not the default: the record says what was used"
    target = Target.load(str(small))
    rows = Corpus.open(dflash_train.output / "work/corpus")
    assert max(len(row.tokens) for row in rows) == 40
    for row in rows:
        prompt, answer = row.tokens[: row.prompt_tokens].tolist(), row.tokens[row.prompt_tokens :].tolist()
        assert generate(target, None, prompt, SamplingParams(max_tokens=90)).tokens == answer


def test_unrelated_run_json_is_not_a_finished_run(dflash_train: Program) -> None:
    dflash_train.output.mkdir()
    for text in ("{", "[]", '{"finished": true}', '{"finished": "x", "config": 3}'):
        (dflash_train.output / "run.json").write_text(text)
        dflash_train("optim.steps=1")
        assert dflash_train.record()["result"]["steps"] == 1


def test_conversations_are_held_out_with_all_their_turns(target: Target, dflash_train: Program, tmp_path: Path) -> None:
    def asks(*turns: str) -> dict[str, list[dict[str, str]]]:
        return {"messages": [message for turn in turns for message in (user(turn), assistant("?"))]}

    rows = [asks(f"word {i}", f"more {i}", f"and {i}") for i in range(8)]
    dflash_train.data = write(tmp_path / "talks.jsonl", [asks("x" * 90), *rows, rows[0]])
    # answers that stop, so that there is a next turn: tokens that this target writes early
    prompts = [encode_chat(target.tokenizer, row["messages"][:1]) for row in rows]
    begun = [generate(target, None, prompt, SamplingParams(max_tokens=5)).tokens for prompt in prompts]
    ends = sorted({token for tokens in begun for token in tokens} - {tokens[0] for tokens in begun})
    mine = altered(dflash_train.target, tmp_path / "mine", generation_config={"eos_token_id": [EOS, *ends]})
    said = "\n".join(dflash_train("--target", mine, "responses.max_tokens=6", "prompts.max_length=90", "optim.steps=2"))
    assert "1 too long (prompts.max_length is 90)" in said and "1 duplicates" in said
    written = lines(dflash_train.output / "work/answers.jsonl")
    assert {row["index"] for row in written} < set(range(9)) and len({row["index"] for row in written}) == 6
    record = dflash_train.record()
    assert all(row["target_digest"] == record["target_digest"] for row in written)
    counted = {key: value for key, value in record["data"].items() if "short" not in key}
    assert counted == {"prompts": 7, "held_out": 2, "found": 10, "duplicates": 1, "too long": 1, "cut": 3}
    corpus = Corpus.open(dflash_train.output / "work/corpus")
    for row, line in zip(corpus, sorted(written, key=lambda line: (line["index"], line["part"])), strict=True):
        assert row.tokens.tolist() == line["tokens"] and [*map(list, row.spans)] == line["spans"]
    held = [target.tokenizer.decode(each["tokens"]) for each in corpus.meta["held_out"]]
    words = {text.split()[1].split("<")[0] for text in held}
    assert len(words) == 2
    for line in written:
        assert not any(f"{word} {i}" in json.dumps(line["messages"]) for word in ("word", "more", "and") for i in words)


def test_defaults_are_two_responses_and_dflash_2_for_wide_targets(
    dflash_train: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shape, "WIDTH_FOR_PARTS", 32)
    said = dflash_train("responses.samples=2", "optim.steps=0", "run.export_selector=always")
    assert any(line.startswith("DFlash 2 drafter, ") for line in said)
    record = dflash_train.record()
    assert (record["config"]["drafter"]["kind"], record["config"]["optim"]["epochs"]) == ("dflash2", 3)
    assert read_json(dflash_train.output / "config.json")["architectures"] == ["DFlash2DraftModel"]


def test_the_first_of_several_responses_is_greedy(target: Target, short_run: Program, tmp_path: Path) -> None:
    short_run("responses.samples=3", "responses.temperature=2.0", "responses.greedy_first=true")
    written = lines(short_run.output / "work/answers.jsonl")
    prompts = {row["index"] for row in written}
    assert sorted((row["index"], row["sample"]) for row in written) == [
        (i, s) for i in sorted(prompts) for s in range(3)
    ]
    of_prompt: dict[int, set[tuple[int, ...]]] = {}
    for row in written:
        prompt, response = row["tokens"][: row["prompt_tokens"]], row["tokens"][row["prompt_tokens"] :]
        of_prompt.setdefault(row["index"], set()).add(tuple(response))
        greedy = generate(target, None, prompt, SamplingParams(max_tokens=len(response))).tokens
        assert row["sample"] > 0 or response == greedy
    assert any(len(each) > 1 for each in of_prompt.values()), "they are drawn, each by a seed of its own"
    record, corpus = short_run.record(), Corpus.open(short_run.output / "work/corpus")
    assert len(prompts) == record["data"]["prompts"] and len(corpus) == 3 * len(prompts)
    held = [target.tokenizer.decode(each["tokens"]) for each in corpus.meta["held_out"]]
    asked = [target.tokenizer.decode(row["tokens"][: row["prompt_tokens"]]) for row in written]
    assert held and not {*held} & {*asked}, "all responses to a held-out prompt are kept out"
    assert "temperature 0.0 and 2.0" in (short_run.output / "README.md").read_text()


def test_regenerate_false_trains_on_recorded_responses(dflash_train: Program) -> None:
    dflash_train("responses.regenerate=false", "optim.steps=2")
    # the end-of-sequence token too
    assert dflash_train.record()["result"]["answer_tokens"] == 6 * len("reply 0") + 6


TEXTS = {
    "MALFORMED": '{"prompt": "a"}\n{nope\n',
    "EMPTY": "\n",
    "NO QUESTION": '{"prompt": "a"}\n\n{"reply": "b"}\n',
    "SHORT": 2 * (json.dumps({"messages": [user("a"), assistant("")]}) + "\n"),
    "NO TEXT": "".join(f'{{"prompt": "say {i}", "response": "a \\ud83d b"}}\n' for i in range(6)),
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--target", "/no/such/model"], "/no/such/model"),
        (["--target", "NOT-THERE/at-all"], "NOT-THERE/at-all"),
        (["--target", "NO WEIGHTS"], "cannot load its weights"),
        (["--target", "T5"], "'t5' is not supported"),
        (["drafter.block_size=1"], "block_size"),
        (["drafter.layers=0"], "at least one layer"),
        (["drafter.taps=5"], "lower drafter.taps"),
        (["drafter.target_layer_ids=[1,1]"], "names a layer twice"),
        (["drafter.num_heads=3"], "num_heads 3 is not a multiple of num_kv_heads 2"),
        (["drafter.mask_token_id=257"], "257 is the end-of-sequence or padding token"),
        (["drafter.target_layer_ids=[1,5]"], "layer 5, the target's last"),
        (["drafter.mask_token_id=256"], "256 is the end-of-sequence"),
        (["drafter.blok_size=8"], "did you mean `block_size`"),
        (["optim.batch_size=many"], "expected a whole number"),
        (["loss.weights=cubic"], "not one of decay, dpace"),
        (["optim.warmup=1.5"], "optim.warmup"),
        (["optim.steps=2.5"], "expected a whole number"),
        (["optim.minutes=0.1"], "optim.steps and optim.minutes are both given"),
        (["optim.weight_decay=-1"], "optim.weight_decay is -1"),
        (["optim.nested.deep=1"], "unknown key"),
        (["prompts.max_length=4"], "prompts.max_length is 4"),
        (["prompts.held_out=-1"], "prompts.held_out is -1"),
        (["responses.top_p=0"], "responses.top_p is 0"),
        (["responses.top_k=-1"], "responses.top_k is -1"),
        (["responses.samples=0"], "responses.samples is 0"),
        (["responses.samples=2", "responses.temperature=0"], "responses.samples is 2"),
        (["responses.samples=3", "responses.regenerate=false"], "no effect without responses.regenerate=true"),
        (["drafter.selector_rank=-4"], "selector_rank"),
        (["loss.selector=0.5"], "no effect without a selector (drafter.kind=dflash2)"),  # so small a target has none
        (
            ["responses.temperature=0.7"],
            "no effect without responses.samples above 1 or responses.greedy_first=false",
        ),
        (["loss.alpha=2"], "loss.alpha is 2"),
        (["loss.ce=0"], "loss.ce, kl, tv, lk and lk_hybrid are all 0"),
        (["loss.tv=-1"], "loss.tv is -1"),
        (["loss.kl=inf"], "loss.kl: expected a finite number, got inf"),
        (["optim.learning_rate=nan"], "optim.learning_rate: expected a finite number"),
        (["optim.learning_rate=0"], "optim.learning_rate is 0.0; it must be > 0"),
        (["run.feature_cache_gb=inf"], "run.feature_cache_gb: expected a finite number"),
        (["run.feature_cache_gb=1e300"], "run.feature_cache_gb is 1e+300"),
        (["run.seed=99999999999999999999"], "run.seed is 99999999999999999999"),
        (["responses.temperature=1e-9"], "responses.temperature is 1e-09; it must be 0 or in"),
        (["loss.temperature=0"], "loss.temperature is 0"),
        (["optim.schedule=linear"], "not one of cosine, wsd"),
        (["optim.decay=0"], "optim.decay is 0.0; it must be in (0, 1]"),
        (["optim.schedule=wsd", "optim.decay=0.99"], "at most 1 - optim.warmup"),
        (["optim.ema=1"], "optim.ema is 1.0"),
        (["optim.pack_blocks=7", "loss.anchors=null", "optim.batch_size=null"], "on a CPU give optim.pack"),
        (["run.attention=flex"], "run.attention=flex has no backward on a CPU"),
        (["run.evaluate_runtime=vllm"], "not one of auto, engine, reference"),
        (["run.save_every=-1"], "save_every"),
        (["run.save_minutes=0"], "save_minutes"),
        (["no-equals-sign"], "expected key=value"),
        (["device=cuda:9"], "cuda:9"),
        (["prompts.max_length=9"], "too long (prompts.max_length is 9)"),
        (["--responses", "a.jsonl"], "give one of them"),
        (["--data", "/no/such/file.jsonl"], "/no/such/file.jsonl"),
        (["--data", "MALFORMED", "prompts.strict=true"], "line 2"),
        (["--data", "EMPTY"], "holds no prompts"),
        (["--data", "NO QUESTION", "prompts.strict=true"], "line 3"),
        (["--data", "SHORT", "responses.regenerate=false"], "1 shorter than two tokens"),
        (["--data", "NO TEXT", "responses.regenerate=false"], "6 not valid text"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_user_error_is_one_line_and_exit_code_2(
    change: list[str], named: str, dflash_train: Program, tmp_path: Path
) -> None:
    places = {name: tmp_path / f"{name}.jsonl" for name in TEXTS} | {
        "NO WEIGHTS": tmp_path / "b",
        "T5": tmp_path / "g",
    }
    for name, text in TEXTS.items():
        places[name].write_text(text)
    shutil.copytree(dflash_train.target, places["NO WEIGHTS"], ignore=shutil.ignore_patterns("*.safetensors"))
    places["T5"].mkdir()
    (places["T5"] / "config.json").write_text('{"model_type": "t5"}')
    assert named in dflash_train.refuses("device=cpu", *(places.get(word, word) for word in change))
    assert not [path for path in dflash_train.output.rglob("*") if path.is_file()], "nothing was begun"


def test_a_prompt_without_response_fails_before_loading(
    dflash_train: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("dflash_toolkit.train.pipeline._loaded", None)
    bare = write(tmp_path / "p.jsonl", [{"prompt": f"say {i}"} for i in range(4)])
    said = dflash_train.refuses("--data", bare, "responses.regenerate=false")
    assert (
        "without an answer (first: p.jsonl/2); give responses.regenerate=true" in said
        and not dflash_train.output.exists()
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_target_in_sixteen_bits_is_trained_for_on_a_cpu(dtype: str, dflash_train: Program) -> None:
    dflash_train(f"dtype={dtype}", "optim.steps=3")


def test_unrenderable_prompt_is_skipped_and_counted(dflash_train: Program, tmp_path: Path) -> None:
    dflash_train.data = write(tmp_path / "p.jsonl", says("fine 0", "fine 1", "fine 2", "\ud800 half"))
    said = "\n".join(dflash_train("optim.steps=1", "prompts.held_out=0"))
    assert "3 prompts; left out: 1 not valid text (first: p.jsonl/4)" in said


@pytest.mark.parametrize(("name", "text"), [("a.txt", "say\nmore"), ("a.json", '[\n{"prompt": "a"}, {"prompt": "b"}]')])
def test_dflash_train_reads_files_of_other_kinds(name: str, text: str, dflash_train: Program, tmp_path: Path) -> None:
    dflash_train.data = tmp_path / name
    dflash_train.data.write_text(text)
    assert "2 responses" in "\n".join(dflash_train("optim.steps=1", "prompts.held_out=0"))


def test_a_broken_file_leaves_no_partial_output(dflash_train: Program, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1\xff")
    said = dflash_train.refuses("--data", tmp_path / "a.parquet")
    assert said.startswith(f"{tmp_path / 'a.parquet'}: cannot be read") and not dflash_train.output.exists()


def test_row_that_only_fits_unpacked_is_skipped(dflash_train: Program, tmp_path: Path) -> None:
    texts = [*("x" * 200 + str(i) for i in range(4)), *(f"short {i}" for i in range(6))]
    options = ("prompts.max_length=400", "optim.pack_tokens=128", "optim.steps=8", "prompts.held_out=0")
    dflash_train.data = write(tmp_path / "p.jsonl", says(*texts))
    assert "dropped 4 of 10 rows" in "\n".join(dflash_train(*options, "responses.max_tokens=16"))


def test_deleted_drafter_is_exported_again(short_run: Program) -> None:
    short_run()
    exported = short_run.output / "model.safetensors"
    before = exported.read_bytes()
    exported.unlink()
    short_run()
    assert exported.read_bytes() == before
