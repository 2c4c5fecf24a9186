"""The knobs of the engine. Without torch: command lines are checked before it is imported."""

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..config import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..models.dflash.network import DrafterConfig
    from .weights import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticAcceptance:
    """Acceptance by dice instead of by the drafter, for benchmarks: the text is nonsense, the work is real.

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
        """Drafted tokens to accept, int32 [steps, rows], each in 0..block - 1."""
        import torch

        dice = random.Random(self.seed)

        def accepted() -> int:
            if self.rate is not None:
                return next((k for k in range(block - 1) if dice.random() >= self.rate), block - 1)
            assert self.mean_length is not None
            whole, part = divmod(self.mean_length - 1.0, 1.0)
            return min(int(whole) + (dice.random() < part), block - 1)

        return torch.tensor([[accepted() for _ in range(rows)] for _ in range(steps)], dtype=torch.int32)


DRAFT_DTYPES = ("auto", "fp8", "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """The knobs of the engine.

    Raises:
        ValueError: a value outside its range.
    """

    max_batch: int | None = None  # requests decoded together; None: 32 on a GPU, 4 on a CPU
    max_context: int | None = None  # tokens of prompt and answer; None: what the target was made for
    block_size: int | None = None  # tokens of a block; 1 decodes plainly; None: chosen step by step, as it pays
    prefill_chunk: int = 2048  # tokens of a prompt computed between two steps
    page_size: int = 64  # tokens; prefixes are shared in whole pages
    cache_tokens: int | None = None  # room for so many tokens; None: what memory allows
    memory_fraction: float = 0.9  # of the GPU's memory, for everything
    prefix_cache: bool = True
    draft_dtype: str = "auto"  # of drafts, the output is the same: fp8, full (as loaded), auto (what is faster here)
    synthetic: SyntheticAcceptance | None = None

    def __post_init__(self) -> None:
        if self.draft_dtype not in DRAFT_DTYPES:
            raise ValueError(f"draft_dtype is {self.draft_dtype!r}; it must be one of {', '.join(DRAFT_DTYPES)}")
        for name in ("prefill_chunk", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be >= 1")
        for name in ("max_batch", "max_context", "block_size", "cache_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be >= 1")
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size is {self.page_size}; it must be a power of two")
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ValueError(f"memory_fraction is {self.memory_fraction}; it must be in (0, 1]")

    def fitted(self, target: "ModelSpec", drafter: "DrafterConfig | None", device: "torch.device") -> "EngineOptions":
        """These options for a pair on a device, with `max_batch` and `max_context` filled in.

        Raises:
            UserError: they ask for more than the target, the drafter or the device can do.
        """
        import torch

        on_gpu = device.type == "cuda"
        if on_gpu and self.page_size < 16:
            raise UserError(f"page_size is {self.page_size}; on a GPU it must be 16 or more")
        if on_gpu and self.draft_dtype == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
            raise UserError(f"{torch.cuda.get_device_name(device)} does not know draft_dtype=fp8; use auto or full")
        if (self.max_context or 0) > target.context_limit:
            raise UserError(f"max_context is {self.max_context}; the target was made for {target.context_limit}")
        longest = drafter.block_size if drafter else 1
        if (self.block_size or 0) > longest:
            raise UserError(f"block_size is {self.block_size}; the drafter's blocks have at most {longest} tokens")
        return replace(
            self,
            max_batch=self.max_batch or (32 if on_gpu else 4),
            max_context=self.max_context or target.context_limit,
        )
