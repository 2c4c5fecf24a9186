"""From checkpoint files to fused weights, and what is refused on the way; step times and the choice of a block."""

import json
import random
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_drafter, make_target
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dflash_toolkit import Drafter, SamplingParams, Target, UserError, generate
from dflash_toolkit.runtime import Engine, EngineOptions, SyntheticAcceptance, load_engine, speed
from dflash_toolkit.runtime.model import ModelSpec, TargetWeights
from dflash_toolkit.runtime.request import RollingAcceptance
from dflash_toolkit.runtime.shapes import SHAPES, drafter_for, named_shape, random_drafter, random_target
from dflash_toolkit.runtime.speed import BlockChooser, block_sizes, cached_times, expected_tokens

OPTIONS = EngineOptions(max_batch=2, cache_tokens=1200, page_size=4, block_size=8)
CPU = torch.device("cpu")


def test_an_engine_from_names_writes_what_the_modules_write(
    target_dir: Path, drafter_dir: Path, target: Target, drafter: Drafter
) -> None:
    engine, tokenizer = load_engine(str(target_dir), str(drafter_dir), "cpu", options=OPTIONS)
    params = SamplingParams(max_new_tokens=30)
    assert engine.generate([[1, 2, 3]], params)[0].tokens == generate(target, drafter, [1, 2, 3], params).tokens
    assert len(tokenizer) == len(target.tokenizer)


def test_a_chunk_may_fill_every_page_of_a_request(target: Target, drafter: Drafter) -> None:
    """The largest one that memory is measured with does, beyond the context; rope has to reach as far."""
    runner = Engine.of_modules(target, drafter, replace(OPTIONS, page_size=64, max_context=70)).runner
    positions = runner.pages_per_request * 64
    assert positions > 70 + 2 * 8
    runner.prefill_eagerly([1] * positions, 0, [1] * runner.pages_per_request)


def test_an_engine_starts_without_importing_the_networks_of_transformers(target_dir: Path, drafter_dir: Path) -> None:
    """They take as long to import as an 8B target takes to load."""
    program = (
        "import sys; from dflash_toolkit.runtime import EngineOptions, load_engine; "
        "load_engine(sys.argv[1], sys.argv[2], 'cpu', options=EngineOptions(max_batch=1, block_size=4)); "
        "print(*(f'transformers.{name}' in sys.modules for name in ('configuration_utils', 'modeling_utils')))"
    )
    words = [sys.executable, "-c", program, str(target_dir), str(drafter_dir)]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert found.split() == ["True", "False"]


ROPES = {
    "default": {}, "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_rope_frequencies_are_those_of_transformers(kind: str, config: Any) -> None:
    rope = {"rope_type": kind, "rope_theta": 5e5, "original_max_position_embeddings": 4096} | ROPES[kind]
    spec = ModelSpec.of_target(config(rope_parameters=rope, max_position_embeddings=16384))
    theirs = LlamaRotaryEmbedding(config(rope_parameters=rope, max_position_embeddings=16384))
    assert spec.rope_frequencies == tuple(theirs.inv_freq.double().tolist())
    assert spec.rope_factor == theirs.attention_scaling and (spec.rope_factor != 1.0) == (kind == "yarn")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_sharded_and_untied_checkpoints_load(kind: str, tmp_path: Path) -> None:
    target = make_target(kind, tied=False)
    target.model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    spec = ModelSpec.of_target(target.config)
    loaded = TargetWeights.load(tmp_path, spec, CPU, torch.float32)
    copied = TargetWeights.of_module(target.model, spec)
    for name, view in loaded.places().items():
        assert torch.equal(view, copied.places()[name]), name
    assert (loaded.layers[0].q_norm is not None) == (kind == "qwen3")
    assert (loaded.layers[0].qkv_bias is not None) == (kind == "qwen2")


def edited(target_dir: Path, tmp_path: Path, edit: Any) -> Path:
    """A copy of a checkpoint whose tensors went through `edit`."""
    for path in target_dir.iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_text(path.read_text())
    tensors = load_file(target_dir / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "1 tensors are missing from its weights, first 'model.norm.weight'"),
        (lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(1)}), "'model.layers.9.mlp.up_proj"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"has shape \(3,\), not \(32,\)"),
    ],
    ids=["missing", "unknown", "misshapen"],
)
def test_a_checkpoint_that_does_not_fit_is_refused(target_dir: Path, tmp_path: Path, edit: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_engine(str(edited(target_dir, tmp_path, edit)), None, "cpu", options=EngineOptions(block_size=1))


@pytest.mark.parametrize("options", [{"block_size": 9}, {"max_context": 100_000}], ids=str)
def test_options_that_do_not_fit_are_refused_before_the_weights_are_read(
    target_dir: Path, drafter_dir: Path, tmp_path: Path, options: dict[str, int]
) -> None:
    path = edited(target_dir, tmp_path, lambda t: None)
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=f"{next(iter(options))} is "):
        load_engine(str(path), str(drafter_dir), "cpu", options=EngineOptions(**options))


def test_missing_and_torn_files_are_refused(target_dir: Path, tmp_path: Path) -> None:
    path = edited(target_dir, tmp_path, lambda t: None)
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:500])
    with pytest.raises(UserError, match="cannot read its weights"):
        load_engine(str(path), None, "cpu")
    (path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no \*.safetensors there"):
        load_engine(str(path), None, "cpu")


@pytest.mark.parametrize("text", ["{", "", "{}", "[]", "3", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "\udcff"])
def test_an_index_that_is_none_is_named(target_dir: Path, tmp_path: Path, text: str) -> None:
    path = edited(target_dir, tmp_path, lambda t: None)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json: not the index"):
        load_engine(str(path), None, "cpu")


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"eos_token_id": "x"}', '{"eos_token_id": [["x"]]}'])
def test_stop_ids_that_cannot_be_read_do_not_vanish(target_dir: Path, tmp_path: Path, text: str) -> None:
    path = edited(target_dir, tmp_path, lambda t: None)
    (path / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=r"generation_config\.json|eos_token_id"):
        load_engine(str(path), None, "cpu")
    (path / "generation_config.json").unlink()
    load_engine(str(path), None, "cpu", options=EngineOptions(block_size=1))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=1), "sliding-window attention"),
        (LlamaConfig(mlp_bias=True), "mlp_bias"),
        (LlamaConfig(hidden_act="gelu"), "hidden_act 'gelu'"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope type 'dynamic'",
        ),
    ],
)
def test_what_the_runtime_does_not_compute_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModelSpec.of_target(config)


def test_named_shapes_make_random_weights_that_fit() -> None:
    for name, config in SHAPES.items():
        assert drafter_for(config).feature_size == 5 * ModelSpec.of_target(config).hidden_size, name
    small = Qwen2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    a, b = (random_target(ModelSpec.of_target(small), CPU, torch.float32, seed=3) for _ in range(2))
    assert torch.equal(a.layers[7].down, b.layers[7].down) and 0.01 < a.head.std() < 0.03
    assert random_drafter(drafter_for(small), CPU, torch.float32).context_kv.shape == (5 * 2 * 2 * 4, 16)
    with pytest.raises(UserError, match="shape 'qwen9' is not known"):
        named_shape("qwen9")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_batch": 0}, "max_batch is 0"), ({"page_size": 24}, "page_size is 24; it must be a power of two"),
        ({"memory_fraction": 1.5}, "memory_fraction is 1.5"), ({"block_size": 0}, "block_size is 0"),
    ],
)  # fmt: skip
def test_engine_options_refuse_values_out_of_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineOptions(**values)


@pytest.mark.parametrize("values", [{}, {"rate": 0.5, "mean_length": 2.0}, {"rate": 1.5}, {"mean_length": 0.5}])
def test_synthetic_acceptance_refuses_nonsense(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="synthetic"):
        SyntheticAcceptance(**values)


# ---- how long a block ----------------------------------------------------------------------------------------


def requests(*rates: float, tried: bool = True) -> list[Any]:
    return [SimpleNamespace(acceptance=SimpleNamespace(rate=rate, tried=tried)) for rate in rates]


def chooser(**times: float) -> BlockChooser:
    """Times of blocks s1, s4, s8, s16 in milliseconds, for every bucket."""
    table = {(1, int(name[1:])): t for name, t in times.items()}
    return BlockChooser([int(name[1:]) for name in times], table, lambda rows: 1)


def test_expected_tokens_are_the_sum_of_the_chances_to_get_so_far() -> None:
    for rate in (0.0, 0.3, 0.865, 0.999):
        assert expected_tokens(rate, 8) == pytest.approx(sum(rate**i for i in range(8)))
    assert expected_tokens(1.0, 8) == 8


def test_the_block_that_promises_most_tokens_a_second_is_chosen() -> None:
    times = {"s1": 4.0, "s4": 5.0, "s8": 5.2, "s16": 5.6}
    assert chooser(**times)(requests(0.95)) == 16
    assert chooser(**times)(requests(0.5)) in (4, 8)
    assert chooser(**times)(requests(0.05)) == 1, "plain decoding where drafts are useless"
    compute_bound = {"s1": 4.0, "s4": 6.0, "s8": 10.0, "s16": 19.0}
    assert chooser(**compute_bound)(requests(0.865)) < 16
    assert chooser(**compute_bound)(requests(0.95)) == 8
    assert chooser(**compute_bound)(requests(0.95, 0.0, 0.0, 0.0, 0.0)) == 4, "the batch as a whole"
    assert chooser(**compute_bound, s2=4.4)(requests(0.6)) == 2


def test_a_plain_batch_tries_a_draft_now_and_then() -> None:
    choose = chooser(s1=4.0, s2=4.9, s4=5.0, s16=5.6)
    chosen = [choose(requests(0.0)) for _ in range(520)]
    assert [i + 1 for i, block in enumerate(chosen) if block > 1] == [16, 48, 112, 240, 368, 496]
    assert choose(requests(0.95)) == 16, "it pays again"
    assert [choose(requests(0.0)) for _ in range(16)] == [1] * 15 + [4], "soon at first, again"


@pytest.mark.parametrize(("new", "old", "steps"), [(1, 0, 16), (1, 3, 64), (2, 2, 32), (1, 31, 128)])
def test_a_plain_batch_tries_sooner_the_more_of_it_is_new(new: int, old: int, steps: int) -> None:
    choose = chooser(s1=4.0, s4=5.0)
    for _ in range(500):
        choose(requests(0.0))
    while choose(requests(0.0)) == 1:
        pass
    batch = [*requests(*[0.0] * new, tried=False), *requests(*[0.0] * old)]
    assert [choose(batch) for _ in range(steps)] == [1] * (steps - 1) + [4]


# ms of a step of Qwen3-8B on an H200 by batch and block; blocks that were not measured lie between
STEP_MS = {
    1: {1: 4.27, 2: 5.2, 4: 5.25, 8: 5.3, 16: 5.31},
    8: {1: 4.58, 2: 5.6, 4: 5.8, 8: 6.1, 16: 6.94},
    32: {1: 5.09, 2: 6.4, 4: 7.8, 8: 10.1, 16: 16.0},
}


@pytest.mark.parametrize(("batch", "times"), STEP_MS.items())
def test_requests_without_a_useful_draft_soon_decode_plainly(batch: int, times: dict[int, float]) -> None:
    """What drafting in vain costs over plain steps, whole answers; keys and values of the context come on top."""
    choose = BlockChooser(block_sizes(16), {(batch, size): t for size, t in times.items()}, lambda rows: batch)
    those: list[Any] = [SimpleNamespace(acceptance=RollingAcceptance()) for _ in range(batch)]
    spent, over = 0.0, {}
    for tokens in range(1, 257):
        block = choose(those)
        spent += times[block]
        for request in those:
            if block > 1:
                request.acceptance.observe(block - 1, 0)
        over[tokens] = spent / (tokens * times[1]) - 1
    assert over[128] < 0.023 and over[256] < 0.013


@pytest.mark.parametrize(("batch", "times"), STEP_MS.items())
@pytest.mark.parametrize("rate", [0.0, 0.23, 0.3, 0.35, 0.5, 0.865])  # acceptance lengths of 1, 1.3, 1.4, 1.5, 2, 6.7
def test_choosing_is_hardly_slower_than_plain_decoding_at_any_acceptance(
    batch: int, times: dict[int, float], rate: float
) -> None:
    """Answers of 256 tokens, a batch behind the other, as the engine keeps what they accepted."""
    chance = random.Random(0)
    choose = BlockChooser(block_sizes(16), {(batch, size): t for size, t in times.items()}, lambda rows: batch)
    expected = RollingAcceptance(weight=10, decay=0.99)
    gains = []
    for _ in range(8):
        left = dict.fromkeys(range(batch), 256)
        those: list[Any] = [SimpleNamespace(acceptance=RollingAcceptance(expected.rate)) for _ in left]
        spent = 0.0
        while left:
            block = choose([those[row] for row in left])
            spent += times[block]
            for row in list(left):
                accepted = next((i for i in range(block - 1) if chance.random() >= rate), block - 1)
                if block > 1:
                    those[row].acceptance.observe(block - 1, accepted)
                    expected.observe(block - 1, accepted)
                left[row] -= accepted + 1
                if left[row] <= 0:
                    del left[row]
        gains.append(256 * times[1] / spent)
    assert statistics.mean(gains) > 0.98 and min(gains) > 0.97
    assert statistics.mean(gains) > (1.1 if rate == 0.5 else 2.0 if rate == 0.865 else 0.0)


def test_a_small_gain_does_not_change_the_block() -> None:
    choose = chooser(s8=5.00, s16=5.55)
    first = choose(requests(0.80))
    rates = [0.79, 0.81] * 10
    assert {choose(requests(rate)) for rate in rates} == {first}


def test_rolling_acceptance_follows_what_happens() -> None:
    rolling = RollingAcceptance()
    for _ in range(60):
        rolling.observe(7, 0)
    assert rolling.rate < 0.02
    for _ in range(60):
        rolling.observe(7, 7)
    assert rolling.rate > 0.98
    mixed = RollingAcceptance()
    for i in range(400):
        mixed.observe(7, 3 if i % 2 else 4)  # 3 or 4 of 4 or 5 judged
    assert mixed.rate == pytest.approx(3.5 / 4.5, abs=0.02)


def test_a_new_request_starts_where_others_lately_were() -> None:
    target = make_target()
    engine = Engine.of_modules(target, make_drafter(target), OPTIONS)
    assert engine.request([1, 2]).acceptance.rate == pytest.approx(0.7)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    for prompt in ([1, 2, 3], [9, 9], [4]):
        engine.generate([prompt], params)
    stats = engine.stats
    assert stats.drafted and stats.accepted < 0.2 * stats.steps, "a random drafter is of little use"
    new = engine.request([1, 2]).acceptance
    assert new.rate < 0.3 and not new.tried
    judged = [step.accepted for step in engine.generate([[7, 7]], params)[0].steps if step.drafted]
    assert judged and engine.request([1, 2]).acceptance.rate < new.rate
    plain = Engine.of_modules(target, None, replace(OPTIONS, block_size=1))
    plain.generate([[1, 2, 3]], params)
    assert plain.request([1]).acceptance.rate == pytest.approx(0.7), "nothing was judged"


def test_block_sizes_end_with_the_drafters_own() -> None:
    assert block_sizes(16) == (1, 2, 4, 8, 16) and block_sizes(10) == (1, 2, 4, 8, 10) and block_sizes(2) == (1, 2)


def test_step_times_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[int] = []

    def measure() -> dict[tuple[int, int], float]:
        calls.append(1)
        return {(1, 16): 0.5, (8, 4): 0.25}

    for key in ("a", "a", "b"):
        assert cached_times([key], measure) == {(1, 16): 0.5, (8, 4): 0.25}
    assert len(calls) == 2
    (file, _) = sorted((tmp_path / "dflash-toolkit").iterdir())
    file.write_text("torn {")
    other = json.dumps("x")
    assert cached_times([other], measure) and len(calls) == 3
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # no directory: nothing can be kept
    assert cached_times(["a"], measure) and len(calls) == 4


def test_other_kernels_are_timed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(speed, "KERNELS", tmp_path)
    for source, seconds in (("x = 1", 0.5), ("x = 2", 0.25)):
        (tmp_path / "linear.py").write_text(source)
        for _ in range(2):
            assert cached_times("key", lambda now=seconds: {(1, 1): now}) == {(1, 1): seconds}


def test_an_engine_left_to_choose_measures_and_still_writes_the_same(target_dir: Path, drafter_dir: Path) -> None:
    free = EngineOptions(max_batch=2, cache_tokens=1200, page_size=4)
    params = SamplingParams(max_new_tokens=30)
    answers = []
    for options in (free, OPTIONS):
        engine, _ = load_engine(str(target_dir), str(drafter_dir), "cpu", options=options)
        answers.append([g.tokens for g in engine.generate([[1, 2, 3], [7] * 20, [9]], params)])
    assert answers[0] == answers[1]


def test_a_random_drafter_costs_few_steps_before_it_is_left_out() -> None:
    target = make_target()
    engine = Engine.of_modules(target, make_drafter(target), EngineOptions(max_batch=1, cache_tokens=1200, page_size=4))
    times = {(1, 1): 1.0, (1, 4): 1.3, (1, 8): 1.4}
    engine.scheduler._choose_block = BlockChooser([1, 4, 8], times, lambda rows: 1)
    (got,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=300, ignore_eos=True))
    drafting = [step for step in got.steps if step.drafted]
    assert len(drafting) <= 12, "a dozen of 300"
