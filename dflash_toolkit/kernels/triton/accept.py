"""Acceptance and commit in Triton, one request per program."""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_two, pdl


@triton.jit
def _accept_kernel(
    draft_p, choice_p, active_p, lengths_p, last_p, forced_p, counts_p, tokens_p, S, stride_draft,
    BLOCK: tl.constexpr, FORCED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(0)
    o_s = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b_draft = tl.load(draft_p + i_b * stride_draft + o_s, mask=o_s < S - 1, other=-1)
    b_choice = tl.load(choice_p + i_b * S + o_s, mask=o_s < S, other=-2)
    if FORCED:
        accepted = tl.load(forced_p + i_b)
    else:
        accepted = tl.min(tl.where((o_s < S - 1) & (b_draft == b_choice), S - 1, o_s), axis=0)
        accepted = tl.minimum(accepted, S - 1)
    bonus = tl.sum(tl.where(o_s == accepted, b_choice, 0), axis=0)
    active = tl.load(active_p + i_b) != 0
    count = tl.where(active, accepted + 1, 0)
    tl.store(counts_p + i_b, count)
    tl.store(lengths_p + i_b, tl.load(lengths_p + i_b) + count)
    tl.store(last_p + i_b, bonus, mask=active)
    tl.store(tokens_p + i_b * S + o_s, tl.where((o_s == accepted) | (o_s == S - 1), bonus, b_draft), mask=o_s < S)


def accept(
    draft: Tensor,
    choice: Tensor,
    active: Tensor,
    lengths: Tensor,
    last_token: Tensor,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Accepts draft [B, S - 1] by choice [B, S]; returns counts int32 [B], tokens int64 [B, S]; advances the state."""
    batch, block = choice.shape
    counts = torch.empty(batch, dtype=torch.int32, device=choice.device)
    tokens = torch.empty(batch, block, dtype=torch.int64, device=choice.device)
    _accept_kernel[(batch,)](
        draft, choice, active, lengths, last_token, choice if forced is None else forced, counts, tokens,
        block, draft.stride(0), BLOCK=next_power_of_two(block), FORCED=forced is not None, num_warps=1, **pdl(choice),
    )  # fmt: skip
    return counts, tokens
