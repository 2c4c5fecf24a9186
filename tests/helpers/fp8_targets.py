"""Targets with FP8 weights."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_toolkit import Target
from dflash_toolkit.kernels import reference
from dflash_toolkit.kernels.formats import BlockScaledFp8
from dflash_toolkit.models import target as target_module

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
}


@contextlib.contextmanager
def in_modules(folder: Path) -> Iterator[Target]:
    """Loads the FP8 modules of transformers; torch replaces their kernel, which would come from the hub."""
    pytest.importorskip("accelerate")
    from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear

    def forward(self: Any, x: Tensor) -> Tensor:
        return rows_of_reference(x, BlockScaledFp8(self.weight, self.weight_scale_inv), self.bias)

    def of_expert(self: Any, x: Tensor, weight: Tensor, scale: Tensor, activation_scale: None = None) -> Tensor:
        return reference.linear(x, BlockScaledFp8(weight, scale))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FP8Linear, "forward", forward)
        patch.setattr(FP8Experts, "linear", of_expert)
        patch.setattr(target_module, "_computes_fp8", lambda *_: True)
        with pytest.MonkeyPatch.context() as gpu:  # without one transformers would dequantize
            gpu.setattr(torch.cuda, "is_available", lambda: True)
            gpu.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
            found = Target.load(str(folder), "cpu")
        mlp = found.layers[0].mlp
        assert isinstance(getattr(mlp, "down_proj", None), FP8Linear) or isinstance(mlp.experts, FP8Experts)
        found.model.config._experts_implementation = "eager"  # one after the other
        assert found.dtype == torch.float32
        yield found


HYBRID = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "shared_expert_intermediate_size": 128,
}


BY_KEY_HEADS = HYBRID | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}  # heads are blocks


GEMMA = {"layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 128}
CHANGES = {"Qwen3-Next": BY_KEY_HEADS, "Qwen3.5": HYBRID, "Qwen3.5-MoE": HYBRID, "Gemma 4": GEMMA}
CHANGES["Llama 4"] = {"intermediate_size": 128, "intermediate_size_mlp": 256, "moe_layers": [0, 3]}
CHANGES["Qwen2-MoE"] = {"shared_expert_intermediate_size": 256}


def rows_of_reference(x: Tensor, weight: BlockScaledFp8, bias: Tensor | None = None) -> Tensor:
    return reference.linear(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


def in_fp8(target: Target, folder: Path) -> dict[str, torch.Tensor]:
    """Writes a checkpoint in the format of Qwen3-*-FP8; returns the dequantized weights."""
    block = 128
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    stored, numbers = load_file(folder / "model.safetensors"), {}
    for name, weight in list(stored.items()):
        if weight.dim() != 2 or "layers." not in name or any(f".{kept}." in name for kept in IN_16_BITS):
            continue
        rows, columns = weight.shape
        padded = F.pad(weight.float(), (0, -columns % block, 0, -rows % block))
        tiles = padded.view(-(-rows // block), block, -(-columns // block), block)
        scale = tiles.abs().amax((1, 3)) / 448
        rounded = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        cut = (slice(rows), slice(columns))
        stored[name] = rounded.reshape(padded.shape)[cut].contiguous()
        stored[f"{name}_scale_inv"] = scale
        numbers[name] = (rounded.float() * scale[:, None, :, None]).reshape(padded.shape)[cut]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    form = {"quant_method": "fp8", "weight_block_size": [block, block], "activation_scheme": "dynamic"}
    form |= {"modules_to_not_convert": ["lm_head", *IN_16_BITS]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": form}))
    return numbers


IN_16_BITS = ("gate", "shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba")
