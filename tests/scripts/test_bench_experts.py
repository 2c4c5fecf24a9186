"""The benchmark of experts: what it times is what the engine computes, however it is cut."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_toolkit.models.spec import MoeSpec

pytest.importorskip("triton")

from scripts.bench import experts as bench

SPEC = MoeSpec(num_experts=5, top_k=2, intermediate_size=128, normalized=True, shared=True, fp8_blocks=True)


@pytest.mark.parametrize(("rows", "ways"), [(2, 1), (20, 4)])
def test_every_cut_computes_the_same(rows: int, ways: int, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: dict[str, list[Tensor]] = {}

    def once(run: Callable[[Any], object], layers: Sequence[Any]) -> float:
        out = run(layers[0])
        if isinstance(run, partial) and isinstance(out, Tensor):
            outputs.setdefault(run.args[0].name, []).append(out.clone())
            out.fill_(torch.nan)
        return 1e-6

    monkeypatch.setattr(bench, "seconds", once)
    monkeypatch.setattr(bench, "COMPILERS", 1)  # the interpreter knows one thread
    monkeypatch.setattr(bench, "TILES", ((64, 4, 4),))
    layer = bench.layer_of(SPEC, 128, True, torch.device("cpu"))
    found = bench.measure(SPEC, [layer], rows, sweep=True)
    asked = found["experts_asked"]
    assert 3 <= asked <= 6
    read = asked * (128 * 128 + 4)  # a GEMM's bytes: of down, and half of gate_up's
    assert found["down"] == {"us": 1.0, "tb_s": round(read / 1e6, 3)}
    assert found["both"]["tb_s"] == round(3 * read / 1e6, 3)
    assert len(found["down_cuts"]) == len(found["gate_up_cuts"]) == ways - 1, "and the engine's own"
    assert set(outputs) == {"gate_up", "down"}
    for same in outputs.values():
        assert len(same) >= ways and not same[0].isnan().any()
        assert all(torch.equal(out, same[0]) for out in same)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--shape", "qwen3-8b"]) == 2 and "has no experts" in capsys.readouterr().err
    assert bench.main([]) == 2 and "CUDA device" in capsys.readouterr().err
