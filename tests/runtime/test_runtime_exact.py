"""Sampled tokens follow the target's distribution, in batches and with drafts. Compares counts, not single tokens."""

from dataclasses import replace

import pytest
from small_vocabulary import (
    SMALL_PROMPT,
    SMALL_SAMPLINGS,
    check_answers,
    exact_answers,
    likely_draft,
    small_vocabulary_pair,
)
from torch import Tensor

from dflash_toolkit import SamplingParams
from dflash_toolkit.runtime import EngineOptions, load_engine
from dflash_toolkit.runtime.proposer import Draft
from dflash_toolkit.runtime.stack import Rows

SEEDS = range(1000, 1500)  # not those of `generate` in test_decode.py: the engine would draw the same tokens again


@pytest.mark.parametrize("sampling", SMALL_SAMPLINGS)
@pytest.mark.slow
def test_sampled_tokens_follow_the_targets_distribution(
    sampling: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix_cache = "top_p" in sampling  # it changes nothing, so one is shown with it and the other without
    target, drafter = small_vocabulary_pair(8)
    joint = exact_answers(target, **sampling)
    size = drafter.config.block_size
    options = EngineOptions(num_speculative_tokens=size - 1, page_size=2, max_num_seqs=32, kv_cache_tokens=400)
    engine = load_engine(target, drafter, options=replace(options, prefix_cache=prefix_cache))[0]
    draft_at, propose = likely_draft(joint), engine.runner.proposer.propose

    def likely(last: Tensor, rows: Rows, block: int) -> Draft:
        drafts = propose(last, rows, block).tokens  # the real drafter runs all the same
        positions = rows.lengths.tolist()
        return Draft(drafts.new_tensor([[draft_at(start + k) for k in range(1, block)] for start in positions]))

    monkeypatch.setattr(engine.runner.proposer, "propose", likely)
    params = [SamplingParams(max_tokens=4, seed=seed, ignore_eos=True, **sampling) for seed in SEEDS]
    answers = engine.generate([SMALL_PROMPT] * len(params), params)
    check_answers(answers, joint, exact_answers(target, temperature=2 * sampling["temperature"]))
    assert max(step.drafted for answer in answers for step in answer.steps) == size - 1
    assert (engine.stats.cached_prompt_tokens > 0) == prefix_cache
