"""Drafters that have memorised their target's answers, to be broken and examined by `dflash-doctor`."""

import functools
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TEMPLATE, make_drafter, make_target
from safetensors.torch import load_file, save_file
from torch import Tensor

import dflash_toolkit.train.loop
from dflash_toolkit import Drafter, SamplingParams, Target, generate, save_drafter
from dflash_toolkit.data.prompts import Prompt, encode_chat
from dflash_toolkit.doctor.cli import main
from dflash_toolkit.doctor.examination import judge
from dflash_toolkit.doctor.files import Case
from dflash_toolkit.doctor.finding import Finding
from dflash_toolkit.fingerprint import template_digest
from dflash_toolkit.models.dflash.checkpoint import PROVENANCE_KEY
from dflash_toolkit.record import RECORD_KEY
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.responses.rows import Row
from dflash_toolkit.train.run.definition import Run
from dflash_toolkit.train.training_options import DrafterOptions, LossOptions, OptimOptions, RunOptions

Break = Callable[[Path], None]
BLOCK = 6
SHORT_TEXTS = ("Count to ten.", "What is 2+2?", "Hello!")
TEXTS = ("Why is the sky blue?", "Count to ten.", "Name a colour.")
ALL_TEXTS = ("--limit", str(len(TEXTS)))  # the default is one of them
TOKENS = 33  # so that the blocks of an answer are drafted at once
THINKING = TEMPLATE + "{% if add_generation_prompt and enable_thinking is defined and enable_thinking %}?{% endif %}"


def fit(
    target: Target, rows: list[Row], work: Path, steps: int = 100, anchors: int = 12, rate: float = 8e-3, **shape: Any
) -> Drafter:
    """A drafter trained on `rows` by the real loop."""
    shape = {"block_size": 6} | shape
    config = TrainConfig(
        target="tiny",
        drafter=DrafterOptions(block_size=shape["block_size"]),
        loss=LossOptions(anchors=anchors),
        optim=OptimOptions(steps=steps, batch_size=min(8, len(rows)), learning_rate=rate),
        run=RunOptions(feature_cache_gb=1, log_every=1000),
    )
    drafter = make_drafter(target, **shape).train()
    dflash_toolkit.train.loop.train(Run(config, target, drafter, rows, [], work, {}, lambda trained, export: None))
    return drafter.eval()


def write_target(target: Target, path: Path) -> str:
    target.model.save_pretrained(path)
    target.tokenizer.save_pretrained(path)
    return str(path)


def answered(target: Target, texts: Sequence[str] = TEXTS, tokens: int = TOKENS) -> list[Row]:
    rows = []
    for i, text in enumerate(texts):
        prompt = encode_chat(target.tokenizer, [{"role": "user", "content": text}])
        answer = generate(target, None, prompt, SamplingParams(max_tokens=tokens)).tokens
        assert len(answer) == tokens and len(set(answer)) > tokens // 2, "a long and varied answer"
        rows.append(Row(i, len(prompt), prompt + answer))
    return rows


class Clinic:
    """A target, a drafter that has memorised its answers, and `examine` to see a copy of it, broken or not."""

    def __init__(self, path: Path, target: Target, drafter: Drafter, provenance: dict[str, Any] | None = None) -> None:
        path.mkdir(exist_ok=True)
        self.path, self.target, self.healthy = path, write_target(target, path / "target"), path / "healthy"
        save_drafter(drafter, self.healthy, provenance)
        self.prompts = path / "prompts.jsonl"
        self.prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))

    def arguments(self, drafter: Path, *more: str) -> list[str]:
        return [
            "--target", self.target, "--drafter", str(drafter), "--device", "cpu", "--dtype", "float32",
            "--prompts", f"p={self.prompts}", "--limit", "1", "--max-tokens", str(TOKENS), *more,
        ]  # fmt: skip

    def examine(self, *more: str, break_it: Break | None = None) -> dict[str, list[dict[str, Any]]]:
        """The findings by severity; the exit code must agree with them."""
        broken, report = self.path / "broken", self.path / "report.json"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(self.healthy, broken)
        if break_it:
            break_it(broken)
        code = main(self.arguments(broken, "--output", str(report), *more))
        written = json.loads(report.read_text(), parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
        found: dict[str, list[dict[str, Any]]] = {"ok": [], "warning": [], "fault": []}
        for finding in written["findings"]:
            assert finding["measured"] and bool(finding["remedy"]) == (finding["severity"] != "ok")
            found[finding["severity"]].append(finding)
        assert code == int(written["fault"]) == int(bool(found["fault"]))
        return found


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Clinic:
    return _clinic(tmp_path_factory.getbasetemp() / "clinic")


@functools.cache  # shared by the test modules
def _clinic(path: Path) -> Clinic:
    target = make_target()  # first: a fast run ends here
    path.mkdir()
    drafter = fit(target, answered(target), path)
    answers = {"regenerate": True, "temperature": 0.0, "thinking": None}
    note = {"target": "tiny", "template_hash": template_digest(target.tokenizer), "answers": [answers]}
    return Clinic(path, target, drafter, note | {"acceptance_length": 5.5, "trained_block_size": 6})


def config(change: Callable[[dict[str, Any]], Any]) -> Break:
    def rewrite(path: Path) -> None:
        values = json.loads((path / "config.json").read_text())
        change(values)
        (path / "config.json").write_text(json.dumps(values))

    return rewrite


def edit(**changes: Any) -> Break:
    """Changes keys anywhere in config.json, except in the record of the export."""

    def walk(values: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, dict) and key != RECORD_KEY:
                walk(value)
            elif key in changes:
                values[key] = changes[key]

    return config(walk)


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Break:
    def rewrite(path: Path) -> None:
        held = load_file(path / "model.safetensors")
        change(held)
        save_file(held, path / "model.safetensors")

    return rewrite


@dataclass(slots=True)
class Patient:
    """A drafter that has memorised its target's answers, on disk with and without a record of its export."""

    target: Target
    drafter: Drafter
    path: Path

    @property
    def taps(self) -> list[int]:
        return list(self.drafter.config.target_layer_ids)

    def examine(
        self,
        break_it: Break | None = None,
        *,
        recorded: bool = True,
        texts: tuple[str, ...] = SHORT_TEXTS[:1],
        target: Target | None = None,
    ) -> dict[str, list[Finding]]:
        """The findings by severity of a copy, broken or not."""
        shutil.rmtree(copy := self.path / "copy", ignore_errors=True)
        shutil.copytree(self.path / "exported", copy)
        if not recorded:
            config(lambda values: values.pop(PROVENANCE_KEY))(copy)
        if break_it:
            break_it(copy)
        used = target or self.target
        case = Case.read(str(copy), used.config, used.tokenizer, None)
        prompts = [Prompt(text, ({"role": "user", "content": text},)) for text in texts]
        found: dict[str, list[Finding]] = {"ok": [], "warning": [], "fault": []}
        for finding in judge(case, prompts, lambda: used, TOKENS):
            assert finding.measured and bool(finding.remedy) == (finding.severity != "ok")
            found[finding.severity].append(finding)
        return found


def every(pattern: str, change: Callable[[Tensor], Tensor]) -> Break:
    """Changes every tensor with a matching name."""
    return tensors(lambda held: held.update({n: change(t) for n, t in held.items() if re.search(pattern, n)}))


def exchange(one: str, other: str) -> Break:
    def renamed(name: str) -> str:
        return name.replace(one, "?").replace(other, one).replace("?", other)

    return tensors(lambda held: held.update({renamed(name): tensor for name, tensor in held.items()}))


def named(findings: list[Finding]) -> set[str]:
    return {finding.check for finding in findings}
