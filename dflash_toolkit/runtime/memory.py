"""How many pages the cache gets."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..config import UserError
from .model import ModelSpec
from .sampling import Mode
from .step import StepRunner

if TYPE_CHECKING:
    from .engine import EngineOptions

GIB = 1 << 30
CPU_TOKENS = 16384  # on a CPU, unless one request needs more
GRAPHS_BYTES = 1 * GIB  # of the driver's own memory, which no allocator reports: some 5 MiB a captured graph


def page_count(
    runner: Callable[[int], StepRunner],
    specs: list[ModelSpec],
    options: "EngineOptions",
    context: int,
) -> int:
    """Pages for the cache, the trash page included.

    On a GPU: what is left of `memory_fraction` once the weights are there and a prefill chunk and the largest step
    have shown what they need beside them.

    Args:
        runner: makes a step runner with so many pages.
        specs: of the target and, if there is one, the drafter.

    Raises:
        UserError: not even one request of `context` tokens would fit; says what is missing and which knob helps.
    """
    probe = runner(2)
    device, dtype_bytes = probe.device.type, probe.dtype.itemsize
    size = options.page_size
    longest = context + (probe.lag + 2) * probe.max_block
    least = -(-longest // size)
    if options.cache_tokens is not None:
        pages = -(-options.cache_tokens // size)
    elif device == "cpu":
        pages = max(least, min(probe.max_batch * least, CPU_TOKENS // size))
    else:
        per_token = sum(spec.kv_values_per_token for spec in specs) * dtype_bytes
        free = _free_beside(probe, options)
        pages = int(free // (per_token * size)) - 1
        if pages < least:
            missing = (least - pages) * size * per_token / GIB
            raise UserError(
                f"GPU memory is {missing:.1f} GiB short of one request of {context} tokens; "
                f"lower max_context or raise memory_fraction (now {options.memory_fraction})"
            )
        pages = min(pages, probe.max_batch * least * 4)  # behind that even a prefix cache has little use for more
    return pages + 1


def _free_beside(probe: StepRunner, options: "EngineOptions") -> float:
    """Bytes that the cache may take, with the weights loaded and the workspace of the largest passes set aside."""
    workspace = workspace_of(probe, options.prefill_chunk)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    taken = total - free
    return options.memory_fraction * total - taken - workspace - GRAPHS_BYTES


def workspace_of(probe: StepRunner, prefill_chunk: int) -> int:
    """Bytes that the largest passes take beside what is allocated now: a chunk of a prompt, and the largest step."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    chunk = min(prefill_chunk, probe.page_table.shape[1] * probe.page_size)
    probe.prefill_eagerly([0] * chunk, 0, [1] * -(-chunk // probe.page_size))
    probe.run_eagerly(probe.max_batch, probe.max_block, Mode.FULL)  # has all logits in memory, several times
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - held
