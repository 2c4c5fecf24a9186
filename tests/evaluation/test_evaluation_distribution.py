"""The two-sample test of sampled answers: its error rate, and its power for a wrong sampler."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reports import load, write_prompts

from dflash_toolkit import Drafter, SamplingParams, Target
from dflash_toolkit.evaluation import EncodedPrompt, EnginePair, ReferencePair
from dflash_toolkit.evaluation.cli import main
from dflash_toolkit.evaluation.measure.distribution import distribution_test, two_samples

PROMPTS = [EncodedPrompt("a", [65, 66]), EncodedPrompt("b", [70])]


def texts(rng: np.random.Generator, samples: int, often: float) -> list[list[int]]:
    """Returns answers of four tokens from three; one has a given probability and repeats more often."""
    first = rng.choice(3, (samples, 4), p=[often, (1 - often) / 2, (1 - often) / 2])
    again = rng.random((samples, 4)) < 0.3
    again[:, 0] = False
    for place in range(1, 4):
        first[:, place] = np.where(again[:, place], first[:, place - 1], first[:, place])
    return first.tolist()


@pytest.mark.slow
def test_distribution_test_has_its_error_rate_and_power() -> None:
    equal, other = [], []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        drafted = [texts(rng, 20, 0.5) for _ in range(2)]
        equal.append(two_samples(drafted, [texts(rng, 20, 0.5) for _ in range(2)])[1])
        other.append(two_samples(drafted, [texts(rng, 20, 0.85) for _ in range(2)])[1])
    assert np.mean(np.array(equal) < 0.1) < 0.2 and 0.4 < np.mean(equal) < 0.6
    assert np.mean(np.array(other) < 0.01) > 0.9


def test_equal_answers_are_not_suspicious() -> None:
    answers = [[[1, 2], [1], [3, 4]]]
    assert two_samples(answers, answers) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("make", "method"),
    [(EnginePair.load, "greedy"), (EnginePair.load, "probabilistic"), (ReferencePair, "probabilistic")],
)
def test_distribution_test_detects_a_wrong_sampler(
    target: Target, drafter: Drafter, make: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make(target, drafter, draft_sample_method=method)
    params = SamplingParams(temperature=0.3, top_k=4, max_tokens=4, ignore_eos=True, seed=0)
    found = distribution_test(pair, PROMPTS, params, 12)
    assert found["p_value"] > 0.05 and (found["prompts"], found["samples"]) == (2, 12)
    if method == "greedy":
        right = pair.decode

        def wrong(ids: list[int], params: SamplingParams, *, draft: bool, **more: Any) -> Any:
            """Always takes the most probable token."""
            given = SamplingParams(max_tokens=params.max_tokens, ignore_eos=True) if draft else params
            return right(ids, given, draft=draft, **more)

        monkeypatch.setattr(pair, "decode", wrong)
        assert distribution_test(pair, PROMPTS, params, 12)["p_value"] < 0.01


def test_distribution_test_uses_the_first_nonzero_temperature(
    target_dir: Path, drafter_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "few.jsonl", "Hi", "Ho")
    command = ["--target", target_dir, "--drafter", drafter_dir, "--device", "cpu", "--max-tokens", 3]
    command += ["--prompts", prompts, "--output", tmp_path / "report", "--distribution-samples", 3, "--no-baseline"]
    words = [str(word) for word in command]
    assert main(words) == 2
    assert "distribution-samples is 3" in capsys.readouterr().err
    assert main([*words, "--temperature", "0", "0.7", "1"]) == 0
    found = load(tmp_path / "report")["distribution_test"]
    assert (found["temperature"], found["prompts"], found["samples"]) == (0.7, 2, 3)
    assert 0 < found["p_value"] <= 1
