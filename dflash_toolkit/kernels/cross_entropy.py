"""Cross-entropy of stored logits and its gradient, in place, in Triton: one program a row, two passes over it."""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl
from torch import Tensor

from .launch import next_power_of_two

BLOCK = 4096  # columns at a time


@triton.jit(do_not_specialize=["V"])
def _cross_entropy_kernel(
    logits_p, labels_p, loss_p, correct_p, V, stride, BLOCK: tl.constexpr, GRADIENT: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    p_row = logits_p + row * stride
    o_v = tl.arange(0, BLOCK)
    label = tl.load(labels_p + row)
    at_label = tl.load(p_row + label).to(tl.float32)
    # every lane keeps its own softmax state, so that nothing is exchanged before the end
    b_top = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    b_total = tl.zeros([BLOCK], dtype=tl.float32)
    b_best = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, V, BLOCK):
        b_x = tl.load(p_row + start + o_v, mask=start + o_v < V, other=-float("inf")).to(tl.float32)
        b_best = tl.where(b_x > b_top, start + o_v, b_best)
        b_new = tl.maximum(b_top, b_x)
        b_safe = tl.where(b_new == -float("inf"), 0.0, b_new)  # a lane that has seen nothing yet
        b_total = b_total * tl.exp(b_top - b_safe) + tl.exp(b_x - b_safe)
        b_top = b_new
    top = tl.max(b_top, axis=0)
    normaliser = top + tl.log(tl.sum(b_total * tl.exp(b_top - top), axis=0))
    best = tl.min(tl.where(b_top == top, b_best, V), axis=0)  # of equal logits the first is the argmax
    tl.store(loss_p + row, normaliser - at_label)
    tl.store(correct_p + row, best == label)
    if GRADIENT:
        for start in range(0, V, BLOCK):
            mask = start + o_v < V
            b_x = tl.load(p_row + start + o_v, mask=mask, other=0.0).to(tl.float32)
            b_g = tl.exp(b_x - normaliser) - tl.where(start + o_v == label, 1.0, 0.0)
            tl.store(p_row + start + o_v, b_g.to(logits_p.dtype.element_ty), mask=mask)


def cross_entropy_(logits: Tensor, labels: Tensor, loss: Tensor, correct: Tensor, gradient: bool) -> None:
    """Loss [R] fp32 and argmax hit [R] bool of logits [R, V] in place of what `loss` and `correct` hold.

    With `gradient` the logits become d loss / d logits: softmax minus one-hot, rounded to their dtype.
    """
    rows, vocabulary = logits.shape
    block = min(BLOCK, next_power_of_two(vocabulary))
    _cross_entropy_kernel[(rows,)](
        logits, labels, loss, correct, vocabulary, logits.stride(0), BLOCK=block, GRADIENT=gradient, num_warps=8
    )
