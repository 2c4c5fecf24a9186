"""Drafters with weights of 8 bits: the form of compressed-tensors, one scale for each row, which vLLM also reads.

Only the large matrices of the layers are in 8 bits. Reading turns them into 16 bits; `--draft-dtype fp8` casts again.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

FORMS = {  # dtype of a checkpoint: torch's, the scheme's name, its type of numbers, the largest one
    "fp8": (torch.float8_e4m3fn, "float-quantized", "float", 448.0),
    "int8": (torch.int8, "int-quantized", "int", 127.0),
}
MATRICES = re.compile(r"layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj\.weight")
KEPT = [r"re:.*fc$", r"re:.*_conv\..*", r"re:.*candidate_selector.*", r"re:.*injection.*", "lm_head"]  # in 16 bits
SCALE = "_scale"  # for the matrix NAME.weight: NAME.weight_scale [N, 1]
LEAST = 1e-12  # least scale


def narrowed(tensors: Mapping[str, Tensor], dtype: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors with the layers' matrices in `dtype`, a key of FORMS, and the `quantization_config`."""
    kind, form, number, most = FORMS[dtype]
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not MATRICES.fullmatch(name):
            found[name] = tensor
            continue
        matrix = tensor.float()
        scale = (matrix.abs().amax(1, keepdim=True) / most).clamp(min=LEAST)
        rows = matrix / scale
        found[name] = (rows.round() if number == "int" else rows).clamp(-most, most).to(kind)
        found[name + SCALE] = scale
    numbers = {"num_bits": 8, "type": number, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**numbers, "strategy": "channel", "dynamic": False},
        "input_activations": {**numbers, "strategy": "token", "dynamic": True},
    }
    config = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "ignore": KEPT}
    return found, {**config, "config_groups": {"group_0": group}}


def in_eight_bits(stated: Mapping[str, Any]) -> bool:
    """Returns whether a `quantization_config` has weights of 8 bits with one scale for a row or a matrix."""
    groups = list((stated.get("config_groups") or {}).values())
    forms = {(form, number) for _, form, number, _ in FORMS.values()}
    return stated.get("quant_method") == "compressed-tensors" and all(
        (stated.get("format"), weights.get("type")) in forms
        and weights.get("num_bits") == 8
        and weights.get("strategy") in ("channel", "tensor")
        and weights.get("symmetric", True)
        for weights in (group.get("weights") or {} for group in groups)
    ) and bool(groups)  # fmt: skip


def widened(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint with its matrices in bf16, and without their scales."""
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith((".weight_scale", ".input_scale"))}
    for name in [name for name in found if name + SCALE in tensors]:
        found[name] = (found[name].float() * tensors[name + SCALE].float().reshape(-1, 1)).bfloat16()
    return found
