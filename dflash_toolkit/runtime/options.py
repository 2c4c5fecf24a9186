"""Declares the options of the engine. Without torch: command lines are checked before it is imported."""

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..config import UserError, option
from ..options import LEAST_FOR_TREES, MOST_TREE_NODES, DraftOptions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..models.dflash.config import DrafterConfig
    from ..models.spec import ModelSpec

SMALL_GPU = 40 << 30  # bytes; on a smaller GPU, a tenth of the memory is too much to leave unused
MOST_MEMORY = 0.95  # share of a GPU's memory in use
MOST_REQUESTS = 256  # in a batch on a GPU, unless max_num_seqs is given


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticAcceptance:
    """Random acceptance instead of the drafter's, for benchmarks. The text is meaningless; the computation is real.

    Raises:
        ValueError: a rate outside 0..1, a length below 1, or not exactly one of the two.
    """

    rate: float | None = None  # conditional probability of every position
    mean_length: float | None = None  # tokens a step, bonus included: blocks accept its floor or its ceiling
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.mean_length is None):
            raise ValueError("synthetic acceptance needs exactly one of rate and mean_length")
        if self.rate is not None and not 0.0 <= self.rate <= 1.0:
            raise ValueError(f"synthetic rate is {self.rate}; it must be in [0, 1]")
        if self.mean_length is not None and not self.mean_length >= 1.0:
            raise ValueError(f"synthetic mean_length is {self.mean_length}; it must be >= 1")

    def table(self, steps: int, rows: int, block: int) -> "Tensor":
        """Returns the number of drafted tokens to accept, int32 [steps, rows], each in 0..block - 1."""
        import torch

        dice = random.Random(self.seed)

        def accepted() -> int:
            if self.rate is not None:
                return next((k for k in range(block - 1) if dice.random() >= self.rate), block - 1)
            assert self.mean_length is not None
            whole, part = divmod(self.mean_length - 1.0, 1.0)
            return min(int(whole) + (dice.random() < part), block - 1)

        return torch.tensor([[accepted() for _ in range(rows)] for _ in range(steps)], dtype=torch.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions(DraftOptions):
    """How an engine batches, caches and drafts.

    Raises:
        ValueError: a value outside its range.
    """

    max_num_seqs: int | None = option(
        None,
        "maximum requests in a batch (default: up to 256 on a GPU, as its memory allows; 4 on a CPU)",
        common=True,
        within=">= 1",
    )
    max_model_len: int | None = option(
        None,
        "maximum tokens of prompt and response together (default: the target's context length, or what fits into the "
        "GPU's memory)",
        common=True,
        within=">= 1",
    )
    max_num_batched_tokens: int | None = option(
        None,
        "maximum prompt tokens of one pass (default: 8192 on a GPU with enough memory, 256 on a CPU)",
        within=">= 1",
    )
    page_size: int = option(
        64, "tokens per page of the KV cache, a power of two; requests share whole pages", within=">= 1"
    )
    kv_cache_tokens: int | None = option(
        None, "size of the KV cache, in tokens of all requests (default: what the memory allows)", within=">= 1"
    )
    gpu_memory_utilization: float | None = option(
        None,
        "share of the GPU's memory that may be in use, by all programs (default: 0.9, and 0.95 below 40 GB)",
        common=True,
        within="in (0, 1]",
    )
    prefix_cache: bool = option(True, "reuse the cached pages of common prompt prefixes")
    prefix_states: int | None = option(
        None,
        "recurrent states kept for prompt prefixes, and more while few requests run; 0 keeps none "
        "(default: twice --max-num-seqs, at most 32)",
        within=">= 0",
    )
    retune: bool = option(False, "measure step times again instead of using those kept from an earlier start")
    synthetic: SyntheticAcceptance | None = None
    keep_taps: bool = False  # keep the taps of all tokens in the pages, for `SamplingParams.return_taps`
    report_offered: bool = False  # fill in `Step.offered`, for reports; costs host time

    def __post_init__(self) -> None:
        DraftOptions.__post_init__(self)
        if (self.draft_tree or 0) > MOST_TREE_NODES:
            raise ValueError(f"draft_tree is {self.draft_tree}; the engine takes {MOST_TREE_NODES} nodes at most")
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size is {self.page_size}; it must be a power of two")

    def fitted(self, target: "ModelSpec", drafter: "DrafterConfig | None", device: "torch.device") -> "EngineOptions":
        """Returns these options with the defaults of a pair and a device filled in.

        Raises:
            UserError: an option exceeds the limits of the target, the drafter or the device.
        """

        from ..draft_tree import WIDTH

        on_gpu = device.type == "cuda"
        if on_gpu and self.page_size < 16:
            raise UserError(f"page_size is {self.page_size}; on a GPU it must be 16 or more")
        if (self.max_model_len or 0) > target.context_limit:
            raise UserError(
                f"max_model_len is {self.max_model_len}, but the target supports {target.context_limit}; "
                f"lower max_model_len"
            )
        most = drafter.block_size - 1 if drafter else 0
        if (self.num_speculative_tokens or 0) > most:
            reason = f"the drafter drafts at most {most} tokens per step" if drafter else "there is no drafter"
            raise UserError(f"num_speculative_tokens is {self.num_speculative_tokens}; {reason}")
        block = self.block_size or most + 1
        tree = self.draft_tree
        if tree is None:
            tree = MOST_TREE_NODES if on_gpu and drafter and self._trees_pay(target) else 0
        width = (self.draft_tree_width if tree else None) or WIDTH
        nodes = min(tree, block - 1) if width == 1 else tree  # a chain is no longer than a block
        overshoot = (1 if on_gpu else 0) * block + max(block, nodes + 1)
        rows = self.max_num_seqs or (MOST_REQUESTS if on_gpu else 4)
        kept = min(2 * rows, 32) if self.prefix_states is None else self.prefix_states
        return replace(
            self,
            max_num_seqs=rows,
            draft_tree=nodes,
            draft_tree_width=width,
            prefix_states=kept if target.recurrent and self.prefix_cache else 0,
            max_model_len=self._context(target.context_limit, overshoot, nodes + 1 > block),
            max_num_batched_tokens=self.max_num_batched_tokens or (8192 if on_gpu else 256),
        )

    def memory_share(self, total: int) -> float:
        """Returns the share of a GPU's `total` bytes that may be in use; a cache of a given size may use all."""
        if self.kv_cache_tokens is not None:
            return 1.0
        return self.gpu_memory_utilization or (0.9 if total >= SMALL_GPU else MOST_MEMORY)

    def _trees_pay(self, target: "ModelSpec") -> bool:
        """Returns whether trees are the default: if steps are long, and a further row reads no further experts."""
        free = self.num_speculative_tokens is None and self.draft_sample_method == "greedy" and not self.synthetic
        large = not target.routes and target.dense_parameters >= LEAST_FOR_TREES
        return free and large

    def _context(self, longest: int, overshoot: int, trees: bool) -> int:
        """Returns the maximum tokens of a request; the size of the cache if only that is given.

        Args:
            longest: the target's context length.
            overshoot: tokens that steps in flight may write after an answer's end.
            trees: whether the overshoot would be smaller without draft trees.
        """
        wanted = self.max_model_len or longest
        if self.kv_cache_tokens is None:
            return wanted
        room = -(-self.kv_cache_tokens // self.page_size) * self.page_size - overshoot
        least = self.max_model_len or 2
        if room < least:
            lower = f", or lower max_model_len to {room}" if room > 1 else ""
            lower += ", or set draft_tree to 0" if trees else ""
            raise UserError(
                f"kv_cache_tokens is {self.kv_cache_tokens} and a request of {least} tokens (max_model_len) needs "
                f"{least + overshoot} with its drafts; raise kv_cache_tokens{lower}"
            )
        return min(wanted, room)


def check_cache_dtype(asked: str, dtype: "torch.dtype") -> None:
    """Raises UserError if the cache should hold bfloat16 and the model computes in another dtype."""
    computed = str(dtype).removeprefix("torch.")
    if asked == "bfloat16" != computed:
        raise UserError(f"kv_cache_dtype is bfloat16, but the model computes in {computed}; use auto, or fp8")


def resolve_draft_dtype(asked: str, device: "torch.device", dtype: "torch.dtype") -> str:
    """Returns the precision of drafts, fp8 or full; auto is fp8 with bf16 weights on GPUs with FP8 products.

    Drafting multiplies the weights with a few rows, one operation per byte and row, and such a GPU computes more than
    100 operations in the time in which it reads a byte. So half the bytes take nearly half the time, which was measured
    on Hopper only. GPUs without FP8 products decode FP8 in registers, which is not known to be faster than bf16.
    """
    import torch

    from ..kernels.features import features_of

    if asked != "auto":
        return asked
    fp8 = device.type == "cuda" and features_of(device).fp8_products
    return "fp8" if fp8 and dtype == torch.bfloat16 else "full"
