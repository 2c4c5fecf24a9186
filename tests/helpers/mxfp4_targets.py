"""Targets with MXFP4 experts."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")


def random_mxfp4_(folder: Path) -> None:
    """Replaces the experts of a gpt-oss checkpoint with random ones in the form of the published checkpoints."""
    file, dice = folder / "model.safetensors", torch.Generator().manual_seed(0)
    stored = load_file(file)
    for name in [name for name in stored if name.endswith(EXPERTS)]:
        count, columns, rows = stored.pop(name).shape
        stored[f"{name}_blocks"] = torch.empty(count, rows, columns // 32, 16, dtype=torch.uint8).random_(
            generator=dice
        )
        scales = torch.empty(count, rows, columns // 32, dtype=torch.uint8)
        stored[f"{name}_scales"] = scales.random_(122, 126, generator=dice)
    save_file(stored, file, metadata={"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    form = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": form}))
