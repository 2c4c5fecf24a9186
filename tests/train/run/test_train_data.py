"""Data of a run: prompts, their split, and the target's own responses, also after a restart."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import EOS, make_target, make_tokenizer, prompts_of
from programs import write
from transformers import AutoModelForCausalLM, Qwen3Config

from dflash_toolkit import SamplingParams, Target, UserError, generate
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.evaluation.measure.batched import BatchedDecoder
from dflash_toolkit.evaluation.measure.decoders import Decoder, EngineDecoder, ReferenceDecoder
from dflash_toolkit.runtime import EngineOptions, load_engine
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.data_options import DataOptions, ResponseOptions
from dflash_toolkit.train.features.source import FeatureSource
from dflash_toolkit.train.features.store import GIB, MemoryStore
from dflash_toolkit.train.objective.blocks import PADDING
from dflash_toolkit.train.prompts.choosing import chosen
from dflash_toolkit.train.prompts.split import PROMPTS, Reading, choose_prompts, data_digest
from dflash_toolkit.train.responses.build_corpus import write_recorded
from dflash_toolkit.train.responses.corpus import Corpus
from dflash_toolkit.train.responses.file import resume
from dflash_toolkit.train.responses.generate import ResponsePlan, respond
from dflash_toolkit.train.responses.rows import Row
from dflash_toolkit.train.training_options import RunOptions

OPTIONS = ResponseOptions(batch_size=3, max_tokens=20, samples=1, temperature=0.0)


def opener(target: Target) -> Callable[[], Decoder]:
    """The engine on a loaded target."""
    return lambda: EngineDecoder(load_engine(target, None, options=EngineOptions(max_num_seqs=OPTIONS.batch_size))[0])


def prompt_file(path: Path, start: int, stop: int) -> str:
    return str(write(path, [{"prompt": f"ask {i}", "response": f"say {i}"} for i in range(start, stop)]))


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return TrainConfig(
        target="tiny", data=(prompt_file(tmp_path / "a.jsonl", 0, 20),), prompts=DataOptions(held_out=6, max_length=64)
    )


def chat(i: int) -> tuple[int, ...]:
    return tuple(encode_chat(make_tokenizer(), [{"role": "user", "content": f"ask {i}"}]))


# ---- prompts ---------------------------------------------------------------------------------------------------


def read(config: TrainConfig, work: Path) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Prompts that are trained on, and those that are held out."""
    mine, apart = prompts_of(config, make_tokenizer(), work)
    return [tuple(ids) for ids in mine], [tuple(ids) for ids in apart]


def test_a_prompt_is_rendered_by_the_chat_template(config: TrainConfig, tmp_path: Path) -> None:
    whole = replace(config, prompts=DataOptions(held_out=0, max_length=64))
    assert read(whole, tmp_path / "w") == ([chat(i) for i in range(20)], [])
    assert [each.index for each in chosen(tmp_path / "w" / PROMPTS)] == list(range(20))
    assert [path.name for path in (tmp_path / "w").iterdir()] == [PROMPTS]


def test_every_prompt_is_either_trained_on_or_held_out_never_both(config: TrainConfig, tmp_path: Path) -> None:
    mine, apart = read(config, tmp_path / "w")
    assert (len(mine), len(apart)) == (14, 6) and {*mine, *apart} == {chat(i) for i in range(20)}


def test_the_held_out_split_depends_only_on_the_seed(config: TrainConfig, tmp_path: Path) -> None:
    first, again, other = (read(replace(config, run=RunOptions(seed=seed)), tmp_path / "w")[1] for seed in (1, 1, 2))
    assert first == again != other


def test_held_out_files_keep_all_data_for_training(config: TrainConfig, tmp_path: Path) -> None:
    given = replace(config, held_out=(prompt_file(tmp_path / "h.jsonl", 30, 33),))
    mine, apart = read(given, tmp_path / "w")
    assert len(mine) == 20 and apart == [chat(i) for i in (30, 31, 32)]
    assert data_digest(config) != data_digest(given), "another measure is another run"


def test_held_out_prompts_cover_every_file_at_any_count(config: TrainConfig, tmp_path: Path) -> None:
    files = (*config.data, prompt_file(tmp_path / "b.jsonl", 20, 40), prompt_file(tmp_path / "c.jsonl", 40, 50))
    given = replace(config, data=files, prompts=DataOptions(held_out=10, max_length=64))
    data = choose_prompts(Reading(given, make_tokenizer(), ""), tmp_path)
    sources = [prompt.source for prompt in data.held_out]
    assert Counter(sources) == {"a.jsonl": 4, "b.jsonl": 4, "c.jsonl": 2}
    assert {*sources[:5]} == {"a.jsonl", "b.jsonl", "c.jsonl"} and sources[:5].count("a.jsonl") == 2
    assert all(tuple(prompt.tokens) in {chat(i) for i in range(50)} for prompt in data.held_out)


def test_max_prompts_samples_from_all_files(
    config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = (*config.data, prompt_file(tmp_path / "b.jsonl", 20, 40))
    everything = [chat(i) for i in range(40)]

    def drawn(most: int, seed: int = 0) -> list[int]:
        options = DataOptions(held_out=0, max_length=64, max_prompts=most)
        found, _ = read(replace(config, data=files, prompts=options, run=RunOptions(seed=seed)), tmp_path / "w")
        return [everything.index(ids) for ids in found]

    some = drawn(16)
    assert len({*some}) == 16 and some == sorted(some) == drawn(16) != drawn(16, seed=1)
    assert 3 < sum(i >= 20 for i in some) < 13, "of both files, and not the first"
    assert "16 of 40 prompts are used (prompts.max_prompts)" in capsys.readouterr().err
    assert drawn(40) == list(range(40)) and "are used" not in capsys.readouterr().err


def test_near_duplicates_are_dropped_within_and_across_splits(config: TrainConfig, tmp_path: Path) -> None:
    said = "tell me about the number {} in {} short words of yours please and say why"
    asked = [said.format(i, i) + end for end in ("", "!") for i in range(8)]
    data = write(tmp_path / "near.jsonl", [{"prompt": text} for text in asked])
    held = write(tmp_path / "held.jsonl", [{"prompt": said.format(3, 3) + " ?"}])
    given = replace(config, data=(str(data),), prompts=DataOptions(held_out=2, max_length=200))
    mine, apart = read(given, tmp_path / "w")
    assert (len(mine), len(apart)) == (6, 2), "one of every two that differ by a sign"
    mine, apart = read(replace(given, held_out=(str(held),)), tmp_path / "w")
    assert (len(mine), len(apart)) == (7, 1), "none that is nearly the one that is measured on"
    exact = replace(given, held_out=(str(held),), prompts=replace(given.prompts, similarity=1.0))
    assert len(read(exact, tmp_path / "w")[0]) == 16


def test_invalid_prompt_row_ends_the_run_or_is_skipped(config: TrainConfig, tmp_path: Path) -> None:
    with open(config.data[0], "a") as handle:
        handle.write('{"nothing": 1}\n')
    strict = replace(config, prompts=replace(config.prompts, strict=True))
    with pytest.raises(UserError, match=r"a.jsonl, line 21: .*prompts.strict=false"):
        read(strict, tmp_path / "w")
    assert not list((tmp_path / "w").iterdir()), "nothing half-written"
    assert len(read(config, tmp_path / "w")[0]) == 14


def test_benchmark_templates_apply_by_name_only(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": f"ask {i}", "answer": f"say {i}"} for i in range(4)])
    words = make_tokenizer()

    def formed(name: str, form: str = "auto") -> tuple[list[str], str]:
        options = DataOptions(max_length=512, form=form)
        data, held_out = ((f"{name}{path}{part}",) for part in ("[:2]", "[2:]"))
        config = TrainConfig(target="tiny", data=data, held_out=held_out, prompts=options)
        mine, apart = read(config, tmp_path / "w")
        return [words.decode(ids) for ids in (*mine, *apart)], data_digest(config)

    plain, digest = formed("")
    assert plain == [words.decode(chat(i)) for i in range(4)] == formed("shop=")[0] == formed("gsm8k=", "none")[0]
    shown, other = formed("gsm8k=")
    assert all("step by step" in text for text in shown) and shown == formed("", "gsm8k")[0]
    assert digest == formed("shop=")[1] != other, "another form is another run"


def test_the_digest_follows_the_contents_of_the_data(config: TrainConfig) -> None:
    before = data_digest(config)
    assert before == data_digest(config)
    Path(config.data[0]).write_text(Path(config.data[0]).read_text().replace("ask 3", "ask 4"))
    assert before != data_digest(config)


def test_too_long_prompt_is_skipped_and_the_limit_is_named(
    config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = DataOptions(held_out=8, max_length=len(chat(19)) + 1)  # ten prompts are a token shorter
    reading = Reading(replace(config, prompts=options), make_tokenizer(), "the target's context is 30 tokens")
    data = choose_prompts(reading, tmp_path)
    held = [tuple(prompt.tokens) for prompt in data.held_out]
    assert len(held) == 8 and {*held} <= {chat(i) for i in range(10)}
    said = capsys.readouterr().err
    assert "passed over for held-out prompts:" in said and "too long (the target's context is 30 tokens)" in said


# ---- answers ---------------------------------------------------------------------------------------------------


def ask(path: Path) -> list[list[int]]:
    """A file of chosen prompts, and what they are rendered to."""
    lengths = enumerate((4, 9, 4, 6, 12, 9, 5))
    texts = ["".join(chr(97 + (7 * i + j * j) % 26) for j in range(n)) for i, n in lengths]
    turns = [[[{"role": "user", "content": text}]] for text in texts]
    write(path, [{"index": 10 + i, "id": "", "turns": t} for i, t in enumerate(turns)])
    return [encode_chat(make_tokenizer(), messages[0]) for messages in turns]


def answered(
    opened: Callable[[], Decoder], path: Path, options: ResponseOptions, max_length: int, rank: int = 0, world: int = 1
) -> list[Row]:
    """Returns the complete file in the order of the prompts."""
    prompts = path.with_name("asked.jsonl")
    if not prompts.exists():
        ask(prompts)
    done = resume(path)[0] if path.exists() else set()
    plan = ResponsePlan(tokenizer=make_tokenizer(), params=options.params(), length=max_length, thinking=None)
    common = {"target": "tiny", "target_digest": None, "vocab_size": 300, "template_hash": "t", "sampler": {}}
    if next(plan.conversations(prompts, done, rank, world), None):
        respond(opened(), plan, prompts, path, common, done, 7, rank, world)
    rows = sorted(map(json.loads, path.read_text().splitlines()), key=lambda row: row["index"])
    return [Row(row["index"], row["prompt_tokens"], row["tokens"]) for row in rows]


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Row], bytes]:
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    return answered(opener(target), path, OPTIONS, 64), path.read_bytes()


@pytest.mark.parametrize("stops", ["usual", "early", "none"])
def test_responses_are_greedy_up_to_the_stop_token(stops: str, tmp_path: Path) -> None:
    target, prompts = make_target(), ask(tmp_path / "asked.jsonl")

    def continued(prompt: list[int]) -> list[int]:
        return generate(target, None, prompt, SamplingParams(max_tokens=20)).tokens

    if stops == "early":  # a token that some answers reach early: batches mix answers of different lengths
        target.model.generation_config.eos_token_id = [continued(prompts[0])[4], EOS]
    if stops == "none":
        for settings in (target.config, target.model.generation_config):
            settings.pad_token_id = settings.eos_token_id = None
        target.tokenizer.eos_token = target.tokenizer.chat_template = None
        assert not target.stop_token_ids
    rows = answered(opener(target), tmp_path / "a.jsonl", OPTIONS, 64)
    answers = [continued(prompt) for prompt in prompts]
    assert rows == [Row(10 + i, len(p), p + answer) for i, (p, answer) in enumerate(zip(prompts, answers, strict=True))]
    assert not any({*answer[:-1]} & {*target.stop_token_ids} for answer in answers)
    assert (len({len(answer) for answer in answers}) > 1) == (stops == "early")


def test_engine_and_reference_write_the_same_rows_greedy_and_sampled(target: Target, tmp_path: Path) -> None:
    references = (lambda: ReferenceDecoder(target), lambda: BatchedDecoder(target, 4))
    for i, options in enumerate((OPTIONS, ResponseOptions(max_tokens=20, temperature=1.3, top_k=40, min_p=0.01))):
        found, *others = (
            answered(backend, tmp_path / f"{i}-{j}.jsonl", options, 64)
            for j, backend in enumerate((opener(target), *references))
        )
        assert others == [found, found]
        assert len({tuple(row.tokens[row.prompt_tokens :][:5]) for row in found}) > 1


def test_prompt_and_answer_together_stay_within_max_length(target: Target, tmp_path: Path) -> None:
    prompts = ask(tmp_path / "asked.jsonl")
    rows = answered(opener(target), tmp_path / "a.jsonl", OPTIONS, 12)
    assert max(len(row.tokens) for row in rows) == 12
    assert [row.index - 10 for row in rows] == [i for i, prompt in enumerate(prompts) if len(prompt) <= 10], "room"


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 0.999, 1.0])
def test_a_truncated_file_resumes_without_lost_or_double_rows(
    share: float, target: Target, whole: tuple[list[Row], bytes], tmp_path: Path
) -> None:
    rows, data = whole
    path = tmp_path / "answers.jsonl"
    path.write_bytes(data[: int(len(data) * share)])
    opened = opener(target) if share < 1 else lambda: pytest.fail("nothing is left to answer")
    assert answered(opened, path, OPTIONS, 64) == rows
    assert path.read_bytes().count(b"\n") == len(rows)


def test_processes_share_prompts_and_any_number_resumes(
    target: Target, whole: tuple[list[Row], bytes], tmp_path: Path
) -> None:
    paths = [tmp_path / f"{rank}.jsonl" for rank in range(3)]
    found = [row for rank in range(3) for row in answered(opener(target), paths[rank], OPTIONS, 64, rank, 3)]
    assert sorted(found, key=lambda row: row.index) == whole[0]


def test_recorded_responses_end_with_the_stop_token(
    config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def recorded(max_length: int) -> Corpus:
        options = DataOptions(held_out=0, max_length=max_length)
        given = replace(config, prompts=options, responses=ResponseOptions(regenerate=False))
        reading = Reading(given, make_tokenizer(), f"prompts.max_length is {max_length}")
        data = choose_prompts(reading, tmp_path)
        write_recorded(reading, data, tmp_path / PROMPTS, (EOS,), tmp_path / "corpus", {})
        return Corpus.open(tmp_path / "corpus")

    for i, row in enumerate(recorded(64)):
        assert row.tokens.tolist() == [*chat(i), *make_tokenizer()(f"say {i}").input_ids, EOS]
        assert row.prompt_tokens == len(chat(i))
    assert len(recorded(len(chat(0)) + 2)) == 10
    assert f"10 too long (prompts.max_length is {len(chat(0)) + 2})" in capsys.readouterr().err


def test_a_row_needs_two_supervised_tokens() -> None:
    rows = [Row(i, 3, list(range(3 + i))) for i in range(5)]
    assert [row.has_anchor for row in rows] == [False, False, True, True, True]
    spans = [((2, 3), (5, 6)), ((2, 3), (5, 7)), ((2, 4),)]
    rows = [Row(i, 2, list(range(7)), s) for i, s in enumerate(spans)]
    assert [row.has_anchor for row in rows] == [False, True, True]
    assert [row.supervised for row in Corpus.of_rows(rows).with_anchors()] == [row.supervised for row in rows[1:]]


def test_a_cut_row_keeps_the_rest_of_its_spans() -> None:
    row = Row(0, 2, list(range(9)), ((2, 4), (6, 9)))
    assert row.cut(9) is row
    assert row.cut(7) == Row(0, 2, list(range(7)), ((2, 4), (6, 7)))
    assert row.cut(5) == Row(0, 2, list(range(5)), ((2, 4),))
    assert not row.cut(2).has_anchor and row.cut(2).response_tokens == 0


# ---- features --------------------------------------------------------------------------------------------------


def test_only_responses_are_supervised_in_conversations() -> None:
    source = FeatureSource(make_target(), (1, 3), 10)
    row = Row(0, 2, list(range(12)), ((2, 4), (7, 12)))
    assert source([row]).supervised[0].nonzero().flatten().tolist() == [2, 3, 7, 8, 9]


@pytest.mark.parametrize("cache_gb", [0.0, 1.0, 1e-5])  # none, all of it, the first row only
def test_features_are_tapped_outputs_of_separate_rows(cache_gb: float, whole: tuple[list[Row], bytes]) -> None:
    target, rows = make_target(), whole[0][:4]
    source = FeatureSource(target, (1, 3), 64, pad_to=16, store=MemoryStore(0, int(cache_gb * GIB)))
    first, again = source(rows), source(rows)
    assert torch.equal(first.hidden, again.hidden)
    assert first.tokens.shape[1] == 32, "padded to a multiple"
    for i, row in enumerate(rows):
        n = len(row.tokens)
        states = target.model(torch.tensor([row.tokens]), output_hidden_states=True).hidden_states
        assert torch.allclose(first.hidden[i, :n], torch.cat([states[2], states[4]], -1)[0], atol=1e-5)
        assert first.tokens[i, :n].tolist() == row.tokens
        assert first.supervised[i].tolist() == [row.prompt_tokens <= t < n for t in range(32)]
        assert first.document[i].tolist() == [i] * n + [PADDING] * (32 - n)
        assert first.positions[i].tolist() == list(range(32))


@pytest.mark.gpu
def test_vllm_answers_equal_those_of_the_target(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from dflash_toolkit.train.responses.vllm_backend import VllmBackend

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, eos_token_id=7, bos_token_id=None,
        initializer_range=0.1,
    )  # fmt: skip
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "target")
    prompts = [torch.randint(8, 1024, (n,)).tolist() for n in (5, 40, 17)]
    params = SamplingParams(max_tokens=24)
    backend = VllmBackend(str(tmp_path / "target"), (7,), dtype="bfloat16", batch=4, context=128, gpus=1)
    for key, prompt in enumerate(prompts):
        backend.submit(key, prompt, params)
    found = {answer.key: answer for answer in (backend.wait() for _ in prompts)}
    backend.close()
    for key, prompt in enumerate(prompts):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + found[key].tokens], device="cuda")).logits[0].float()
        own = logits[len(prompt) - 1 : -1]
        regret = own.max(-1).values - own.gather(1, torch.tensor(found[key].tokens, device="cuda")[:, None])[:, 0]
        assert regret.max() < 0.2, "greedy, but for near ties in bf16"
        assert (found[key].tokens[-1] == 7) == (found[key].finish_reason == "stop")
