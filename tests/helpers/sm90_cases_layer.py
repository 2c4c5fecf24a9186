"""The persistent layer kernels and head for Qwen3-8B and Qwen2.5-0.5B, with few and the most rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dflash_toolkit.kernels.formats import RowScaledFp8, Weight
from dflash_toolkit.kernels.hopper import conv_layer, head, layer

SHAPES = {  # D, attention width, FFN, qkv
    "8B": (4096, 4096, 12288, 6144),
    "0.5B": (896, 896, 4864, 1152),
}


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def plain(model: str, rows: int, fp8: bool, last: bool) -> Callable[[], object]:
    d, width, ffn, qkv = SHAPES[model]

    def weight(n: int, k: int) -> Weight:
        return RowScaledFp8.of(bf16(n, k)) if fp8 else bf16(n, k)

    matrices = (weight(d, width), bf16(d), weight(2 * ffn, d), weight(d, ffn), bf16(d))
    tap = None if last else bf16(rows, 3 * d)[:, d : 2 * d]
    given = (bf16(rows, d), bf16(rows, width), *matrices, None if last else weight(qkv, d), 1e-6, tap)
    return lambda: layer.launch_layer(*given)


def convolved(model: str, rows: int, fp8: bool, last: bool) -> Callable[[], object]:
    """A layer of DFlash 2, of two taps and groups of 16 channels."""
    d, width, ffn, qkv = SHAPES[model]

    def weight(n: int, k: int) -> Weight:
        return RowScaledFp8.of(bf16(n, k)) if fp8 else bf16(n, k)

    def convolution() -> tuple[Tensor, Weight]:
        return bf16(2, 2, d), weight(2 * side, d)

    side = 2 * d // 16
    behind = bf16(8, rows, 2 * side).float()[:, :, side:]
    given: tuple[Any, ...] = (bf16(rows, d), bf16(rows, width), behind, bf16(2, d), weight(d, width), bf16(d))
    given += (convolution(), weight(2 * ffn, d), weight(d, ffn), bf16(d))
    given += (None, None) if last else (convolution(), weight(qkv, d))
    return lambda: conv_layer.launch_conv_layer(*given, 1e-6, 16)


CASES = {
    f"{model}{' in fp8' if fp8 else ''}, {rows} rows{', last' if last else ''}, {launch.__name__}": launch(
        model, rows, fp8, last
    )
    for launch in (plain, convolved)
    for model, rows, fp8, last in (
        ("8B", 128, False, False), ("0.5B", 16, False, False),
        ("8B", 1, True, True), ("8B", 100, True, False),
    )
} | {
    f"head, {rows} rows": lambda rows=rows: head.launch_head(bf16(rows, 4096), bf16(151_936, 4096)) for rows in (1, 128)
}  # fmt: skip
