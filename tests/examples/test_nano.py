"""examples/nano_dflash.py writes what the engine writes, without a line of ours."""

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EOS, make_drafter, make_target
from paths import ROOT

from dflash_toolkit import SamplingParams, save_drafter
from dflash_toolkit.runtime import load_engine

NANO = ROOT / "examples/nano_dflash.py"
PROMPTS = [[5, 17, 42, 8], [1] * 3 + list(range(60, 97)), [200], list(range(2, 19))]  # lengths: one page, of several


@pytest.fixture
def nano(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(NANO.parent))
    import nano_dflash

    yield nano_dflash
    sys.modules.pop("nano_dflash")


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_nano_writes_the_engine_s_tokens_and_steps(kind: str, nano: Any, tmp_path: Path) -> None:
    target = make_target(kind, tied=kind == "llama")
    drafter = make_drafter(target)
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    save_drafter(drafter, tmp_path / "drafter")
    engine, _ = load_engine(str(tmp_path / "target"), str(tmp_path / "drafter"), "cpu")
    expected = engine.generate(PROMPTS, SamplingParams(max_tokens=40))
    found = nano.generate(*nano.load(str(tmp_path / "target"), str(tmp_path / "drafter")), PROMPTS, 40, {EOS})
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.answer == theirs.tokens
        assert sum(ours.steps) == len(ours.answer) - 1


def test_nano_drafts_the_block_that_the_definition_drafts(nano: Any, tmp_path: Path) -> None:
    from dflash_toolkit.decode import propose

    target = make_target("qwen3")
    drafter = make_drafter(target)
    target.model.save_pretrained(tmp_path / "target")
    save_drafter(drafter, tmp_path / "drafter")
    small, small_drafter = nano.load(str(tmp_path / "target"), str(tmp_path / "drafter"))
    prompt, request = PROMPTS[1], nano.Request(PROMPTS[1])
    with torch.inference_mode():
        (chosen,), (features,) = small.forward([request], [prompt], small_drafter.taps)
        nano.accept(small_drafter, request, chosen[-1:], features, len(prompt))
        from dflash_toolkit import load_drafter

        definition = load_drafter(str(tmp_path / "drafter"), dtype=torch.float32)
        tapped = target.forward(torch.tensor([prompt]), taps=definition.config.target_layer_ids).features
        assert tapped is not None
        torch.testing.assert_close(features, tapped[0], rtol=1e-4, atol=1e-4)
        context = definition.context_kv(tapped, torch.arange(len(prompt))[None])
        expected = propose(target, definition, context, chosen[-1], len(prompt))
        assert small_drafter.propose(request, chosen[-1]) == expected


def test_right_drafts_are_accepted_and_pages_come_back(nano: Any, tmp_path: Path, monkeypatch: Any) -> None:
    target = make_target()
    target.model.save_pretrained(tmp_path / "target")
    save_drafter(make_drafter(target), tmp_path / "drafter")
    small, drafter = nano.load(str(tmp_path / "target"), str(tmp_path / "drafter"))
    pages = len(small.cache.free), len(drafter.cache.free)
    plain = nano.generate(small, drafter, PROMPTS, 30)
    truth = [request.prompt + request.answer for request in plain]

    def knows(request: Any, last: int) -> list[int]:  # right up to every fifth token
        text = next(each for each in truth if each[: len(request.prompt)] == request.prompt)
        draft = text[request.length + 1 : request.length + drafter.block_size]
        return [(token + 1) % 256 if (request.length + i) % 5 == 0 else token for i, token in enumerate(draft)]

    monkeypatch.setattr(drafter, "propose", knows)
    drafted = nano.generate(small, drafter, PROMPTS, 30)
    assert [r.answer for r in drafted] == [r.answer for r in plain]
    assert all(len(r.steps) < 10 and max(r.steps) == 5 for r in drafted)
    assert (len(small.cache.free), len(drafter.cache.free)) == pages


def test_nano_imports_nothing_of_the_toolkit() -> None:
    imported = [node for node in ast.walk(ast.parse(NANO.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", None) or node.names[0].name for node in imported}
    assert not any(name.startswith("dflash_toolkit") for name in names)
    assert len(NANO.read_text().splitlines()) <= 380
