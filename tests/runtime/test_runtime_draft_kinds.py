"""DFlash 2 and DSpine in the engine: their drafts equal those of the reference, in any batch."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import make_dflash2, make_dspine
from engines import SAMPLINGS, check, check_drafts, make_engine, pair, prompts_of

from dflash_toolkit import Drafter, SamplingParams, load_drafter, save_drafter
from dflash_toolkit.runtime import EngineOptions, load_engine
from dflash_toolkit.runtime.weight_updates import update_drafter

Make = Callable[..., Drafter]
SCALED = {"input_embedding_scale": 3.0, "output_multiplier": 0.2, "final_logit_softcapping": 2.0}
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9}
KINDS: dict[str, tuple[Make, dict[str, Any]]] = {
    "DFlash 2": (make_dflash2, {}),
    "a selector": (make_dflash2, {"conv_kernel_size": 0, "conv_group_size": 0}),
    "convolutions": (make_dflash2, {"selector_rank": 0, "selector_top_k": 0}),
    "DFlash 2, scaled": (make_dflash2, SCALED),
    "DFlash 2, sliding": (make_dflash2, SLIDING | {"is_causal": None}),
    "DFlash 2, windows": (make_dflash2, SLIDING | {"is_causal": False}),
    "DSpine": (make_dspine, {}),
    "DFlash 2, biases": (make_dflash2, {"attention_bias": True}),
    "DFlash 2, taps and few candidates": (
        make_dflash2, {"conv_kernel_size": 3, "conv_group_size": 4, "selector_top_k": 3},
    ),
    "DSpine, scaled": (make_dspine, SCALED),
    "DSpine, biases and few candidates": (make_dspine, {"attention_bias": True, "refine_top_k": 3}),
    "DSpine, sliding": (make_dspine, SLIDING | {"layer_types": 2 * SLIDING["layer_types"]}),
}  # fmt: skip
PARAMS = [SamplingParams(max_tokens=n) for n in (14, 1, 9, 20)]
both = pytest.mark.parametrize("make", [make_dflash2, make_dspine])


@pytest.mark.parametrize(("make", "changes"), KINDS.values(), ids=KINDS)
@pytest.mark.sampled(5)
def test_ragged_batches_draft_as_the_reference_one_by_one(make: Make, changes: dict[str, Any]) -> None:
    target, _ = pair()
    drafter = make(target, **changes)
    check_drafts(make_engine(target, drafter), (target, drafter), prompts_of(1, 5, 17, 33), *PARAMS)


@both
@pytest.mark.parametrize("block", [2, 5])
def test_blocks_may_have_fewer_slots_than_in_training(block: int, make: Make) -> None:
    target, _ = pair()
    drafter = make(target)
    engine = make_engine(target, drafter, num_speculative_tokens=block - 1)
    drafter.config = drafter.config.with_block_size(block)
    check_drafts(engine, (target, drafter), prompts_of(3, 20), SamplingParams(max_tokens=14))


@both
def test_sampled_answers_are_those_without_a_drafter(make: Make) -> None:
    target, _ = pair()
    params = [replace(one, max_tokens=12) for one in SAMPLINGS[:3]]
    check(make_engine(target, make(target)), (target, make(target)), prompts_of(4, 19, 7), *params)


@both
def test_drafters_from_disk_equal_the_module_and_are_updated(make: Make, target_dir: Path, tmp_path: Path) -> None:
    target, _ = pair()
    save_drafter(make(target), tmp_path)
    options = EngineOptions(max_num_seqs=2, kv_cache_tokens=1200, page_size=4, num_speculative_tokens=7)
    engine = load_engine(str(target_dir), str(tmp_path), "cpu", options=options)[0]
    drafter = load_drafter(str(tmp_path)).float()
    check_drafts(engine, (target, drafter), prompts_of(9), SamplingParams(max_tokens=14))
    held = engine.runner.drafter
    assert held is not None and set(held.parameter_views()) == set(drafter.state_dict())
    for parameter in drafter.parameters():
        parameter.mul_(0.7)
    update_drafter(held, drafter.state_dict())
    check_drafts(engine, (target, drafter), prompts_of(11), SamplingParams(max_tokens=14))
