"""Chooses how many responses are written at a time: as many as the memory holds."""

from typing import TYPE_CHECKING

import torch

from dflash_toolkit.preflight import GIB
from dflash_toolkit.runtime.options import EngineOptions

if TYPE_CHECKING:
    from dflash_toolkit.runtime.load import Parts

SIZES = (256, 192, 128, 96, 64, 48, 32, 24, 16, 8)
ON_CPU = 32  # also with the modules of transformers
ON_SERVER = 64  # requests to the servers of --endpoint, a thread each
PROMPT_TOKENS = 256  # assumed of a prompt; pages that are missing later cost only the time of a preemption
STEP_BYTES = 2 * GIB  # memory of a prefill chunk and of graphs
LOGIT_BYTES = 6  # per logit in the largest step, which the engine measures and reserves twice


def sizes_that_fit(parts: "Parts", tokens: int) -> list[int]:
    """Returns numbers of requests that fit into the memory next to these weights by an estimate, the largest first.

    Args:
        tokens: limit of a response; requests hold half of it on average.
    """
    target, device = parts.target, parts.target.embedding.device
    if device.type != "cuda":
        return [ON_CPU]
    free, total = torch.cuda.mem_get_info(device)
    room = free - (1 - EngineOptions().memory_share(total)) * total - STEP_BYTES
    specs = [target.spec, *([parts.drafter.spec] if parts.drafter else [])]
    block = parts.drafter.config.block_size if parts.drafter else 1
    size = target.embedding.element_size()
    each = (PROMPT_TOKENS + tokens // 2) * size * sum(spec.kv_values_per_token for spec in specs)
    each += LOGIT_BYTES * block * target.spec.vocab_size
    each += sum(4 * net.num_heads * net.head_dim * net.k_head_dim for net in target.spec.delta_nets)
    return fitting(room, each)


def fitting(room: float, each: float) -> list[int]:
    """Returns numbers of requests of `each` bytes that fit into `room`, the largest first; the least if none does."""
    return [count for count in SIZES if count * each <= room] or [SIZES[-1]]
