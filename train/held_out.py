"""Held-out prompts decoded for real while a run goes on: the acceptance length that its checkpoint will have."""

import sys
from collections.abc import Sequence

import torch

from dflash_toolkit.acceptance import Acceptance
from dflash_toolkit.config import UserError
from dflash_toolkit.decode import SamplingParams
from dflash_toolkit.drafter import Drafter, DrafterConfig
from dflash_toolkit.evaluation.measure import held_out_acceptance
from dflash_toolkit.runtime import Engine, EngineOptions
from dflash_toolkit.runtime.engine import operations
from dflash_toolkit.runtime.model import DrafterWeights, ModelSpec, TargetWeights
from dflash_toolkit.target import Target

from .config import RunKnobs

TOGETHER = 8  # prompts decoded at a time; up to eight, the engine's answers do not depend on their company
PAGE = 64  # tokens


class HeldOut:
    """Greedy decoding of some prompts with a drafter as it will be served: rounded to bf16, in the target's dtype.

    The engine is made once and shares the target's weights; every evaluation writes the drafter's into it, so its
    captured steps serve the whole run.

    Args:
        shape: of the drafters to come.
        prompts: token ids.

    Raises:
        UserError: `evaluate_runtime` is engine, and the engine cannot compute the target.
    """

    def __init__(self, target: Target, shape: DrafterConfig, prompts: Sequence[list[int]], knobs: RunKnobs) -> None:
        self._target, self._prompts = target, list(prompts)
        self._params = SamplingParams(max_new_tokens=knobs.evaluate_tokens)
        self._engine: Engine | None = None
        auto = knobs.evaluate_runtime == "auto"
        if knobs.evaluate_runtime == "engine" or (auto and target.device.type == "cuda"):
            try:
                self._engine = self._make_engine(shape)
            except (UserError, torch.OutOfMemoryError) as error:
                if not auto:
                    raise
                reason = " ".join(str(error).split())
                print(
                    f"held-out prompts are decoded by the reference, for the engine cannot: {reason}", file=sys.stderr
                )

    def __call__(self, drafter: Drafter) -> Acceptance:
        """Decode every prompt with `drafter`. Raises UserError for a prompt that does not fit the target."""
        where, dtype = self._target.device, self._target.dtype
        exported = {n: p.detach().bfloat16().to(where, dtype) for n, p in drafter.state_dict().items()}
        served = Drafter.of_tensors(drafter.config, exported).eval()
        if self._engine is None:
            return held_out_acceptance(self._target, served, self._prompts, self._params)
        self._engine.load_drafter(served)
        answers = self._engine.generate(self._prompts, self._params)
        while self._engine.step():
            pass  # a step may still be in flight behind the last answer's end
        return Acceptance.of(answers, drafter.config.block_size)

    def _make_engine(self, shape: DrafterConfig) -> Engine:
        target, tokens = self._target, self._params.max_new_tokens
        spec = ModelSpec.of_target(target.config)
        operations(target.device)
        longest = sorted((len(prompt) for prompt in self._prompts), reverse=True)[:TOGETHER]
        # behind an answer's end a step writes whole blocks that nobody reads
        room = [-(-(n + tokens + 3 * shape.block_size) // PAGE) * PAGE for n in longest]
        options = EngineOptions(
            max_batch=len(longest),
            max_context=min(spec.context_limit, longest[0] + tokens),
            block_size=shape.block_size,  # whole blocks at every step, as dflash-eval measures
            page_size=PAGE,
            cache_tokens=sum(room),
            prefix_cache=False,  # its pages would hold keys and values of an older drafter
            draft_dtype="full",  # rounded copies would not follow the weights
        )
        drafter = DrafterWeights.of_module(Drafter.fresh(shape, 0).to(target.device, target.dtype))
        weights = TargetWeights.shared_with(target.model, spec)
        return Engine(weights, drafter, target.stop_token_ids, options)
