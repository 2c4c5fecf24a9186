"""dflash-eval --protocol: settings by name, and the comparison with published figures."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_toolkit.evaluation import protocols
from dflash_toolkit.evaluation.cli import EvalConfig, main


def config(**given: Any) -> EvalConfig:
    return EvalConfig(target="t", drafter="d", **given)


def test_protocols_set_prompts_and_sampling() -> None:
    made = config(protocol="vllm")
    assert made.sets.prompts == ("mt_bench", "humaneval", "gsm8k") and made.sets.limit == 200
    sampling = made.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.thinking) == (2048, (0.0,), (False,))
    few = config(protocol="paper", sets=replace(made.sets, prompts=("gsm8k=f.jsonl",), limit=10))
    assert few.sets.prompts == ("gsm8k=f.jsonl",) and few.sets.limit == 10, "a part of it, which is then said"


@pytest.mark.parametrize(("name", "value"), [("max_tokens", 100), ("temperature", (1.0,)), ("thinking", (True,))])
def test_protocols_refuse_other_settings(name: str, value: Any) -> None:
    sampling = replace(config(protocol="vllm").sampling, **{"max_tokens": 512, "thinking": (), name: value})
    with pytest.raises(ValueError, match=f"{name} is given with protocol"):
        config(protocol="vllm", sampling=sampling)


def test_our_figures_are_compared_with_published_ones(
    target_dir: Path,
    drafter_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = replace(protocols.PROTOCOLS["vllm"], max_tokens=12, published={"dflash": {"gsm8k": 1.0, "mt_bench": 9.0}})
    monkeypatch.setitem(protocols.PROTOCOLS, "vllm", short)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"question": "What is 2+2?", "turns": ["Why?", "Why not?"]}) + "\n")
    asked = [
        "--target",
        str(target_dir),
        "--drafter",
        str(drafter_dir),
        "--no-baseline",
        "--output",
        str(tmp_path / "r"),
    ]
    assert main([*asked, "--protocol", "vllm", "--prompts", f"gsm8k={prompts}", f"mt_bench={prompts}"]) == 0
    said = capsys.readouterr().out
    report = json.loads((tmp_path / "r/report.json").read_text())
    ours = report["sections"][0]["sets"]["gsm8k"]["tau_mean"]
    (gsm8k,) = (line for line in said.splitlines() if line.split()[:1] == ["gsm8k"] and "0.95: " in line)
    assert f"{ours:.2f}" in gsm8k and f"{100 * ours:.1f} %" in gsm8k and "0.95: yes" in gsm8k
    (mt_bench,) = (line for line in said.splitlines() if "8.55: no" in line)
    assert "9.00" in mt_bench
    assert f"The target is {target_dir}, the published one is Qwen/Qwen3-8B." in said
    assert f"Blocks have {report['arguments']['block_size']} tokens, the published ones 17." in said
    assert report["arguments"]["protocol"] == "vllm" and report["arguments"]["max_tokens"] == 12
