"""The masks of grammars, in Triton: one program handles a piece of one row's logits."""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_two, pdl

BLOCK = 4096  # columns


@triton.jit
def _mask_kernel(logits_p, masks_p, at_p, V, WORDS, BLOCK: tl.constexpr, PDL: tl.constexpr):
    i_m, i_v = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.load(at_p + i_m).to(tl.int64)
    if at >= 0:
        o_v = i_v * BLOCK + tl.arange(0, BLOCK)
        b_word = tl.load(masks_p + at * WORDS + o_v // 32, mask=o_v < V, other=0)
        forbidden = ((b_word >> (o_v % 32)) & 1) == 0
        tl.store(logits_p + i_m * V + o_v, -float("inf"), mask=(o_v < V) & forbidden)


def mask_logits_(logits: Tensor, masks: Tensor, at: Tensor) -> None:
    """Sets logits [M, V] that the masks int32 [N, words] forbid to -inf; `at` int32 [M], -1 for rows without mask."""
    m, vocab = logits.shape
    block = min(BLOCK, next_power_of_two(vocab))
    _mask_kernel[(m, -(-vocab // block))](
        logits, masks, at, vocab, masks.shape[1], BLOCK=block, **pdl(logits)
    )  # fmt: skip
