"""What a run is made from: prompts, their split, and answers that are the target's own, whatever happened before."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import EOS, make_target, make_tokenizer
from transformers import AutoModelForCausalLM, Qwen3Config

from dflash_toolkit import SamplingParams, Target, UserError, generate
from dflash_toolkit.prompts import encode_chat
from dflash_toolkit.runtime import Engine, EngineOptions
from train.answers import Question, Row, read_rows, regenerate
from train.backends import Backend, EngineBackend, ReferenceBackend
from train.blocks import PADDING
from train.config import AnswerKnobs, DataKnobs, RunKnobs, TrainConfig
from train.data import load_prompts, rows_from_answers, with_anchors
from train.feature_store import GIB, MemoryStore
from train.features import FeatureSource

KNOBS = AnswerKnobs(batch_size=3, max_new_tokens=20)


def opener(target: Target) -> Callable[[], Backend]:
    """The engine on a loaded target."""
    return lambda: EngineBackend(Engine.of_modules(target, None, EngineOptions(max_batch=KNOBS.batch_size)))


def prompt_file(path: Path, start: int, stop: int) -> str:
    rows = [{"prompt": f"ask {i}", "response": f"say {i}"} for i in range(start, stop)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return TrainConfig(
        target="tiny", data=(prompt_file(tmp_path / "a.jsonl", 0, 20),), prompts=DataKnobs(held_out=6, max_length=64)
    )


def chat(i: int) -> tuple[int, ...]:
    return tuple(encode_chat(make_tokenizer(), [{"role": "user", "content": f"ask {i}"}]))


# ---- prompts ---------------------------------------------------------------------------------------------------


def test_a_prompt_is_what_the_chat_template_makes_of_it(config: TrainConfig) -> None:
    config = replace(config, prompts=DataKnobs(held_out=0, max_length=64))
    data = load_prompts(config, make_tokenizer())
    assert [tuple(q.tokens) for q in data.training] == [chat(i) for i in range(20)]
    assert [q.index for q in data.training] == list(range(20))
    assert {i: prompt.answer for i, prompt in data.recorded.items()} == {i: f"say {i}" for i in range(20)}


def test_every_prompt_is_either_trained_on_or_held_out_never_both(config: TrainConfig) -> None:
    data = load_prompts(config, make_tokenizer())
    training, held_out = {tuple(q.tokens) for q in data.training}, {tuple(p) for p in data.held_out}
    assert len(training) == 14 and len(held_out) == 6
    assert training | held_out == {chat(i) for i in range(20)}
    # the answers still belong to their questions after the split
    words = make_tokenizer()
    answers = {q.index: data.recorded[q.index].answer or "" for q in data.training}
    assert all(answers[q.index].removeprefix("say") in words.decode(q.tokens) for q in data.training)


def test_the_split_depends_on_the_seed_alone(config: TrainConfig) -> None:
    def held_out(seed: int) -> list[list[int]]:
        torch.manual_seed(torch.randint(1 << 30, ()).item())
        return load_prompts(replace(config, run=RunKnobs(seed=seed)), make_tokenizer()).held_out

    assert held_out(1) == held_out(1) != held_out(2)


def test_held_out_files_leave_the_data_whole(config: TrainConfig, tmp_path: Path) -> None:
    given = replace(config, held_out=(prompt_file(tmp_path / "h.jsonl", 30, 33),))
    plain, data = (load_prompts(c, make_tokenizer()) for c in (config, given))
    assert len(data.training) == 20 and [tuple(p) for p in data.held_out] == [chat(i) for i in (30, 31, 32)]
    assert data.digest != plain.digest, "another measure is another run"


def test_max_prompts_counts_over_all_files(config: TrainConfig, tmp_path: Path) -> None:
    files = (*config.data, prompt_file(tmp_path / "b.jsonl", 20, 40))
    knobs = DataKnobs(held_out=0, max_length=64, max_prompts=25)
    data = load_prompts(replace(config, data=files, prompts=knobs), make_tokenizer())
    assert [tuple(q.tokens) for q in data.training] == [chat(i) for i in range(25)]


def test_the_digest_follows_the_contents_of_the_data(config: TrainConfig) -> None:
    before = load_prompts(config, make_tokenizer()).digest
    assert before == load_prompts(config, make_tokenizer()).digest
    Path(config.data[0]).write_text(Path(config.data[0]).read_text().replace("ask 3", "ask 4"))
    assert before != load_prompts(config, make_tokenizer()).digest


def test_a_prompt_without_room_for_an_answer_is_named(config: TrainConfig) -> None:
    longest = len(chat(19))
    fits, tight = (replace(config, prompts=DataKnobs(held_out=0, max_length=n)) for n in (longest + 2, longest + 1))
    assert len(load_prompts(fits, make_tokenizer()).training) == 20
    with pytest.raises(UserError, match=r"prompt a.jsonl/11 has \d+ tokens, prompts.max_length is"):
        load_prompts(tight, make_tokenizer())


# ---- answers ---------------------------------------------------------------------------------------------------


def questions(count: int = 7) -> list[Question]:
    g = torch.Generator().manual_seed(2)
    lengths = [4, 9, 4, 6, 12, 9, 5][:count]
    return [Question(10 + i, torch.randint(0, 250, (n,), generator=g).tolist()) for i, n in enumerate(lengths)]


def answered(
    opened: Callable[[], Backend], asked: list[Question], path: Path, knobs: AnswerKnobs, max_length: int
) -> list[Row]:
    """What `regenerate` leaves in the file, in the order of the prompts' indices."""
    regenerate(opened, asked, path, knobs, max_length)
    return sorted(read_rows(path), key=lambda row: row.index)


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Row], bytes]:
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    return answered(opener(target), questions(), path, KNOBS, 64), path.read_bytes()


def test_every_answer_is_the_target_s_greedy_continuation_of_its_prompt(
    target: Target, whole: tuple[list[Row], bytes]
) -> None:
    rows, _ = whole
    assert [row.index for row in rows] == [q.index for q in questions()]
    for question, row in zip(questions(), rows, strict=True):
        answer = generate(target, None, question.tokens, SamplingParams(max_new_tokens=20)).tokens
        assert (row.tokens, row.prompt_tokens) == (question.tokens + answer, len(question.tokens))


def test_engine_and_reference_write_the_same_rows_greedy_and_sampled(target: Target, tmp_path: Path) -> None:
    for i, knobs in enumerate((KNOBS, AnswerKnobs(max_new_tokens=20, temperature=1.3, top_k=40, min_p=0.01))):
        both = [
            answered(backend, questions(), tmp_path / f"{name}{i}.jsonl", knobs, 64)
            for name, backend in (("engine", opener(target)), ("reference", lambda: ReferenceBackend(target)))
        ]
        assert both[0] == both[1]
        assert len({tuple(row.tokens[row.prompt_tokens :][:5]) for row in both[0]}) > 1


def test_an_answer_ends_with_its_stop_token_and_nothing_after_it(tmp_path: Path) -> None:
    target = make_target()
    plain = [generate(target, None, q.tokens, SamplingParams(max_new_tokens=20)).tokens for q in questions()]
    target.model.generation_config.eos_token_id = [plain[0][4], EOS]  # a token that some answers reach early
    rows = answered(opener(target), questions(), tmp_path / "a.jsonl", KNOBS, 64)
    lengths = set()
    for question, row in zip(questions(), rows, strict=True):
        assert row.tokens == question.tokens + generate(target, None, question.tokens, SamplingParams(
            max_new_tokens=20)).tokens  # fmt: skip
        answer = row.tokens[row.prompt_tokens :]
        assert not set(answer[:-1]) & set(target.stop_token_ids)
        lengths.add(len(answer))
    assert len(lengths) > 1, "batches mix answers of different lengths"


def test_prompt_and_answer_together_stay_within_max_length(target: Target, tmp_path: Path) -> None:
    rows = answered(opener(target), questions(), tmp_path / "a.jsonl", KNOBS, 20)
    assert max(len(row.tokens) for row in rows) == 20
    with pytest.raises(UserError, match=r"prompt 14 has 12 tokens, prompts.max_length is 13"):
        regenerate(opener(target), questions(), tmp_path / "b.jsonl", KNOBS, 13)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 0.999, 1.0])
def test_a_file_cut_anywhere_is_completed_without_lost_or_doubled_rows(
    share: float, target: Target, whole: tuple[list[Row], bytes], tmp_path: Path
) -> None:
    rows, data = whole
    path = tmp_path / "answers.jsonl"
    path.write_bytes(data[: int(len(data) * share)])
    assert answered(opener(target), questions(), path, KNOBS, 64) == rows
    assert path.read_bytes().count(b"\n") == len(rows)


def test_complete_answers_are_not_made_again(whole: tuple[list[Row], bytes], tmp_path: Path) -> None:
    rows, data = whole
    (tmp_path / "answers.jsonl").write_bytes(data)

    def silent() -> Backend:
        raise AssertionError("nothing is left to answer")

    assert answered(silent, questions(), tmp_path / "answers.jsonl", KNOBS, 64) == rows


def test_a_target_without_pad_and_stop_tokens_still_answers(tmp_path: Path) -> None:
    target = make_target()
    for settings in (target.config, target.model.generation_config):
        settings.pad_token_id = settings.eos_token_id = None
    rows = answered(opener(target), questions(3), tmp_path / "a.jsonl", KNOBS, 64)
    for question, row in zip(questions(3), rows, strict=True):
        assert row.tokens == question.tokens + generate(target, None, question.tokens, SamplingParams(
            max_new_tokens=20)).tokens  # fmt: skip


def test_the_data_s_answers_end_with_the_stop_token_and_are_cut_at_max_length(config: TrainConfig) -> None:
    data = load_prompts(config, make_tokenizer())
    for question, row in zip(data.training, rows_from_answers(data, make_tokenizer(), (EOS,), 64), strict=True):
        text = data.recorded[question.index].answer
        assert row.tokens == [*question.tokens, *make_tokenizer()(text).input_ids, EOS]
        assert row.prompt_tokens == len(question.tokens)
    shortest = min(len(q.tokens) for q in data.training)
    cut = rows_from_answers(data, make_tokenizer(), (EOS,), shortest + 3)
    assert max(len(row.tokens) for row in cut) == shortest + 3


def test_a_row_needs_two_supervised_tokens() -> None:
    rows = [Row(i, 3, list(range(3 + i))) for i in range(5)]
    assert [row.index for row in with_anchors(rows)] == [2, 3, 4]
    spans = [((2, 3), (5, 6)), ((2, 3), (5, 7)), ((2, 4),)]
    assert [row.index for row in with_anchors([Row(i, 2, list(range(7)), s) for i, s in enumerate(spans)])] == [1, 2]


def test_a_cut_row_keeps_what_it_has_of_its_answers() -> None:
    row = Row(0, 2, list(range(9)), ((2, 4), (6, 9)))
    assert row.cut(9) is row
    assert row.cut(7) == Row(0, 2, list(range(7)), ((2, 4), (6, 7)))
    assert row.cut(5) == Row(0, 2, list(range(5)), ((2, 4),))
    assert not row.cut(2).has_anchor and row.cut(2).answer_tokens == 0


# ---- features --------------------------------------------------------------------------------------------------


def test_every_answer_of_a_conversation_is_supervised_and_nothing_else() -> None:
    source = FeatureSource(make_target(), (1, 3), 10)
    row = Row(0, 2, list(range(12)), ((2, 4), (7, 12)))
    assert source([row]).supervised[0].nonzero().flatten().tolist() == [2, 3, 7, 8, 9]


@pytest.mark.parametrize("cache_gb", [0.0, 1.0, 1e-5])  # none, all of it, the first row only
def test_features_are_the_tapped_outputs_of_each_row_alone(cache_gb: float, whole: tuple[list[Row], bytes]) -> None:
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
def test_vllm_answers_like_the_target_itself(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from train.vllm_backend import VllmBackend

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
    params = SamplingParams(max_new_tokens=24)
    backend = VllmBackend(str(tmp_path / "target"), (7,), dtype="bfloat16", batch=4, context=128, gpus=1)
    for key, prompt in enumerate(prompts):
        backend.ask(key, prompt, params)
    found = {answer.key: answer for answer in (backend.wait() for _ in prompts)}
    backend.close()
    for key, prompt in enumerate(prompts):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + found[key].tokens], device="cuda")).logits[0].float()
        own = logits[len(prompt) - 1 : -1]
        regret = own.max(-1).values - own.gather(1, torch.tensor(found[key].tokens, device="cuda")[:, None])[:, 0]
        assert regret.max() < 0.2, "greedy, but for near ties in bf16"
        assert (found[key].tokens[-1] == 7) == (found[key].finish_reason == "stop")
