"""The estimate of a run: near what was measured, without weights, and printed before anything runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from programs import Program
from transformers import FalconConfig, FineGrainedFP8Config, GPT2Config, PreTrainedConfig

from dflash_toolkit.config import UserError
from dflash_toolkit.preflight import GIB
from dflash_toolkit.roofline import SHEETS
from dflash_toolkit.train.cli import main
from dflash_toolkit.train.config import configure
from dflash_toolkit.train.prompts.dataset import DEFAULT, ROWS
from dflash_toolkit.train.responses import generate
from dflash_toolkit.train.run.estimate import announced, estimate, within_an_hour
from dflash_toolkit.train.run.rates import H100, H200, PROMPT_TOKENS, RESPONSE_TOKENS, Machine
from dflash_toolkit.train.run.target_weights import Weights
from scripts.shapes import named_shape

# The Qwen3-8B shape with 4 rows of 2048 tokens and 512 blocks each: scripts/results/training-rate.json
MEASURED = {
    "target": "qwen3-8b",
    "drafter": {"kind": "dflash"},
    "optim": {"batch_size": 4, "steps": 100},
    "loss": {"anchors": 512},
}


def of(values: dict, name: str = "qwen3-8b", machine: Machine = H200, **options: object):  # type: ignore[no-untyped-def, type-arg]
    return estimate(configure({"target": name} | values), named_shape(name), machine, linear_attention=True, **options)


def test_weights_are_counted_without_storage() -> None:
    dense, quantized = (Weights.of_target(named_shape(name)) for name in ("qwen3-8b", "qwen3.8-27b-fp8"))
    assert dense.dense + dense.embedding == pytest.approx(8.19e9, rel=0.01)
    assert quantized.nbytes == pytest.approx(29.4e9, rel=0.05) and quantized.state_bytes == 144 * 2**20
    loaded = named_shape("qwen3.8-27b-fp8")
    loaded.quantization_config = FineGrainedFP8Config()  # as transformers leaves it after loading
    assert Weights.of_target(loaded) == quantized
    experts = Weights.of_target(named_shape("qwen3-30b-a3b"))
    assert experts.dense + experts.embedding + experts.experts == pytest.approx(30.5e9, rel=0.01)
    assert experts.active == pytest.approx(2.7e9, rel=0.1)
    assert Weights.of_target(ARCHITECTURES["Gemma 4 26B-A4B"].config()).used == 3 / 6


@pytest.mark.parametrize(("optimizer", "step_s", "gib"), [("muon", 0.691, 48.6), ("adamw", 0.500, 52.5)])
def test_estimated_step_time_is_near_the_measured_one(optimizer: str, step_s: float, gib: float) -> None:
    optim = MEASURED["optim"] | {"optimizer": optimizer}  # type: ignore[operator]
    found = of(MEASURED | {"optim": optim, "responses": {"max_tokens": 2048}}, thinking=True)
    assert found.row_tokens == 1950  # nearly the 2048 that were measured
    assert found.seconds["training"] / found.steps == pytest.approx(step_s, rel=0.2)
    assert found.memory / GIB == pytest.approx(gib, rel=0.1)


def test_measured_rates_are_used_for_their_shapes_only() -> None:
    at_32 = of({"responses": {"batch_size": 32}})
    assert "measured" in at_32.response_rate.how and "measured" in at_32.feature_rate.how
    assert "at 256 requests" in of({}).response_rate.how, "the default on a GPU"
    other = of({}, "qwen3-14b")
    assert "computed" in other.response_rate.how and "computed" in other.feature_rate.how
    assert "computed" in of({"responses": {"batch_size": 48}}).response_rate.how


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3.8-27b-fp8", "qwen3.6-35b-a3b-fp8"])
@pytest.mark.parametrize("machine", [H100, H200])
def test_computed_response_rates_are_near_measured_ones(name: str, machine: Machine) -> None:
    measured = of({}, name, machine).response_rate.tokens_per_second
    unknown = replace(machine, name="another")
    computed = of({}, name, unknown).response_rate
    assert "computed" in computed.how and computed.tokens_per_second == pytest.approx(measured, rel=0.35)


@pytest.mark.parametrize(("optimizer", "slower"), [("muon", 989 / 165.2), ("adamw", 4.53 / 0.9072)])
def test_a_training_step_follows_the_rates_of_the_gpu(optimizer: str, slower: float) -> None:
    slow_gpu = replace(Machine.of(SHEETS["RTX 4090"]), memory_gib=H200.memory_gib)  # with less, passes would be smaller
    fast, slow = (of({"optim": {"optimizer": optimizer}}, machine=each) for each in (H200, slow_gpu))
    ratio = slow.seconds["training"] / fast.seconds["training"]
    assert min(slower, 989 / 165.2) - 0.01 <= ratio <= max(slower, 989 / 165.2) + 0.01
    assert slow.response_rate.tokens_per_second < fast.response_rate.tokens_per_second / 4


def test_transformers_writes_slower_with_less_bandwidth() -> None:
    config = ARCHITECTURES["Llama"].config(mlp_bias=True)  # which our engine does not compute
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "head_dim": 1024}
    for key, size in sizes.items():
        setattr(config, key, size)
    asked = configure({"target": "t", "responses": {"runtime": "reference"}})
    rates = [estimate(asked, config, each).response_rate for each in (H200, Machine.of(SHEETS["L4"]))]
    assert all("transformers" in rate.how for rate in rates)
    assert rates[1].tokens_per_second < rates[0].tokens_per_second / 2


def test_the_host_bounds_responses_of_a_small_target() -> None:
    rate = of({}, "qwen2.5-0.5b").response_rate
    assert 25_000 < rate.tokens_per_second < 33_000 and "host" in rate.how


def test_stages_scale_with_prompts_samples_and_epochs() -> None:
    one = of({})
    half = of({"prompts": {"max_prompts": 50000}})
    assert half.hours("responses", "features", "training") == pytest.approx(
        one.hours("responses", "features", "training") / 2, rel=0.01
    )
    assert of({"optim": {"epochs": 6}}).seconds["training"] == pytest.approx(2 * one.seconds["training"], rel=0.01)
    assert of({"responses": {"samples": 4}}).seconds["responses"] == pytest.approx(2 * one.seconds["responses"])
    assert of({"optim": {"minutes": 30}}).hours("features", "training") == pytest.approx(0.5, rel=0.01)
    assert of({"run": {"features": "disk"}}).seconds["features"] == pytest.approx(one.seconds["features"] / 3, rel=0.01)
    assert of({}, world=4).seconds["responses"] == pytest.approx(one.seconds["responses"] / 4)


def test_the_last_hidden_states_of_dspine_are_counted() -> None:
    stored = {"run": {"features": "disk"}}
    plain, dspine = (of(stored | {"drafter": {"kind": kind}}) for kind in ("dflash", "dspine"))
    states = plain.prompts * plain.samples * plain.row_tokens * 4096 * 2
    assert dspine.last_states == states and plain.last_states == 0
    assert dspine.disk - plain.disk == pytest.approx(states, rel=0.02)
    assert any("for the target's last hidden states, if all are kept" in row[1] for row in dspine.table())


def test_attention_to_long_rows_takes_time_unless_layers_have_windows() -> None:
    packs = {"optim": {"pack_tokens": 32768}}
    short, long = of(packs), of({"prompts": {"join_to": 32768}} | packs)
    windows = of({"prompts": {"join_to": 32768}, "drafter": {"layer_types": ["sliding_attention"]}} | packs)
    assert long.seconds["training"] > 1.2 * windows.seconds["training"] > 1.2 * short.seconds["training"]
    assert long.seconds["responses"] == short.seconds["responses"]


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3.8-27b-fp8"])
def test_the_shorter_command_takes_about_an_hour(name: str) -> None:
    (option,) = within_an_hour(configure({"target": name}), of({}, name))
    prompts = int(option.removeprefix("prompts.max_prompts="))
    shorter = of({"prompts": {"max_prompts": prompts}}, name)
    assert 2700 < shorter.total <= 3600 and not within_an_hour(configure({"target": name}), shorter)


def test_a_run_too_large_for_the_gpu_is_marked() -> None:
    assert of({}).fits and not of({}, "qwen3.8-27b-fp8", H100).fits
    assert "TOO MUCH" in str(of({}, "qwen3.8-27b-fp8", H100).table())


def test_estimated_lengths_come_from_written_rows(tmp_path: Path) -> None:
    assumed = of({}, work=tmp_path)
    assert assumed.assumed and assumed.response_tokens == RESPONSE_TOKENS
    assert assumed.row_tokens == RESPONSE_TOKENS + PROMPT_TOKENS
    row = json.dumps({"tokens": [1] * 300, "spans": [[50, 250]]})
    (tmp_path / "answers.0.jsonl").write_text(f"{row}\n{row}\n{{torn")
    found = of({}, work=tmp_path)
    assert not found.assumed and (found.response_tokens, found.row_tokens) == (200, 300)


def test_estimates_count_the_prompts_of_local_files(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' * 70)
    assert of({"data": [str(path)]}).prompts == 70
    assert of({"data": [f"{path}[10:30]"]}).prompts == 20
    assert of({"data": [str(path), "org/dataset"]}).prompts == 100_000
    assert of({"prompts": {"max_prompts": 0}}).prompts == ROWS


def test_estimate_prints_a_table_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named_shape("qwen3-8b").save_pretrained(tmp_path / "target")  # a configuration alone
    words = ["--target", str(tmp_path / "target"), "--output", str(tmp_path / "out"), "--estimate"]
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(words) == 0
    out = capsys.readouterr().out
    for said in (
        "1 x H100",
        "100,000 prompts x 2",
        "36,622 steps",
        "no GPU was found",
        "tokens per step",
        "an hour more",
    ):
        assert said in out
    assert f"about an hour: dflash-train --target {tmp_path / 'target'}" in out
    assert "--estimate" not in out and not (tmp_path / "out").exists()
    assert "cost" not in out and main([*words, "--estimate-price", "2.5"]) == 0
    assert "2.5 for each GPU hour" in capsys.readouterr().out


def test_the_estimated_cost_is_of_all_gpus() -> None:
    found = of({"estimate": True, "estimate_price": 2.5}, world=4)
    (cost,) = (amount for what, amount, _ in found.table() if what == "cost")
    assert float(cost) == pytest.approx(4 * 2.5 * found.total / 3600, abs=0.01)
    with pytest.raises(UserError, match=r"estimate_price is -1.0; it must be >= 0"):
        configure({"target": "t", "estimate": True, "estimate_price": -1.0})


@pytest.mark.parametrize("card", ["RTX 3090", "RTX 4090", "RTX 5090", "L4"])
def test_hours_follow_the_rates_of_the_card(card: str) -> None:
    config = configure({"target": "qwen3-4b", "estimate": True, "estimate_gpu": card})
    found, large = estimate(config, named_shape("qwen3-4b")), of({}, "qwen3-4b", H100)
    slower = H100.tflops / SHEETS[card].bf16_tflops
    assert found.machine.name == card and found.fits and "optim.splits=" in found.passes and not large.passes
    assert slower < found.hours("training") / large.hours("training") < 1.25 * slower, "contexts are computed again"
    assert found.hours("features") / large.hours("features") == pytest.approx(slower)
    reads = H100.read_tb_s / SHEETS[card].read_tb_s
    assert found.hours("responses") > reads * large.hours("responses"), "fewer responses are written at a time"


def test_the_estimate_for_an_unknown_gpu_is_refused() -> None:
    config = configure({"target": "t", "estimate": True, "estimate_gpu": "RTX 9999"})
    with pytest.raises(UserError, match=r"estimate_gpu 'RTX 9999' is not known; known: RTX 3090, .*H200"):
        estimate(config, named_shape("qwen3-4b"))
    with pytest.raises(UserError, match=r"estimate_gpu is RTX 4090, but it has no effect without --estimate"):
        configure({"target": "t", "estimate_gpu": "RTX 4090"})
    with pytest.raises(UserError, match=r"estimate_price is 2.5, but it has no effect without --estimate"):
        configure({"target": "t", "estimate_price": 2.5})


def test_the_estimate_says_what_helps_if_memory_is_too_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named_shape("qwen3-8b").save_pretrained(tmp_path)
    words = ["--target", str(tmp_path), "--estimate", "--estimate-gpu", "RTX 4090"]
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 x RTX 4090" in said and "TOO MUCH" in said
    assert "GPU memory: any of these is enough: run.features=disk prompts.held_out=0 (12.9 GiB less)" in said
    assert main([*words, "run.features=disk", "prompts.held_out=0"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "TOO MUCH" not in said and "run.offload_target=true" in said


def test_a_run_prints_its_estimate_before_responses(dflash_train: Program) -> None:
    said = "".join(dflash_train())
    assert said.index("estimate for 1 x this CPU: ") < said.index("responses") and "prompts x 1: " in said
    assert "GPU memory" not in said
    assert DEFAULT not in said, "prompts come from a file"
    assert "estimate for" not in "".join(dflash_train("optim.steps=30")), "responses are there already"


@pytest.mark.parametrize("config", [GPT2Config(), FalconConfig()], ids=lambda config: config.model_type)
def test_a_target_with_other_names_can_be_estimated(config: PreTrainedConfig) -> None:
    found = estimate(configure({"target": "t"}), config, H100)
    assert found.fits and found.total > 0 and Weights.of_target(config).dense > Weights.of_target(config).embedding


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_supported_target_can_be_estimated(name: str) -> None:
    config = ARCHITECTURES[name].config().get_text_config(decoder=True)
    found = estimate(configure({"target": "t", "drafter": {"taps": 2}}), config, H100, linear_attention=True)
    assert found.total > 0 and found.memory > 0


def test_the_estimate_is_corrected_with_the_measured_rate(
    dflash_train: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = of({}, measured=1000.0)
    assert found.response_rate.words == "1,000 tokens/s"
    assert found.seconds["responses"] == pytest.approx(found.responses * found.response_tokens / 1000)
    monkeypatch.setattr(generate, "PACE_S", 0.0)
    said = dflash_train()
    estimates = [i for i, line in enumerate(said) if line.startswith("estimate for 1 x this CPU: ")]
    assert len(estimates) == 2 and "tokens/s (measured in this run)" in said[estimates[1] + 1]


def test_a_long_run_names_a_shorter_command_before_responses(tmp_path: Path) -> None:
    named_shape("qwen3-8b").save_pretrained(tmp_path)
    lines = announced(configure({"target": str(tmp_path)}), 1)
    assert lines[-1].startswith("for about an hour add prompts.max_prompts=")
    assert "100,000 prompts x 2: 200,000 responses of about" in lines[1] and "tokens/s" in lines[1]
