"""Checkpoints and command lines for vLLM and SGLang."""

import json
from pathlib import Path
from typing import Any

from dflash_toolkit.command_line import given_values
from dflash_toolkit.config import from_mapping
from dflash_toolkit.serve import external
from dflash_toolkit.serve.config import ServeConfig

NEWEST = {"vllm": "0.33.0", "sglang": "0.5.23"}

TARGET = {
    "model_type": "qwen3_5_moe",  # not supported by the built-in engine
    "text_config": {"hidden_size": 64, "num_hidden_layers": 40, "vocab_size": 512, "num_attention_heads": 12},
}

DFLASH = {
    "architectures": ["DFlashDraftModel"], "hidden_size": 64, "vocab_size": 512, "num_target_layers": 40,
    "num_attention_heads": 8, "layer_types": ["full_attention"], "is_causal": False, "block_size": 16,
    "dflash_config": {"target_layer_ids": [1, 5], "mask_token_id": 500, "block_size": 16},
}  # fmt: skip

BOTH = {"block_size": 8, "conv_kernel_size": 2, "selector_rank": 256}

DFLASH2 = DFLASH | {"architectures": ["DFlash2DraftModel"], "dflash_config": BOTH}

SPECULATORS = {
    "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "block_size": 8, "mask_token_id": 500,
    "aux_hidden_state_layer_ids": [2, 6], "transformer_layer_config": {"hidden_size": 64, "vocab_size": 512},
}  # fmt: skip


def folder(path: Path, values: dict[str, Any]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(values))
    return str(path)


def parse(*argv: str) -> tuple[ServeConfig, Any]:
    given, source = given_values(ServeConfig, argv, "dflash-serve", "")
    return from_mapping(ServeConfig, given, source), given


def command(*argv: str, version: str | None = None, passed: tuple[str, ...] = ()) -> list[str]:
    """Returns the arguments for the Python of the other engine that the options name."""
    config, given = parse(*argv)
    engine = external.BY_NAME[config.external.engine]
    return external.command(engine, config, given, version or NEWEST[engine.name], passed)
