"""Fits the options of an engine into the memory of a GPU, and says which options help if it does not suffice.

Cards of 8 to 32 GB hold few requests with long contexts next to the weights. Options that the user has not set follow
the memory: first fewer requests and shorter passes over prompts, then no copies of the drafter in fp8, then no draft
trees; the context gets the rest.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..kernels.features import features_of
from ..models.dflash.config import DrafterConfig
from ..models.spec import ModelSpec
from ..preflight import GIB, size
from .options import MOST_MEMORY, EngineOptions, resolve_draft_dtype
from .plan import Plan, Planner

USEFUL_CONTEXTS = (8192, 4096)  # tokens of a request, for which the batch gets smaller: to 4 requests, then to 1
LEAST_CONTEXT = 1024
TOKENS_PER_REQUEST = 1024  # in the cache, for each request of the batch
LARGE_BATCH = 32  # larger batches need room for LONG_REQUESTS
LONG_REQUESTS = 2048  # tokens in the cache, for each request of a large batch
LEAN: dict[str, Any] = {"draft_dtype": "full", "max_num_batched_tokens": 1024}
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    *({"max_num_seqs": rows} for rows in (192, 128, 96, 64, 48, 32)),
    *({"max_num_seqs": rows, "max_num_batched_tokens": 2048} for rows in (32, 24, 16, 8, 4)),
    {"max_num_seqs": 4, **LEAN},
    {"max_num_seqs": 4, **LEAN, "draft_tree": 0},
    {"max_num_seqs": 2, **LEAN, "draft_tree": 0},
    {"max_num_seqs": 1, **LEAN, "draft_tree": 0, "max_num_batched_tokens": 512},
)
log = logging.getLogger(__name__)


def free_memory(device: torch.device) -> tuple[int, int]:
    """Returns the free bytes of a GPU and all of them. What deleted engines and weights took is free."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)


class Budget(NamedTuple):
    """The memory of a GPU."""

    share: float  # of the total, that may be in use
    total: int
    free: int

    @classmethod
    def of(cls, options: EngineOptions, device: torch.device) -> "Budget":
        """Returns what is free now. Displays and other programs leave less than the GPU has."""
        free, total = free_memory(device)
        return cls(options.memory_share(total), total, free)

    @property
    def bytes(self) -> float:
        """The bytes that may be allocated from now on."""
        return self.share * self.total - (self.total - self.free)


def round_down(context: int) -> int:
    """Returns a context that does not change with a few MiB more or less, as step times are kept for a context."""
    step = max(1 << max(context.bit_length() - 4, 0), 64)
    return context - context % step


def contexts_up_to(limit: int) -> list[int]:
    """Returns the contexts to choose from."""
    return sorted({round_down(each) for each in range(LEAST_CONTEXT, limit, 64)} | {limit})


def planner_for(spec: ModelSpec, config: DrafterConfig | None, device: torch.device, dtype: torch.dtype) -> Planner:
    """Returns the planner of a pair on a GPU."""
    return Planner(spec, config, dtype, fused=features_of(device).hopper)


def fit(asked: EngineOptions, planner: Planner, budget: float, device: torch.device) -> tuple[EngineOptions, Plan]:
    """Returns the options with the defaults that fit into the memory of a GPU, and the plan for them.

    Their draft_dtype is fp8 or full.

    If nothing fits, they are the smallest defaults.

    Args:
        budget: bytes for the whole engine, weights included.

    Raises:
        UserError: see `EngineOptions.fitted`.
    """
    automatic = asked.max_model_len is None and asked.kv_cache_tokens is None
    contexts = contexts_up_to(planner.spec.context_limit)

    def planned(context: int | None = None, **change: Any) -> tuple[EngineOptions, Plan]:
        given = {name: value for name, value in change.items() if getattr(asked, name) in (None, "auto")}
        options = replace(asked, **given).fitted(planner.spec, planner.config, device)
        draft_dtype = resolve_draft_dtype(options.draft_dtype, device, planner.dtype)
        options = replace(options, draft_dtype=draft_dtype, max_model_len=context or options.max_model_len)
        return options, planner.plan(options)

    def holds(options: EngineOptions, plan: Plan) -> bool:
        rows, tokens = options.max_num_seqs or 0, asked.kv_cache_tokens or plan.tokens(budget)
        each = LONG_REQUESTS if rows > LARGE_BATCH else 0 if asked.kv_cache_tokens else TOKENS_PER_REQUEST
        needed = 0 if asked.max_num_seqs else rows * min(each, options.max_model_len or 0)
        return plan.missing(options, budget) <= 0 and tokens >= needed

    tries = [(min(useful, contexts[-1]) if automatic else None, each) for useful in USEFUL_CONTEXTS for each in CHANGES]
    tries = [each for each in tries if each[0] != USEFUL_CONTEXTS[0] or each[1].get("max_num_seqs", 4) >= 4]
    change = next((each for useful, each in tries if holds(*planned(useful, **each))), CHANGES[-1])
    if not automatic:
        return planned(**change)

    options, plan = planned(contexts[-1], **change)
    if holds(options, plan):
        return options, plan

    def short(context: int) -> bool:
        return not holds(*planned(context, **change))

    return planned(contexts[max(bisect_right(contexts, 0, key=short) - 1, 0)], **change)


def log_fitted(asked: EngineOptions, options: EngineOptions, unlimited: EngineOptions, budget: float) -> None:
    """Logs the options that are lower than on a GPU with more memory."""
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "draft_tree", "draft_dtype")
    lowered = [
        f"--{name.replace('_', '-')} {getattr(options, name)} (default {getattr(unlimited, name)})"
        for name in names
        if getattr(asked, name) in (None, "auto")
        and getattr(options, name) != getattr(unlimited, name)
        and not (name == "max_num_seqs" and (options.max_num_seqs or 0) >= LARGE_BATCH)
    ]
    if lowered:
        log.warning("to fit into %.1f GiB of GPU memory, the engine uses %s", budget / GIB, ", ".join(lowered))


# ---- advice ----------------------------------------------------------------------------------------------------------


def advice(planner: Planner, options: EngineOptions, missing: float, share: float = 1.0, total: int = 0) -> str:
    """Returns the options that free memory, and how much each frees.

    Args:
        options: `fitted`.
        missing: bytes that do not fit.
        share: share of the memory that may be in use, of `total` bytes.
    """
    before = planner.plan(options)

    def freed(change: dict[str, Any]) -> float:
        changed = replace(options, **change)
        after = planner.plan(changed)
        return before.fixed + before.cache(options) - after.fixed - after.cache(changed)

    named = [(change, freed(change)) for change in _changes(options, before, missing, freed)]
    found = [(f"--{name.replace('_', '-')} {value} frees", less) for change, less in named
             for name, value in list(change.items())[:1]]  # fmt: skip
    if options.draft_dtype == "fp8":
        found.append(("--draft-dtype full frees", planner.copies_bytes))
    if share < MOST_MEMORY:
        found.append((f"--gpu-memory-utilization {MOST_MEMORY} gives", (MOST_MEMORY - share) * total))
    said = [f"{option} {size(less)}" for option, less in found if less >= min(GIB / 20, missing)]
    if sum(less for _, less in found) < missing:
        said.append("use a smaller target or drafter")
        if planner.config is not None:
            said.append(f"no drafter frees {size(before.drafter)}")
    text, saved = ", ".join(said), planner.saved_in_fp8()
    return f"{text}; an FP8 target needs {size(saved)} less" if saved else text


def _changes(
    options: EngineOptions, plan: Plan, missing: float, freed: Callable[[dict[str, Any]], float]
) -> Iterator[dict[str, Any]]:
    """Yields changes of options; the first option of each is the one to name."""
    fewer = -(-int(missing) // plan.token)
    context, cache = options.max_model_len or 0, options.kv_cache_tokens
    if cache is not None:
        over, smaller = plan.reach - context, (cache - fewer) // options.page_size * options.page_size
        if smaller - over >= LEAST_CONTEXT:
            yield {"kv_cache_tokens": smaller, "max_model_len": min(context, smaller - over)}
    elif context > LEAST_CONTEXT:
        yield {"max_model_len": max(round_down(max(context - fewer, 0)), LEAST_CONTEXT)}
    if options.draft_tree:
        yield {"draft_tree": 0}
    rows, kept = options.max_num_seqs or 1, options.prefix_states or 0
    if less := [
        {"max_num_seqs": n, "prefix_states": min(2 * n, kept)} for n in (128, 64, 32, 16, 8, 4, 2, 1) if n < rows
    ]:
        yield next((each for each in less if freed(each) >= missing), less[-1])
    if kept:
        yield {"prefix_states": 0}
    if (options.max_num_batched_tokens or 0) > 512:
        yield {"max_num_batched_tokens": 512}
    narrow = {"kv_cache_dtype": "fp8"}
    if missing > GIB and not options.fp8_cache and freed(narrow) >= missing:  # it changes answers: not for a little
        yield narrow
