"""Makes configurations of a drafter with dimensions that all differ."""

from dflash_toolkit import DrafterConfig

SHAPE = {
    "hidden_size": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "vocab_size": 50,
    "intermediate_size": 20, "num_target_layers": 9, "target_layer_ids": (1, 4, 6), "mask_token_id": 49,
    "block_size": 5, "rope_theta": 1e4,
}  # fmt: skip


def make_config(**changes: object) -> DrafterConfig:
    return DrafterConfig(**(SHAPE | changes))
