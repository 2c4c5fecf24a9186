"""What layers read of their own embeddings of each token, in Triton."""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import Activation
from ..launch import next_power_of_two, pdl
from .pdl import start_next, wait_for_previous
from .tile import activate


@triton.jit
def _layer_inputs_kernel(
    id_p, table_p, projected_p, w_p, out_p, P, eps, root, scale, share, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    i_m, i_l = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.num_programs(1) * P
    o_p = tl.arange(0, BLOCK)
    mask = o_p < P
    wait_for_previous(PDL)
    start_next(PDL)
    b_w = tl.load(w_p + o_p, mask=mask, other=0.0)
    b_x = tl.load(projected_p + i_m * columns + i_l * P + o_p, mask=mask, other=0.0)
    b_e = tl.load(table_p + tl.load(id_p + i_m) * columns + i_l * P + o_p, mask=mask, other=0.0)
    dtype = b_x.dtype  # casts like separate operations would
    b_wide = (b_x.to(tl.float32) * scale).to(dtype).to(tl.float32)
    b_wide *= tl.rsqrt(tl.sum(b_wide * b_wide, axis=0) / P + eps)
    b_x = (b_wide.to(b_w.dtype) * b_w).to(dtype).to(tl.float32)
    b_x = (b_x + (b_e.to(tl.float32) * root).to(dtype).to(tl.float32)).to(dtype)
    tl.store(out_p + i_m * columns + i_l * P + o_p, (b_x.to(tl.float32) * share).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _gate_layer_input_kernel(
    part_p, input_p, out_p, M, P, stride, PARTS: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    i_m = tl.program_id(0).to(tl.int64)
    o_p = tl.arange(0, BLOCK)
    mask = o_p < P
    b_gate = tl.zeros([BLOCK], dtype=tl.float32)
    wait_for_previous(PDL)
    start_next(PDL)
    for i in tl.static_range(PARTS):  # in order, so that the result does not depend on scheduling
        b_gate += tl.load(part_p + (i * M + i_m) * P + o_p, mask=mask, other=0.0).to(tl.float32)
    b_x = tl.load(input_p + i_m * stride + o_p, mask=mask, other=0.0)
    b_gate = activate(b_gate.to(b_x.dtype).to(tl.float32), GELU).to(b_x.dtype)
    tl.store(out_p + i_m * P + o_p, b_gate * b_x, mask=mask)


def layer_inputs(ids: Tensor, table: Tensor, projected: Tensor, norm: Tensor, eps: float, scale: float) -> Tensor:
    """Returns the input of each token to every layer, [M, L, P]; see the reference."""
    (rows, columns), size = projected.shape, len(norm)
    out = projected.new_empty(rows, columns // size, size)
    root = float(torch.tensor(size**0.5, dtype=table.dtype))
    _layer_inputs_kernel[(rows, columns // size)](
        ids, table, projected, norm, out, size, eps, root, scale, 2.0**-0.5,
        BLOCK=next_power_of_two(size), num_warps=1, **pdl(out),
    )  # fmt: skip
    return out


def gate_layer_input(partial_sums: Tensor, inputs: Tensor, activation: Activation) -> Tensor:
    """Returns activation(gate) * inputs, [M, P], for partial sums [N, M, P] and columns of a wider matrix."""
    parts, rows, size = partial_sums.shape
    out = inputs.new_empty(rows, size)
    _gate_layer_input_kernel[(rows,)](
        partial_sums, inputs, out, rows, size, inputs.stride(0), PARTS=parts, BLOCK=next_power_of_two(size),
        GELU=activation == "gelu_tanh", num_warps=1, **pdl(out),
    )  # fmt: skip
    return out
