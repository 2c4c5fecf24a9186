"""Writes drafter checkpoints in the speculators format; `checkpoint.py` reads them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from ...config import UserError
from ..rope import warn_of_vllm
from .architecture import DFLASH
from .checkpoint import PROVENANCE_KEY, WEIGHTS, config_json, load_drafter, scales_of, staged
from .config import DrafterConfig
from .network import Drafter


def check_form(config: DrafterConfig, path: str | Path) -> None:
    """Checks that the format can hold such a drafter. Raises UserError as `save_speculators`."""
    if config.architecture is not DFLASH:
        raise UserError(
            f"{path}: the speculators form of {config.architecture.title} is not written; z-lab's is, and that of a "
            f"plain drafter (drafter.kind=dflash)"
        )
    causal = {config.causal_inside_block(layer) for layer in range(config.num_layers)}
    if len(causal) > 1 or (causal == {True} and "full_attention" in config.layer_types):
        raise UserError(
            f"{path}: the speculators form cannot hold causal layers, unless all are and have a sliding window"
        )
    if config.input_embedding_scale != 1.0:
        raise UserError(f"{path}: the speculators form cannot hold input_embedding_scale, which this drafter has")


def save_speculators(
    drafter: Drafter,
    path: str | Path,
    target: PreTrainedConfig,
    embedding: Tensor,
    head: Tensor,
    provenance: dict[str, Any] | None = None,
) -> None:
    """Writes the speculators format: layer ids + 1, nested layer config, copies of the target's embedding and head.

    Warns on stderr if vLLM computes the rope differently.

    Args:
        embedding: [V, D]; head: [V, D].
        provenance: as for `save_drafter`.

    Raises:
        UserError: as `save_drafter`; or causal layers that are not sliding, which this format cannot express, or causal
            and bidirectional layers together, which vLLM would read as all causal.
    """
    check_form(drafter.config, path)
    flat = config_json(drafter.config)
    layer_keys = [
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "hidden_act", "rms_norm_eps", "vocab_size", "max_position_embeddings", "rope_theta",
        "rope_parameters", "rope_scaling", "layer_types", "sliding_window", "attention_bias", "attention_dropout",
        "model_type", "tie_word_embeddings",
    ]  # fmt: skip
    proposal = {"proposal_type": "greedy", "speculative_tokens": drafter.config.block_size - 1}
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": str(target.name_or_path), "architectures": list(target.architectures or [])},
        },
        "transformer_layer_config": {key: flat[key] for key in layer_keys if key in flat},
        "draft_vocab_size": drafter.config.vocab_size,
        "block_size": drafter.config.block_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in drafter.config.target_layer_ids],
        "mask_token_id": drafter.config.mask_token_id,
        "sliding_window_non_causal": not drafter.config.causal_inside_block(0),
        "target_hidden_size": drafter.config.hidden_size,
        PROVENANCE_KEY: (provenance or {})
        | {"num_target_layers": drafter.config.num_target_layers}
        | scales_of(drafter.config),
    }
    tensors = {n: p.detach().to("cpu", torch.bfloat16).contiguous() for n, p in drafter.named_parameters()}
    tensors["embed_tokens.weight"] = embedding.detach().to("cpu", torch.bfloat16).clone()
    tensors["lm_head.weight"] = head.detach().to("cpu", torch.bfloat16).clone()
    with staged(Path(path)) as stage:
        save_file(tensors, stage / WEIGHTS, metadata={"format": "pt"})
        (stage / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        load_drafter(str(stage))
    warn_of_vllm(str(path), drafter.config.rope_scaling)
