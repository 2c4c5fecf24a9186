"""Makes every row of vLLM's random mixtures of experts choose its own experts. Needs vllm 0.33; see vllm_step.py.

vLLM fills every matrix with numbers of one seed. Layers of equal shape then have equal routers, and equal tokens
choose equal experts; a random drafter drafts one token everywhere, so drafted rows would use hardly any experts.
vLLM's own routing simulation samples experts in every step with kernels that a real model does not have. Here
vLLM's own kernel chooses among random logits stored in memory, different for each row of each layer, with as many
launches as for real weights.
"""

import torch
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk
from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import RoutingSimulator, RoutingStrategy

NAME = "own_experts"  # value of VLLM_MOE_ROUTING_SIMULATION_STRATEGY
OFFSETS = 4096  # places in the table where a layer's rows may begin
STRIDE = 1021  # distance between the places of two layers, more than the rows of a step
ROWS = 16384 + 1024  # rows of the largest prefill, with some in reserve


class OwnExperts(RoutingStrategy):
    """Softmax and top-k, normalized, of random logits instead of the router's."""

    def __init__(self) -> None:
        self._logits: torch.Tensor | None = None  # [OFFSETS + ROWS, E], made when memory is profiled, before graphs are
        self._calls = 0

    def route_tokens(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        top_k: int,
        indices_type: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns weights [M, top_k] and experts [M, top_k] of rows [M, D] with logits [M, E]."""
        own = self.generate_monolithic_logits(router_logits)
        return fused_topk(hidden_states, own, top_k, renormalize=True, indices_type=indices_type)[:2]

    @property
    def supports_monolithic_logits(self) -> bool:
        """Returns whether kernels that choose experts themselves can be used (gpt-oss)."""
        return True

    def generate_monolithic_logits(self, router_logits: torch.Tensor) -> torch.Tensor:
        """Returns other logits [M, E] for the router's."""
        rows, experts = router_logits.shape
        if self._logits is None:
            dice = torch.Generator(router_logits.device).manual_seed(0)
            shape = (OFFSETS + ROWS, experts)
            made = torch.randn(shape, generator=dice, device=router_logits.device)
            self._logits = made.to(router_logits.dtype)
        self._calls += 1
        start = self._calls * STRIDE % OFFSETS
        return self._logits[start : start + rows]


class Worker:
    """A worker's extension: vLLM imports this module in the process of the model, before it is built."""


RoutingSimulator.register_strategy(NAME, OwnExperts())
