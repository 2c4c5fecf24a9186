"""scripts/bench/experts.py: the routing that it measures, and its command line."""

import pytest
import torch

pytest.importorskip("triton")

from dflash_toolkit.models.spec import MoeSpec
from scripts.bench import experts

SPEC = MoeSpec(num_experts=256, top_k=8, intermediate_size=512, normalized=True, shared=True)


def test_skewed_routing_chooses_fewer_experts() -> None:
    torch.manual_seed(0)
    touched = []
    for skew in (0.0, 1.0):
        weights, chosen = experts.routing(SPEC, 64, skew, torch.device("cpu"))
        assert weights.shape == chosen.shape == (64, 9) and (chosen[:, -1] == 256).all()
        assert all(len(set(row)) == 9 for row in chosen.tolist())
        touched.append(len(chosen.unique()) - 1)
    assert touched[0] == pytest.approx(256 * (1 - (1 - 8 / 256) ** 64), rel=0.05)
    assert touched[1] < 0.8 * touched[0]


def test_a_dense_shape_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "use_device", torch.device)
    for shape in ("qwen3-8b-fp8", "qwen3.6-35b-a3b"):
        assert experts.main(["--shape", shape]) == 2
        assert f"--shape {shape} has no quantized experts" in capsys.readouterr().err
