"""scripts/peers/vllm_routing.py, with torch in the place of vLLM's kernel: which experts rows choose."""

import importlib
import sys
from types import ModuleType

import pytest
import torch
from paths import ROOT
from torch import Tensor

ROUTER = "vllm.model_executor.layers.fused_moe.router"


def fused_topk(x: Tensor, logits: Tensor, count: int, renormalize: bool, indices_type: torch.dtype | None) -> tuple:
    assert len(x) == len(logits) and renormalize
    weights, experts = logits.softmax(-1).topk(count)
    return weights / weights.sum(-1, keepdim=True), experts.to(indices_type), None


def test_equal_rows_choose_experts_independently(monkeypatch: pytest.MonkeyPatch) -> None:
    strategies: dict[str, object] = {}
    names = ROUTER.split(".")
    modules = {".".join(names[: i + 1]): ModuleType(names[i]) for i in range(len(names))}
    simulator = ModuleType("simulator")
    simulator.RoutingStrategy = object  # type: ignore[attr-defined]
    simulator.RoutingSimulator = type("S", (), {"register_strategy": staticmethod(strategies.__setitem__)})  # type: ignore[attr-defined]
    fused = ModuleType("fused")
    fused.fused_topk = fused_topk  # type: ignore[attr-defined]
    modules |= {f"{ROUTER}.routing_simulator_router": simulator, f"{ROUTER}.fused_topk_router": fused}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(ROOT / "scripts/peers"))
    monkeypatch.delitem(sys.modules, "vllm_routing", raising=False)
    routing = importlib.import_module("vllm_routing")
    strategy = strategies[routing.NAME]
    rows, experts, top_k, seen = 64, 256, 8, []
    for _layer in range(40):
        weights, chosen = strategy.route_tokens(torch.zeros(rows, 16), torch.zeros(rows, experts), top_k, torch.int32)
        assert chosen.shape == (rows, top_k) and chosen.dtype == torch.int32
        assert all(len(set(row)) == top_k for row in chosen.tolist())
        torch.testing.assert_close(weights.sum(-1), torch.ones(rows))
        seen.append(chosen)
    assert not any(torch.equal(seen[0], other) for other in seen[1:]), "a layer's choice is its own"
    distinct = sum(len(chosen.unique()) for chosen in seen) / len(seen)
    assert distinct == pytest.approx(experts * (1 - (1 - top_k / experts) ** rows), rel=0.03)
    largest = torch.zeros(routing.ROWS, experts)
    assert len(strategy.route_tokens(torch.zeros(routing.ROWS, 1), largest, top_k, torch.int64)[1]) == routing.ROWS
