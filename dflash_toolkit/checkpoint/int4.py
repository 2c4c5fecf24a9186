"""The forms in which checkpoints store INT4 weights, and their conversion to `GroupedInt4` one tensor at a time.

| form | numbers | scales | zero points |
|---|---|---|---|
| awq | int32 [K, N / 8]; bits 4 i are column ORDER[i] of eight | [groups, N] | int32 [groups, N / 8], as numbers |
| gptq | int32 [K / 8, N]; bits 4 i are row i of eight | [groups, N] | int32 [groups, N / 8], less one |
| gptq_v2 | the same | the same | the same, not less one |
| pack-quantized | int32 [N, K / 8]; bits 4 i are column i of eight | [N, groups] | int32 [N / 8, groups], or int8 |

The first three are those of AutoAWQ's "gemm" and of GPTQModel. The last is that of compressed-tensors, which stores
q + 8 and zero + 8; without zero points they are 8.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..config import UnsupportedModel
from ..kernels.formats import Format, Int4
from ..kernels.formats.int4 import SYMMETRIC_ZERO, ZERO_BITS, pack, quarter_of

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # order of the eight columns in an int32 of AWQ
SLICE = 1024  # columns or rows that are converted at a time; a multiple of all blocks
# last parts of the names of tensors -> what they hold
PARTS = {
    "qweight": "numbers", "weight_packed": "numbers", "scales": "scale", "weight_scale": "scale", "qzeros": "zero",
    "weight_zero_point": "zero", "g_idx": "order", "weight_g_idx": "order", "weight_shape": "shape",
}  # fmt: skip
VIEWS = {"numbers": "weight", "scale": "weight_scale", "zero": "weight_zero"}  # names of `Int4.tensors`
Converted = tuple[str, Callable[[Tensor], Tensor]]


def conversions(formats: Iterable[Format]) -> Callable[[str], Converted | None] | None:
    """Returns what maps the name of a stored tensor to that of a view, and converts it; None without INT4 weights.

    The map returns None for tensors in another format. The name is empty for tensors that are only checked.
    """
    form = next((each for each in formats if isinstance(each, Int4)), None)
    if form is None:
        return None

    def find(stored: str) -> Converted | None:
        module, _, last = stored.rpartition(".")
        part = PARTS.get(last)
        if part is None:
            return None
        if part in VIEWS:
            return f"{module}.{VIEWS[part]}", lambda tensor: CONVERT[part](tensor, form)
        if part == "order":
            return "", lambda tensor: _check_order(stored, tensor, form)
        return "", lambda tensor: tensor

    return find


def _check_order(stored: str, order: Tensor, form: Int4) -> Tensor:
    """Raises UnsupportedModel if the columns of a group are not adjacent."""
    group = form.group or len(order)
    if not torch.equal(order.long(), torch.arange(len(order), device=order.device) // group):
        raise UnsupportedModel(
            f"tensor {stored!r} sorts columns by activations (desc_act or actorder), which this engine does not "
            f"compute, but vLLM may (dflash-serve --engine vllm)"
        )
    return order


def _unpacked(words: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Returns the eight numbers of every int32, along dim 0 or 1; bits 4 i hold number order[i]."""
    parts: list[Tensor] = [words] * 8
    for i, place in enumerate(order):
        parts[place] = (words >> 4 * i & 15).to(torch.int16)
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


def _numbers(words: Tensor, form: Int4) -> Tensor:
    """Returns packed numbers, int16 [N, K / 4]."""
    by_rows = form.stored == "pack-quantized"
    k = 8 * words.shape[1] if by_rows else len(words) * (1 if form.stored == "awq" else 8)
    quarter = quarter_of(k, form.group or k)
    found = []
    for part in words.split(SLICE if by_rows or form.stored == "awq" else SLICE // 8):
        if by_rows:
            found.append(pack(_unpacked(part, 1), quarter))
        elif form.stored == "awq":
            found.append(pack(_unpacked(part, 1, ORDER).T, quarter))
        else:
            found.append(pack(_unpacked(part, 0).T, quarter))
    return torch.cat(found, 0 if by_rows else 1)


def _scale(scale: Tensor, form: Int4) -> Tensor:
    """Returns the high bytes of scales in fp32, uint8 [N, groups, 3]."""
    scale = scale if form.stored == "pack-quantized" else scale.T
    bits = (scale.float().contiguous().view(torch.int32) + (ZERO_BITS + 1) // 2) & ~ZERO_BITS  # rounds wider ones
    return bits.view(torch.uint8).unflatten(-1, (-1, 4))[..., 1:]


def _zero(zero: Tensor, form: Int4) -> Tensor:
    """Returns zero points, uint8 [N, groups]."""
    if form.stored == "pack-quantized":
        found = _unpacked(zero, 0) if zero.dtype == torch.int32 else zero.to(torch.int16) + SYMMETRIC_ZERO
    else:
        found = _unpacked(zero, 1, ORDER if form.stored == "awq" else tuple(range(8))).T
    return (found + (form.stored == "gptq") & 15).to(torch.uint8)


CONVERT = {"numbers": _numbers, "scale": _scale, "zero": _zero}
