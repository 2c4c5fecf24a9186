"""The weights of quantized checkpoints in 16 or 32 bits, for modules of transformers, which cannot read them.

The engine multiplies the same numbers.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..config import UserError
from ..kernels.formats import Format, Int4
from .int4 import conversions
from .reader import CACHE_SCALES, each_tensor


def dense_tensors(what: str, files: Sequence[Path], form: Format, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the tensors of files by the names that they have in a checkpoint that is not quantized.

    Args:
        form: of the quantized matrices: INT4, or FP8 with a scale for a matrix or for each of its rows.

    Raises:
        UserError: see `each_tensor`; a matrix lacks a part.
        UnsupportedModel: a matrix has its columns in another order.
    """
    convert_name, found, parts = conversions([form]), dict[str, Tensor](), dict[str, dict[str, Tensor]]()

    def take(stored: str, read: Callable[[str], Tensor]) -> None:
        tensor, converted = read(stored), convert_name(stored) if convert_name else None
        name = stored
        if converted is not None:
            name, convert = converted
            tensor = convert(tensor)
        matrix, _, part = name.rpartition(".weight")
        if matrix and (converted is not None or part == "_scale" or tensor.itemsize == 1):
            parts.setdefault(f"{matrix}.weight", {})[name] = tensor
        elif name and not name.endswith((".input_scale", *CACHE_SCALES)):
            found[name] = tensor

    each_tensor(what, files, take)
    for matrix in list(parts):
        found[matrix] = _dense(what, matrix, parts.pop(matrix), form).to(dtype)
    return found


def _dense(what: str, matrix: str, held: dict[str, Tensor], form: Format) -> Tensor:
    """Returns the values of a matrix in fp32."""
    numbers, scale = held.get(matrix), held.get(f"{matrix}_scale")
    if numbers is not None and scale is not None and not isinstance(form, Int4):
        return numbers.float() * scale.float().reshape(-1, 1)
    if numbers is not None and isinstance(form, Int4):
        weight = form.empty(len(numbers), 4 * numbers.shape[1], new=torch.empty)
        views = form.tensors(matrix, weight)
        if views.keys() == held.keys():
            for name, view in views.items():
                view.copy_(held[name])
            return weight.dense(torch.float32)
    raise UserError(f"{what}: the numbers, the scales or the zero points of {matrix!r} are missing")
