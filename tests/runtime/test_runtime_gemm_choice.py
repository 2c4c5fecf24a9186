"""Whose products a stack of layers runs on: the measured ones, kept, the same with a drafter and without."""

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_toolkit import SamplingParams
from dflash_toolkit.kernels import reference
from dflash_toolkit.runtime import gemm_choice as products
from dflash_toolkit.runtime.gemm_choice import CUBLAS, OWN, ROWS, faster_products, measure_products
from dflash_toolkit.runtime.weights import LayerWeights, ModelSpec

pytest.importorskip("triton")

from dflash_toolkit.kernels import cublas, fused
from dflash_toolkit.kernels.scaled import ScaledMatrix

SPEC: Any = SimpleNamespace(
    hidden_size=64, num_heads=4, head_dim=16, qkv_rows=128, intermediate_size=96, o_bias=False, rms_norm_eps=1e-6
)
ON_GPU: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"), dtype=torch.bfloat16)  # a norm's, for the key alone
LAYER: Any = SimpleNamespace(o=torch.ones(1))  # for the key too


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(products, "_known", {})
    monkeypatch.setattr(products, "place_of", lambda _: ("a GPU", "3.6"))


def measured(monkeypatch: pytest.MonkeyPatch, cublas_seconds: dict[int, float]) -> list[list[ModuleType]]:
    """From now on kernels here take a second and cuBLAS's so many, by rows; who was measured."""
    calls: list[list[ModuleType]] = []

    def measure(spec: Any, layers: Any, norm: Any, ways: list[ModuleType]) -> dict[tuple[int, int], float]:
        calls.append(ways)
        return {(r, OWN): 1.0 for r in ROWS} | {(r, CUBLAS): seconds for r, seconds in cublas_seconds.items()}

    monkeypatch.setattr(products, "measure_products", measure)
    return calls


@pytest.mark.parametrize(
    ("at_16", "at_128", "expected"),
    [(1.1, 1.1, fused), (0.9, 0.9, cublas), (0.99, 1.0, fused), (0.5, 1.3, cublas), (1.3, 0.95, fused)],
)
def test_the_faster_ones_are_taken(
    at_16: float, at_128: float, expected: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = measured(monkeypatch, dict(zip(ROWS, (at_16, at_128), strict=True)))
    assert faster_products(SPEC, [LAYER, LAYER], ON_GPU, fused) is expected
    assert calls == [[fused, cublas]]


def test_they_are_measured_once_for_a_shape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = measured(monkeypatch, dict.fromkeys(ROWS, 0.5))
    for _ in range(2):
        assert faster_products(SPEC, [LAYER, LAYER], ON_GPU, fused) is cublas
    monkeypatch.setattr(products, "_known", {})  # another process
    measured(monkeypatch, dict.fromkeys(ROWS, 2.0))
    assert faster_products(SPEC, [LAYER, LAYER], ON_GPU, fused) is cublas
    assert len(calls) == 1 and len(list(tmp_path.rglob("times-*.json"))) == 1
    assert faster_products(SPEC, [LAYER], ON_GPU, fused) is fused, "other layers are others"
    rounded: Any = SimpleNamespace(o=ScaledMatrix(torch.ones(1, 1), torch.ones(1)))
    measured(monkeypatch, dict.fromkeys(ROWS, 0.5))
    assert faster_products(SPEC, [rounded], ON_GPU, fused) is cublas, "and so are those in fp8"


def test_without_a_cache_on_disk_a_process_keeps_to_its_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    calls = measured(monkeypatch, dict.fromkeys(ROWS, 0.5))
    assert faster_products(SPEC, [LAYER], ON_GPU, fused) is cublas
    measured(monkeypatch, dict.fromkeys(ROWS, 2.0))
    assert faster_products(SPEC, [LAYER], ON_GPU, fused) is cublas and len(calls) == 1


def test_a_cpu_has_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "measure_products", None)
    assert faster_products(SPEC, [], torch.ones(64), reference) is reference


@pytest.mark.gpu
def test_every_way_is_timed_over_all_layers() -> None:
    spec = ModelSpec(
        hidden_size=1024, num_layers=8, num_heads=8, num_kv_heads=2, head_dim=128, intermediate_size=3072,
        vocab_size=64, rms_norm_eps=1e-6, qk_norm=True, qkv_bias=False, o_bias=False, tied_head=True,
        context_limit=64, rope_frequencies=(1.0,) * 64,
    )  # fmt: skip
    layers = [LayerWeights.empty(spec, torch.device("cuda"), torch.bfloat16) for _ in range(8)]
    norm = torch.ones(1024, device="cuda", dtype=torch.bfloat16)
    times = measure_products(spec, layers, norm, [fused, cublas])
    floor = 8 * sum(w.nbytes for w in (layers[0].qkv, layers[0].o, layers[0].gate_up, layers[0].down)) / 4.8e12
    assert set(times) == {(rows, way) for rows in ROWS for way in (OWN, CUBLAS)}
    assert all(floor < seconds < 50 * floor for seconds in times.values())


@pytest.mark.gpu
def test_with_cublas_products_a_drafter_changes_no_token_either(monkeypatch: pytest.MonkeyPatch) -> None:
    from test_runtime_gpu import knowing, make_engine, pair, prompts_of, regret

    monkeypatch.setattr("dflash_toolkit.runtime.runner.faster_products", lambda *_: cublas)
    target, drafter = pair()
    prompts, params = prompts_of(64, seed=9), SamplingParams(max_new_tokens=40, ignore_eos=True)
    plain = [g.tokens for g in make_engine(target, None).generate(prompts, params)]
    for batch, block in ((8, 16), (1, 16), (8, 4)):
        engine = make_engine(target, drafter, max_batch=batch, block_size=block)
        assert engine.runner.products == ["cublas", "cublas"]
        knowing(engine, prompts, plain)
        drafted = engine.generate(prompts, params)
        assert [g.tokens for g in drafted] == plain
        assert sum(len(g.steps) for g in drafted) < 64 * 39 / 2, "drafts were accepted"
    regrets = [regret(target, prompt, answer) for prompt, answer in zip(prompts, plain, strict=True)]
    assert max(regrets) <= 0.2


@pytest.mark.gpu
def test_products_are_chosen_by_measurement_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_runtime_gpu import make_engine, pair

    target, drafter = pair()
    chosen = make_engine(target, drafter).runner.products
    files = [json.loads(path.read_text()) for path in tmp_path.rglob("times-*.json")]
    assert len(files) == 2, "of the target's layers and of the drafter's"
    for file in files:
        times = {(rows, way): seconds for rows, way, seconds in file["seconds"]}
        assert set(times) == {(rows, way) for rows in products.ROWS for way in (products.OWN, products.CUBLAS)}
        assert all(1e-5 < seconds < 1e-2 for seconds in times.values())
    monkeypatch.setattr(products, "_known", {})
    monkeypatch.setattr(products, "measure_products", None)
    assert make_engine(target, drafter).runner.products == chosen
