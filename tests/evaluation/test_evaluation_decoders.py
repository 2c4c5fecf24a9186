"""The two runtimes of `dflash-eval` agree, and report what they do not support."""

import html
import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import Architecture, tiny
from conftest import make_drafter, make_target
from gpu_engines import pair as gpu_pair
from reports import load, untimed, write_prompts
from torch import Tensor

from dflash_toolkit import Drafter, SamplingParams, Target, UserError, decode, generate, load_drafter, save_drafter
from dflash_toolkit.acceptance import Acceptance
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.draft_tree import WIDTH
from dflash_toolkit.evaluation import EncodedPrompt, EnginePair, ReferencePair, Report, evaluate
from dflash_toolkit.evaluation.cli import main
from dflash_toolkit.evaluation.measure.measurement import measure, token_texts
from dflash_toolkit.evaluation.measure.pairs import Pair
from dflash_toolkit.evaluation.report.markdown import escape
from dflash_toolkit.kernels.formats import RowScaledFp8
from dflash_toolkit.runtime.proposer import Draft, Proposer
from dflash_toolkit.runtime.runner import StepRunner

MAKERS = [pytest.param(EnginePair.load, id="engine"), pytest.param(ReferencePair, id="reference")]
Maker = Callable[[Target, Drafter], Pair]
SKY = EncodedPrompt("sky", list(b"Why is the sky blue?"))
SETS = {
    "long": [SKY, EncodedPrompt("sum", list(b"What is the sum of two and two, and why is that so?" * 2))],
    "short": [EncodedPrompt("h", [104])],
}


def draft_by_bigrams(target: Target, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes both runtimes draft by the token pairs of plain answers, which is correct for some tokens."""
    following: dict[int, int] = {}
    for prompts in SETS.values():
        for prompt in prompts:
            following |= pairwise(generate(target, None, prompt.token_ids, params).tokens)

    def drafts(last: int, block: int) -> list[int]:
        found = [last]
        while len(found) < block:
            found.append(following.get(found[-1], 0))
        return found[1:]

    def of_the_reference(target: Target, drafter: Drafter, context: Any, last: int, position: int) -> list[int]:
        return drafts(last, drafter.config.block_size)

    def of_the_engine(proposer: Proposer, last: Tensor, rows: Any, block: int) -> Draft:
        return Draft(torch.tensor([drafts(token, block) for token in last.tolist()]))

    monkeypatch.setattr(decode, "propose", of_the_reference)
    monkeypatch.setattr(Proposer, "propose", of_the_engine)


def command_of(target: Path, drafter: Path, folder: Path) -> list[str]:
    prompts = write_prompts(folder / "prompts.jsonl", "Why is the sky blue?", "Count to ten.")
    words = ["--target", target, "--drafter", drafter, "--device", "cpu", "--prompts", f"a={prompts}", "--output"]
    return [str(word) for word in (*words, folder / "report")]


def comparable(report: Report) -> Any:
    values = untimed(report.to_json())
    assert values["arguments"].pop("runtime") in ("engine", "reference")
    return values


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(SamplingParams(max_tokens=24), id="greedy"),
        pytest.param(SamplingParams(max_tokens=24, temperature=0.5, top_p=0.9, seed=3), id="sampled"),
        pytest.param(SamplingParams(max_tokens=500, ignore_eos=True), id="up to the context limit"),
    ],
)
def test_engine_and_reference_reports_are_equal(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(limit=114)
    drafter = make_drafter(target)
    draft_by_bigrams(target, params, monkeypatch)
    pairs = (EnginePair.load(target, drafter), ReferencePair(target, drafter))
    ours, definition = (evaluate(pair, SETS, params) for pair in pairs)
    assert ours.overall.drafted.tau_pooled > 1.2, "drafts were accepted"
    assert comparable(ours) == comparable(definition)
    for name in SETS:
        for a, b in zip(ours.sets[name].measurements, definition.sets[name].measurements, strict=True):
            for one, other in ((a.drafted, b.drafted), (a.plain, b.plain)):
                assert (one.tokens, one.steps, one.finish_reason) == (other.tokens, other.steps, other.finish_reason)


def test_fp8_drafting_is_measured_and_reported(
    target_dir: Path, drafter_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts: list[str] = []  # one per engine
    real = StepRunner.__init__

    def noted(runner: StepRunner, target: Any, drafter: Any, *rest: Any, **more: Any) -> None:
        real(runner, target, drafter, *rest, **more)
        quantized = drafter is not None and isinstance(drafter.head, RowScaledFp8)
        drafts.append("none" if drafter is None else "fp8" if quantized else "full")

    monkeypatch.setattr(StepRunner, "__init__", noted)
    command = [*command_of(target_dir, drafter_dir, tmp_path), "--max-tokens", "20"]
    assert main([*command, "--draft-dtype", "fp8"]) == 0
    report = load(tmp_path / "report")
    assert sorted(set(drafts)) == ["fp8", "none"]
    assert report["arguments"]["draft_dtype"] == "fp8"
    assert report["overall"]["identical_to_plain"] == 1.0
    assert "| draft\\_dtype | fp8 |" in (tmp_path / "report" / "report.md").read_text()
    drafts.clear()
    assert main(command) == 0
    assert sorted(set(drafts)) == ["full", "none"]
    assert load(tmp_path / "report")["arguments"]["draft_dtype"] == "full", "auto, on a CPU"


def test_reports_say_that_an_fp8_cache_changes_answers(target_dir: Path, drafter_dir: Path, tmp_path: Path) -> None:
    command = [*command_of(target_dir, drafter_dir, tmp_path), "--max-tokens", "20"]
    assert main([*command, "--kv-cache-dtype", "fp8_e4m3"]) == 0
    report, text = load(tmp_path / "report"), (tmp_path / "report" / "report.md").read_text()
    assert report["arguments"]["kv_cache_dtype"] == "fp8"
    assert report["overall"]["identical_to_plain"] == 1.0
    said = "The KV cache is in fp8, with and without the drafter: the target's answers differ from those in 16 bits."
    assert said in text
    assert main(command) == 0
    assert load(tmp_path / "report")["arguments"]["kv_cache_dtype"] == "auto"
    assert said not in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.parametrize("make", MAKERS)
def test_equal_answers_are_reported_as_identical(target: Target, drafter: Drafter, make: Maker) -> None:
    seen: list[int] = []
    runtime, params = make(target, drafter), SamplingParams(max_tokens=12)
    found = measure(runtime, SKY, params, baseline=True, on_step=lambda growing: seen.append(len(growing.tokens)))
    assert found.drafted.tokens == found.plain.tokens == generate(target, None, SKY.token_ids, params).tokens
    assert found.difference is None
    assert (seen[0], seen[-1], len(seen)) == (1, len(found.drafted.tokens), 1 + len(found.drafted.steps))
    for answer in (found.drafted, found.plain):
        assert answer.prefill_s > 0 and answer.decode_s > 0
    assert (len(found.step_s), len(found.plain_step_s)) == (len(found.drafted.steps), len(found.plain.steps))
    assert sum(found.step_s) == pytest.approx(found.drafted.decode_s, rel=0.5)
    assert found.joules is found.plain_joules is None, "a CPU does not count"
    assert all(step.drafted == 0 for step in found.plain.steps)
    assert all(step.drafted == 7 for step in found.drafted.steps[:1])
    assert measure(runtime, SKY, params, baseline=False).plain is None


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("offset", [1, 120])
def test_a_difference_has_its_position_and_regret(
    target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch, make: Maker, offset: int
) -> None:
    runtime, params = make(target, drafter), SamplingParams(max_tokens=10, ignore_eos=True)
    right = runtime.decode
    plain = right(SKY.token_ids, params, draft=False).tokens
    other = (plain[4] + offset) % 200

    def wrong(prompt_ids: list[int], params: SamplingParams, *, draft: bool, on_step: Any = None) -> Any:
        answer = right(prompt_ids, params, draft=draft)
        if draft:
            answer.tokens[4] = other
        return answer

    monkeypatch.setattr(runtime, "decode", wrong)
    found = measure(runtime, SKY, params, baseline=True).difference
    assert found is not None
    assert (found.position, found.plain_token, found.drafted_token) == (4, plain[4], other)
    logprobs = target.model(torch.tensor([SKY.token_ids + plain[:4]])).logits[0, -1].log_softmax(-1)
    assert found.regret_nats == pytest.approx(float(logprobs.max() - logprobs[other]), abs=1e-5)
    assert found.regret_nats > 0
    assert found.drafted_text == target.tokenizer.decode([other])
    assert measure(runtime, SKY, replace(params, temperature=0.01), baseline=True).difference.regret_nats is None


def test_token_texts_join_to_the_text_of_the_answer(target: Target) -> None:
    ids = target.tokenizer.encode("a ä€😀\ufffd<|end|> b", add_special_tokens=False)
    found = token_texts(target.tokenizer, ids)
    assert "".join(found) == "a ä€😀\ufffd<|end|> b" and len(found) == len(ids)
    assert found[2:7] == ["", "ä", "", "", "€"]
    assert "".join(token_texts(target.tokenizer, ids[:6])) == target.tokenizer.decode(ids[:6]), "cut in a character"


def test_regret_fits_at_the_last_token_of_the_context(target: Target, drafter: Drafter) -> None:
    runtime = EnginePair.load(target, drafter)
    runtime.make_room(len(SKY.token_ids) + 3)
    tokens = runtime.decode(SKY.token_ids, SamplingParams(max_tokens=9, ignore_eos=True), draft=True).tokens
    assert len(tokens) == 3
    assert runtime.regret(SKY.token_ids + tokens[:2], tokens[2]) == 0.0


def test_cache_size_follows_the_prompts_of_each_evaluation(target: Target, drafter: Drafter) -> None:
    runtime = EnginePair.load(target, drafter)
    for prompt, length in ((SKY, 4), (SETS["long"][1], 40)):
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        assert evaluate(runtime, {"s": [prompt]}, params).overall.drafted.tokens == length


@pytest.mark.parametrize("runtime", ["engine", "reference"])
def test_answers_with_sampled_drafts_are_not_compared(
    runtime: str, target_dir: Path, dflash2_dir: Path, tmp_path: Path
) -> None:
    command = [*command_of(target_dir, dflash2_dir, tmp_path), "--max-tokens", "12", "--dtype", "float32"]
    command += ["--draft-sample-method", "probabilistic", "--runtime", runtime]
    assert main([*command, "--temperature", "1.5"]) == 0
    report, page = load(tmp_path / "report"), (tmp_path / "report" / "report.html").read_text()
    assert (report["arguments"]["drafter_kind"], report["arguments"]["draft_sample_method"]) == (
        "dflash2",
        "probabilistic",
    )
    assert "(DFlash 2) drafting for" in page and "sampled drafts, temperature 1.5" in page
    assert report["overall"]["identical_to_plain"] is None and report["sets"]["a"]["differences"] == []
    target, drafter = Target.load(str(target_dir), "cpu", "float32"), load_drafter(str(dflash2_dir)).float()
    texts = ["Why is the sky blue?", "Count to ten."]
    prompts = [encode_chat(target.tokenizer, [{"role": "user", "content": text}]) for text in texts]
    answers = [
        generate(target, drafter, prompt, SamplingParams(temperature=1.5, max_tokens=12), "probabilistic")
        for prompt in prompts
    ]
    assert report["overall"]["accepted_lengths"] == list(Acceptance.of(answers, 8).accepted_lengths)
    assert main(command) == 0
    assert load(tmp_path / "report")["overall"]["identical_to_plain"] == 1.0, "at temperature 0 they are the plain ones"


@pytest.mark.parametrize(("runtime", "width"), [("reference", 8), ("engine", 8), ("engine", 1)])
def test_answers_with_draft_trees_equal_plain_answers(
    runtime: str, width: int, target_dir: Path, drafter_dir: Path, tmp_path: Path
) -> None:
    command = [*command_of(target_dir, drafter_dir, tmp_path), "--max-tokens", "12", "--dtype", "float32"]
    words = ["--runtime", runtime, "--no-draft-tree", "--draft-tree", "24"]
    words += [] if width == 8 else ["--draft-tree-width", str(width)]
    assert main([*command, *words]) == 0
    report, page = load(tmp_path / "report"), (tmp_path / "report" / "report.html").read_text()
    assert report["arguments"]["draft_tree_width"] == width, "the default is 8"
    kind = "chains" if width == 1 else "trees"
    assert report["arguments"]["draft_tree"] == 24 and f"drafting {kind} of 24 nodes for" in page
    assert report["overall"]["identical_to_plain"] == 1.0
    target, drafter = Target.load(str(target_dir), "cpu", "float32"), load_drafter(str(drafter_dir)).float()
    texts = ["Why is the sky blue?", "Count to ten."]
    prompts = [encode_chat(target.tokenizer, [{"role": "user", "content": text}]) for text in texts]
    how = "greedy", 24, width
    answers = [generate(target, drafter, prompt, SamplingParams(max_tokens=12), *how) for prompt in prompts]
    assert report["overall"]["accepted_lengths"] == list(Acceptance.of(answers, 8).accepted_lengths)
    (requests,) = (found["per_request"] for found in report["sets"].values())
    for answer, request in zip(answers, requests, strict=True):
        trees = [[dict(place) for place in step] for step in request["offered_per_step"]]
        if runtime == "reference":  # the engine calibrates while it decodes
            assert trees == [[dict(place) for place in step.offered] for step in answer.steps]
        drafted, committed = request["drafted_per_step"], request["committed_per_step"]
        assert [len(places) for places in trees] == [
            count if slots else 0 for count, slots in zip(committed, drafted, strict=True)
        ]
        texts_of = request["offered_texts"]
        assert {str(token) for places in trees for place in places for token in place} == set(texts_of)
        assert max(len(place) for places in trees for place in places) == (1 if width == 1 else 8)
        at = 1
        for places, accepted, count in zip(trees, request["accepted_per_step"], committed, strict=True):
            tokens = request["token_ids"][at : at + count]
            found = [token in place for token, place in zip(tokens, places, strict=False)]
            assert found == [True] * accepted + [False] * (len(found) - accepted)
            at += count
    assert re.search(r'<small><i title="drafted with [0-9.]+ %">', page) or width == 1
    said = "as the drafter computes it" if runtime == "reference" else "calibrated on accepted tokens"
    assert said in html.unescape(page) and "a chain would have missed it" in page
    assert main([*command, "--draft-tree", "24", "--no-draft-tree"]) == 0
    without = load(tmp_path / "report")
    assert without["arguments"]["draft_tree"] == 0
    assert (
        "offered_texts" not in json.dumps(without["sections"])
        and "<small>" not in (tmp_path / "report" / "report.html").read_text()
    )


@pytest.mark.parametrize("make", [EnginePair.load, ReferencePair])
def test_drafts_of_recurrent_targets_are_trees_by_default(make: Any) -> None:
    target = make_target("qwen3_5")
    drafter = make_drafter(target)
    assert make(target, drafter, draft_tree=8, draft_tree_width=2).facts["draft_tree_width"] == 2
    assert make(target, drafter, draft_tree=8).facts["draft_tree_width"] == WIDTH


def test_another_runtime_or_draft_method_is_measured_again(target: Target, drafter: Drafter, tmp_path: Path) -> None:
    partial = tmp_path / "partial.jsonl"
    engines = [EnginePair.load(target, drafter, draft_dtype=draft_dtype) for draft_dtype in ("auto", "fp8")]
    sampled = [make(target, drafter, draft_sample_method="probabilistic") for make in (EnginePair.load, ReferencePair)]
    trees = [ReferencePair(target, drafter, draft_tree=nodes) for nodes in (4, 8)]
    for runtime in (*engines, ReferencePair(target, drafter), *sampled, *trees):
        evaluate(runtime, {"s": [SKY]}, SamplingParams(max_tokens=4), partial=partial)
    assert len({json.loads(line)["key"] for line in partial.read_text().splitlines()}) == 7


def test_facts_identify_target_and_drafter(target: Target, drafter: Drafter) -> None:
    def facts(target: Target, drafter: Drafter) -> dict[str, Any]:
        ours, definition = EnginePair.load(target, drafter), ReferencePair(target, drafter)
        assert ours.facts == definition.facts
        return ours.facts

    untied = make_target(tied=False)
    first = facts(target, drafter)
    assert first == facts(target, drafter)
    assert first["target_sample_sha256"] != facts(untied, make_drafter(untied))["target_sample_sha256"]
    assert first["drafter_sha256"] != facts(target, make_drafter(target, layers=1))["drafter_sha256"]


@pytest.mark.gpu
def test_engines_on_a_gpu_agree_and_compute_regret() -> None:
    target, drafter = gpu_pair()
    runtime = EnginePair.load(target, drafter)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    report = evaluate(runtime, SETS, params)
    assert report.overall.identical_to_plain == 1.0
    assert all(step.drafted == 15 for m in report.sets["long"].measurements for step in m.drafted.steps[:40])
    assert report.overall.drafted.decode_s > 0 and report.overall.drafted.prefill_s > 0
    found = report.sets["long"].measurements[0].drafted.tokens
    ids, definition = SKY.token_ids + found[:5], ReferencePair(target, drafter)
    for other in (0, (found[5] + 1) % 4096):
        regret = runtime.regret(ids, other)
        assert regret == pytest.approx(definition.regret(ids, other), abs=0.06)
        assert regret > 0


# ---- refusals ----------------------------------------------------------------------------------------------


def test_unsupported_targets_suggest_the_reference(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = make_target(mlp_bias=True)
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    save_drafter(make_drafter(target), tmp_path / "drafter")
    command = [*command_of(tmp_path / "target", tmp_path / "drafter", tmp_path), "--max-tokens", "4"]
    capfd.readouterr()
    assert main([*command, "--runtime", "engine"]) == 2
    _, error = capfd.readouterr().err.splitlines()
    assert error.startswith("error: ") and "mlp_bias" in error and "--runtime reference" in error
    assert not (tmp_path / "report").exists()
    assert main([*command, "--runtime", "reference"]) == 0
    with pytest.raises(UserError, match="--runtime reference"):
        EnginePair.load(target, make_drafter(target))


@pytest.mark.parametrize("name", ["Qwen3.5 with images", "Phi"])
def test_auto_runtime_falls_back_to_the_reference(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = Architecture(name, "PhiConfig").target() if name == "Phi" else tiny(name)
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    save_drafter(make_drafter(target), tmp_path / "drafter")
    command = [*command_of(tmp_path / "target", tmp_path / "drafter", tmp_path), "--max-tokens", "12"]
    capfd.readouterr()
    assert main(command) == 0
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("using the reference")]
    report = load(tmp_path / "report")
    why = report["arguments"].get("refused_by_the_engine")
    if name == "Qwen3.5 with images":
        assert report["arguments"]["runtime"] == "engine" and not said and why is None
    else:
        assert report["arguments"]["runtime"] == "reference" and "not served by this engine" in why
        assert said == [f"using the reference, because the engine does not support this: {why}"]
        assert escape(why) in (tmp_path / "report" / "report.md").read_text()
    assert report["overall"]["identical_to_plain"] == 1.0


def test_engine_and_reference_agree_on_dflash2(target_dir: Path, dflash2_dir: Path, tmp_path: Path) -> None:
    command = [*command_of(target_dir, dflash2_dir, tmp_path), "--max-tokens", "12", "--dtype", "float32"]
    found = []
    for runtime in ("auto", "reference"):
        assert main([*command, "--runtime", runtime]) == 0
        found.append(load(tmp_path / "report"))
    ours, definition = found
    assert [report["arguments"]["runtime"] for report in found] == ["engine", "reference"]
    assert ours["overall"]["identical_to_plain"] == 1.0
    assert ours["overall"]["tau_pooled"] == definition["overall"]["tau_pooled"] > 1.0


def test_out_of_memory_suggests_options(target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: Any, **__: Any) -> int:
        raise UserError("GPU memory is 3.0 GiB short")

    monkeypatch.setattr("dflash_toolkit.runtime.engine.room_for_cache", short)
    with pytest.raises(UserError, match=r"24 tokens.*3\.0 GiB short.*lower max_tokens"):
        evaluate(EnginePair.load(target, drafter), {"s": [SKY]}, SamplingParams(max_tokens=4))
    with pytest.raises(UserError, match=r"3\.0 GiB short.*--draft-dtype full$"):
        evaluate(EnginePair.load(target, drafter, draft_dtype="fp8"), {"s": [SKY]}, SamplingParams(max_tokens=4))
