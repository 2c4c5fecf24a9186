"""Targets with INT4 weights, as their programs store them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_toolkit import Target

KEPT = ("gate", "shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba")  # modules in 16 bits
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's


def words(numbers: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Packs eight numbers along a dimension into an int32, number order[i] at bits 4 i."""
    rows = numbers.movedim(dim, 0).long()
    found = sum(rows[order[i] :: 8] << 4 * i for i in range(8))
    assert isinstance(found, Tensor)
    return (found - (found >> 31 << 32)).to(torch.int32).movedim(0, dim).contiguous()  # as signed numbers


def rounded(matrix: Tensor, group: int, symmetric: bool, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns numbers [N, K], scales and zero points [N, groups] of a matrix."""
    parts = matrix.float().unflatten(1, (-1, group))
    if symmetric:
        zero = torch.full(parts.shape[:2], 8)
        scale = (parts.abs().amax(2) / 7).to(scale_dtype)
    else:
        least, most = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scale = ((most - least) / 15).to(scale_dtype)
        zero = (-least / scale.float()).round().clamp(0, 15).long()
    numbers = ((parts / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15).long()
    return numbers.flatten(1), scale, zero


def stored_parts(form: str, matrix: Tensor, group: int, symmetric: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the tensors of a matrix by their last names, and its values in fp32."""
    packed = form == "pack-quantized"
    numbers, scale, zero = rounded(matrix, group, symmetric, torch.bfloat16 if packed else torch.float16)
    values = (numbers - zero.repeat_interleave(group, 1)) * scale.float().repeat_interleave(group, 1)
    if packed:
        parts = {"weight_packed": words(numbers, 1), "weight_scale": scale, "weight_shape": torch.tensor(matrix.shape)}
        return parts | ({} if symmetric else {"weight_zero_point": words(zero, 0)}), values
    parts = {"scales": scale.T.contiguous()}
    if form == "awq":
        return parts | {"qweight": words(numbers.T, 1, ORDER), "qzeros": words(zero.T, 1, ORDER)}, values
    less = (zero - int(form == "gptq")) % 16
    order = (torch.arange(matrix.shape[1]) // group).to(torch.int32)
    return parts | {"qweight": words(numbers.T, 0), "qzeros": words(less.T, 1), "g_idx": order}, values


def quantization(form: str, group: int, symmetric: bool, whole: bool) -> dict[str, Any]:
    """Returns the `quantization_config` of a form; `whole`: a row has one group."""
    size = -1 if whole else group
    if form == "awq":
        rules = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
        return rules | {"modules_to_not_convert": list(KEPT)}
    if form.startswith("gptq"):
        rules = {"quant_method": "gptq", "bits": 4, "group_size": size, "desc_act": False, "sym": symmetric}
        return rules | {"checkpoint_format": form, "lm_head": False}
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "channel" if whole else "group",
               "group_size": None if whole else group, "dynamic": False}  # fmt: skip
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    ignore = ["lm_head", *(f"re:.*{name}$" for name in ("mlp.gate", "shared_expert_gate"))]
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ignore}


def in_int4(
    target: Target, folder: Path, form: str, group: int, *, symmetric: bool = False, whole: bool = False
) -> None:
    """Writes a checkpoint; `whole`: the scales are of whole rows."""
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    for name, matrix in list(stored.items()):
        module = name.removesuffix(".weight")
        if matrix.dim() != 2 or "layers." not in name or module.rpartition(".")[2] in KEPT:
            continue
        del stored[name]
        parts, _ = stored_parts(form, matrix, matrix.shape[1] if whole else group, symmetric)
        stored |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": quantization(form, group, symmetric, whole)}
    path.write_text(json.dumps(config))
