"""scripts/peers/vllm_step.py without vllm: what it asks of it, and what it makes of what it measured."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace as Namespace

import pytest
from transformers import AutoConfig

from dflash_toolkit.models.dflash.checkpoint import read_config
from dflash_toolkit.models.quantized import FORM
from scripts.peers import vllm_step as program


def test_engine_options_have_shape_and_acceptance(tmp_path: Path) -> None:
    args = program.parse(["--output", "x.json", "--batch", "1", "4", "--accept", "0.5"])
    options = program.options_of(args, tmp_path, 3)
    drafts = options["speculative_config"]
    assert drafts["synthetic_acceptance_rates"] == [0.5, 0.25, 0.125], "each position given the earlier ones"
    assert drafts["num_speculative_tokens"] == 3 and options["max_num_seqs"] == 4
    target = AutoConfig.from_pretrained(options["model"])
    assert (target.num_hidden_layers, target.hidden_size, target.architectures) == (36, 4096, ["Qwen3ForCausalLM"])
    drafter = read_config(Path(drafts["model"]))
    assert (drafter.block_size, drafter.num_layers, drafter.hidden_size) == (4, 5, 4096)
    (tmp_path / "plain").mkdir()
    assert "speculative_config" not in program.options_of(args, tmp_path / "plain", 0)


def test_steps_of_measured_batches_are_captured(tmp_path: Path) -> None:
    args = program.parse(
        ["--output", "x.json", "--batch", "1", "5", "--kv-cache-gib", "2", "--no-compile", "--options", '{"seed": 7}']
    )
    options = program.for_batches(program.options_of(args, tmp_path, 3), args, 3)
    assert options["compilation_config"]["cudagraph_capture_sizes"] == [4, 8, 12, 16, 20]
    assert options["compilation_config"]["mode"] == 0 and options["kv_cache_memory_bytes"] == 2 << 30
    assert options["seed"] == 7


@pytest.mark.parametrize(
    ("shape", "architecture", "experts", "recurrent"),
    [
        ("qwen3-8b-fp8", "Qwen3ForCausalLM", False, False),
        ("gpt-oss-20b", "GptOssForCausalLM", True, False),
        ("gemma-4-31b", "Gemma4ForCausalLM", False, False),
        ("qwen3-30b-a3b", "Qwen3MoeForCausalLM", True, False),
        ("qwen3.8-27b-fp8", "Qwen3_5ForCausalLM", False, True),
        ("qwen3.6-35b-a3b-fp8", "Qwen3_5MoeForCausalLM", True, True),
    ],
)
def test_experts_and_delta_nets_use_triton(
    shape: str, architecture: str, experts: bool, recurrent: bool, tmp_path: Path
) -> None:
    args = program.parse(["--output", "x.json", "--shape", shape, "--no-compile"])
    options = program.options_of(args, tmp_path, 7)
    target = AutoConfig.from_pretrained(options["model"])
    assert target.architectures == [architecture]
    quantized = getattr(target, "quantization_config", {})
    assert (FORM.items() <= quantized.items()) == shape.endswith("-fp8") == ("modules_to_not_convert" in quantized)
    if quantized and recurrent:
        assert "model.layers.0.linear_attn.in_proj_b" in quantized["modules_to_not_convert"], "48 rows fill no block"
    assert (options.get("moe_backend") == "triton") == experts == ("worker_extension_cls" in options)
    assert ("additional_config" in options) == recurrent
    assert getattr(target, "mamba_ssm_dtype", None) == ("float32" if recurrent else None), "states as in checkpoints"
    assert options["compilation_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert read_config(Path(options["speculative_config"]["model"])).hidden_size == target.hidden_size


def test_run_is_timed_after_all_first_tokens() -> None:
    times = [Namespace(first_token_ts=first, last_token_ts=last) for first, last in ((1.0, 4.0), (2.5, 3.5))]
    assert program.decoding_s([Namespace(metrics=each) for each in times]) == 1.5


def test_figures_are_long_answers_minus_short_ones() -> None:
    short = [program.Run(seconds, 128, 10.0, 30.0) for seconds in (0.3, 0.2, 0.9)]
    long = [program.Run(seconds, 768, 110.0, 330.0) for seconds in (1.4, 1.2, 1.5)]
    found = program.figures(2, short, long)
    assert found["ms_per_step"] == pytest.approx(1e3 * (1.2 - 0.2) / 100), "the fastest of each"
    assert found["tokens_per_second"] == pytest.approx(640 / 1.0)
    assert found["tokens_per_step"] == pytest.approx(640 / 100 / 2)
    assert found["spread"] == pytest.approx(0.3 / 1.4) and found["tau_by_counters"] == pytest.approx(4.0)
    assert found["short_s"] == [0.3, 0.2, 0.9] and found["long_s"] == [1.4, 1.2, 1.5]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--accept", "1.0"], "--accept is 1.0"),
        (["--k", "-1"], "--k must be >= 0"),
        (["--short", "384"], "--short less than --long"),
        (["--repeats", "0"], "--repeats is 0; it must be >= 1"),
        (["--batch", "8", "0"], "--batch is 0; it must be >= 1"),
        (["--prompt", "8000"], "--prompt and --long are 8384 tokens; vllm is started for 8192"),
    ],
)
def test_invalid_options_are_rejected(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        program.parse(["--output", "x.json", *words])
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_missing_vllm_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("vllm"):
        pytest.skip("vllm is here")
    assert program.main(["--output", str(tmp_path / "x.json")]) == 2
    assert "vllm" in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert program.main(["--output", str(tmp_path / "no" / "x.json")]) == 2
