"""scripts/bench/responses.py on tiny targets: rates by batch size, and a whole run."""

from pathlib import Path

import pytest
from programs import TRAINING, says, write
from tiny_shape import tiny_shape

from dflash_toolkit.files import read_json
from scripts.bench import responses as program

__all__ = ["tiny_shape"]  # a fixture
FEW = ["--batch", "2", "4", "--rounds", "2", "--tokens", "8", "--max-model-len", "128", "--device", "cpu"]


def test_rates_are_measured_by_mode_and_batch_size(tmp_path: Path) -> None:
    output = tmp_path / "rates.json"
    shape = ["rates", "--shape", "tiny", "--layers", "4", "--prompt-tokens", "4", "8"]
    assert program.main([*shape, *FEW, "--batch", "2", "--profile", "--output", str(output)]) == 0
    found = read_json(output)["rates"]
    assert [(each["mode"], each["batch"]) for each in found] == [("greedy", 2), ("sampled", 2), ("drafts", 2)]
    for each in found:
        assert each["responses"] == 4 and each["tokens"] >= 4 * 2 and each["tokens_per_second"] > 0
        assert each["profile"]


def test_rates_of_a_real_pair_are_measured(target_dir: Path, drafter_dir: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "p.jsonl", says(*(f"ask {i} of it" for i in range(9))))
    pair = ["rates", "--target", str(target_dir), "--drafter", str(drafter_dir), "--data", f"own={data}"]
    output = tmp_path / "rates.json"
    assert program.main([*pair, *FEW, "--output", str(output)]) == 0
    found = read_json(output)
    assert [each["batch"] for each in found["rates"]] == [2] * 3 + [4] * 3
    greedy, drafts = (
        {each["tokens"] for each in found["rates"] if each["mode"] == mode and each["batch"] == 4}
        for mode in ("greedy", "drafts")
    )
    assert greedy == drafts, "drafts change no response"
    assert str(tmp_path) not in str(found["command"])


def test_responses_benchmark_times_a_complete_run(
    target_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "p.jsonl", says(*(f"ask {i} of it" for i in range(12))))
    output, options = tmp_path / "whole.json", [word for word in TRAINING if not word.startswith("optim.steps")]
    asked = ["run", "--target", str(target_dir), "--data", f"own={data}", "--prompts", "10", "--minutes", "0.01"]
    assert program.main([*asked, "--output", str(output), *options]) == 0
    found = read_json(output)
    assert found["seconds"] > found["training_seconds"] > 0 and found["result"]["prompts"] == 8
    assert found["response_speed"]["tokens_per_second"] > 0
    assert any("responses" in line for _, line in found["timeline"])
    assert program.main([*asked, "--output", str(tmp_path / "b.json"), "optim.steps=1"]) == 2
    assert "dflash-train ended with 2" in capfd.readouterr().err
