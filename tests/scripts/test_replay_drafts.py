"""scripts/bench/replay_drafts.py drafts and accepts what was recorded, in an engine of another shape."""

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_drafter, make_target
from paths import ROOT

from dflash_toolkit.runtime import EngineOptions, load_engine


def recorded(dice: torch.Generator, sure: float, answer: int, slots: int, best: int = 4) -> dict[str, Any]:
    """Returns a recorded answer; its tokens are among the drafts as often as their probabilities predict."""
    tokens = torch.randint(100, (5 + answer,), generator=dice)
    first = (sure + 0.15 * torch.randn(answer - 1, slots, generator=dice)).clamp(0.05, 0.95)
    p = torch.stack([first, *((1 - first) * 0.6 * 0.4**rank for rank in range(best - 1))], dim=-1)
    sampled = torch.multinomial(torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1).flatten(0, 1), 1, generator=dice)
    ids = 100 + torch.arange(best).expand(answer - 1, slots, best).clone()  # tokens that no answer has
    for i, rank in enumerate(sampled.flatten().tolist()):
        anchor, slot = divmod(i, slots)
        if rank < best and (at := 5 + 1 + anchor + slot) < len(tokens):
            ids[anchor, slot, rank] = tokens[at]
    return {"set": "made", "prompt": 5, "tokens": tokens.int(), "ids": ids.int(), "lp": p.log().half()}


WAYS: list[dict[str, Any]] = [{}, {"draft_tree": 15, "draft_tree_width": 1}, {"draft_tree": 20}]


@pytest.mark.parametrize("way", WAYS, ids=["blocks", "chains", "trees"])
def test_replay_commits_recorded_answers(way: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts/bench"))
    import replay_drafts as script

    dice, target = torch.Generator().manual_seed(0), make_target()
    made = [recorded(dice, 0.8, answer=30, slots=7) for _ in range(3)]
    options = EngineOptions(max_num_seqs=4, page_size=4, kv_cache_tokens=1200, num_speculative_tokens=7, **way)
    engine = load_engine(target, make_drafter(target), options=options)[0]
    trace = script.Trace(made, 7, engine.vocabulary, engine.runner.device)
    source = script.Requests(engine, trace, 6, seed=3)
    script.capture(engine, [3, 4])
    requests = [source.submit(answer) for answer in (0, 1, 2, trace.count)]
    while engine.step():
        pass
    for answer, request in zip((0, 1, 2, 0), requests, strict=True):
        text = made[answer]["tokens"][5:].tolist()
        assert request.tokens[1:] == text[1 : len(request.tokens)] and len(request.tokens) == 29
    steps = [request.generation.steps for request in requests]
    if not way:
        tokens, count = script.in_blocks(made, 8)
        assert tokens == 3 * 29 and count == sum(map(len, steps[:3]))
    assert max(map(len, steps[:3])) < 20 and len(steps[3]) == 28 and all(step.accepted == 0 for step in steps[3])


def test_failing_drafts_are_never_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts/bench"))
    import replay_drafts as script

    tokens, slots = torch.arange(40, 60), 3  # every token is followed by the next id
    at = torch.arange(19 - slots)[:, None] + torch.arange(slots)
    ids = torch.stack([tokens[at + 1] - 1, tokens[at + 1], tokens[at + 1] + 5], dim=-1)
    made: dict[str, Any] = {"tokens": tokens, "prompt": 0, "ids": ids, "lp": torch.zeros(ids.shape)}
    trace = script.Trace([made], slots, 100, torch.device("cpu"))
    truth = trace.truth[:, at + 1][..., None]
    assert (trace.ids[0] == truth[0]).any(-1).all() and not (trace.ids[1] == truth[1]).any()
    assert int(trace.ids.min()) >= 0 and int(trace.ids.max()) < 100


def test_rows_concatenate_answers_of_one_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts/bench"))
    import replay_drafts as script

    dice = torch.Generator().manual_seed(1)
    made: list[dict[str, Any]] = [
        {**recorded(dice, 0.8, answer=n, slots=3), "set": name} for name, n in (("a", 9), ("b", 11), ("a", 9))
    ]
    first, second = rows = sorted(script.in_rows(made, 11, seed=2), key=lambda row: str(row["set"]))
    assert [row["set"] for row in rows] == ["a", "b"] and all(len(row["tokens"]) == 11 for row in rows)
    assert all(row["ids"].shape[:2] == row["lp"].shape[:2] == (10, 3) for row in rows)
    texts = [each["tokens"][each["prompt"] :].tolist() for each in made]
    begins = 0 if first["tokens"].tolist()[:9] == texts[0] else 2
    assert first["tokens"].tolist() == (texts[begins] + texts[2 - begins])[:11]
    seam = 8  # the last token of the answer that comes first
    assert (first["ids"][seam] == -1).all() and (first["ids"][:seam] == made[begins]["ids"]).all()
    assert (first["ids"][seam + 1] == made[2 - begins]["ids"][0]).all()
    assert second["ids"].tolist() == made[1]["ids"][:10].tolist()
    trace = script.Trace(rows, 3, 100, torch.device("cpu"))
    assert int(trace.ids.min()) >= 0 and int(trace.ids.max()) < 100
    assert script.in_rows(made, 40, seed=0) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_every_replay_mode_decodes_the_same_rows(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts/bench"))
    import replay_drafts as script

    dice, target = torch.Generator().manual_seed(0), make_target()
    made = [recorded(dice, 0.8, answer=30, slots=7) for _ in range(3)]
    options = EngineOptions(max_num_seqs=2, page_size=4, kv_cache_tokens=1200, num_speculative_tokens=7)
    engine = load_engine(target, make_drafter(target), options=options)[0]
    trace = script.Trace(made, 7, engine.vocabulary, engine.runner.device)
    source = script.Requests(engine, trace, 6, seed=3)
    answers = itertools.cycle(range(3))
    found = source.load(2, failing, 3, answers)
    assert next(answers) == 0 and engine.scheduler.idle, "three rounds of two, and no request is left"
    both = [found["of_each"], found.get("of_each_failing", found["of_each"])]
    assert found["tokens_per_second"] == pytest.approx(sum(both))
    # at most all tokens of the two after their first ones, and one token per step of the failing one
    assert 3 * 28 <= found["tokens_per_second"] * found["seconds"] <= 3 * 2 * 29
    assert both[1] < both[0] / 2 if failing else "of_each_failing" not in found


def test_recorded_drafts_are_the_drafters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target_dir: Path, drafter_dir: Path
) -> None:
    """Its best tokens after an anchor are those that it drafts there."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts/bench"))
    import record_drafts as script

    from dflash_toolkit import SamplingParams, Target, generate, load_drafter
    from dflash_toolkit.decode import _context_kv, propose

    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Why is the sky blue?"}\n')
    words = ["--target", str(target_dir), "--drafter", str(drafter_dir), "--output", str(tmp_path / "trace.pt")]
    more = ["--max-tokens", "12", "--best", "3", "--dtype", "float32", "--batch", "1", "--max-model-len", "256"]
    monkeypatch.setattr(sys, "argv", ["record_drafts.py", *words, *more, "--prompts", f"sky={tmp_path}/prompts.jsonl"])
    assert script.main() == 0
    (found,) = torch.load(tmp_path / "trace.pt")
    target, drafter = Target.load(str(target_dir), "cpu", "float32"), load_drafter(str(drafter_dir)).float()
    tokens, prompt = found["tokens"].tolist(), found["prompt"]
    assert tokens[prompt:] == generate(target, None, tokens[:prompt], SamplingParams(max_tokens=12)).tokens
    assert found["ids"].shape == found["lp"].shape == (len(tokens) - prompt - 1, drafter.config.block_size - 1, 3)
    for at in (0, 4):
        end = prompt + at
        ids = torch.tensor([tokens[:end]])
        with torch.inference_mode():
            features = target.forward(ids, taps=drafter.config.target_layer_ids).features
            context = _context_kv(drafter, features, 0, end)
            assert propose(target, drafter, context, tokens[end], end) == found["ids"][at, :, 0].tolist()
