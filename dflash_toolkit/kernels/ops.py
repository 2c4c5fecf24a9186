"""The operations of a decoding step and of the loss, and the choice of their implementation for a device."""

import torch

from . import reference as definitions
from .features import LEAST_CAPABILITY, features_of


class Reference:
    """All operations in plain torch; `reference` documents each with the shapes of its arguments.

    A row's result does not depend on the other rows (batch-invariant), up to MAX_ROWS rows.
    `Gpu` overrides the operations that have a kernel. mypy compares the signatures.
    """

    linear = staticmethod(definitions.linear)
    linear_split_k = staticmethod(definitions.linear_split_k)
    linear_swiglu = staticmethod(definitions.linear_swiglu)
    linear_swiglu_quantized = staticmethod(definitions.linear_swiglu_quantized)
    linear_argmax = staticmethod(definitions.linear_argmax)
    linear_top = staticmethod(definitions.linear_top)
    linear_top_lse = staticmethod(definitions.linear_top_lse)
    walk = staticmethod(definitions.walk)
    sampled_walk = staticmethod(definitions.sampled_walk)
    walk_pairs = staticmethod(definitions.walk_pairs)
    sampled_walk_pairs = staticmethod(definitions.sampled_walk_pairs)
    slot_messages = staticmethod(definitions.slot_messages)
    pair_messages = staticmethod(definitions.pair_messages)
    inject_rms_norm = staticmethod(definitions.inject_rms_norm)
    pair_scores = staticmethod(definitions.pair_scores)
    linear_many_rows = staticmethod(definitions.linear_many_rows)
    block_conv = staticmethod(definitions.block_conv)
    add_rms_norm = staticmethod(definitions.add_rms_norm)
    add_rms_norm_quantized = staticmethod(definitions.add_rms_norm_quantized)
    conv_add_rms_norm = staticmethod(definitions.conv_add_rms_norm)
    fuses_post_attention = staticmethod(definitions.fuses_post_attention)
    fused_post_attention = staticmethod(definitions.fused_post_attention)
    fuses_conv_post_attention = staticmethod(definitions.fuses_conv_post_attention)
    fused_conv_post_attention = staticmethod(definitions.fused_conv_post_attention)
    top_experts = staticmethod(definitions.top_experts)
    experts_mlp = staticmethod(definitions.experts_mlp)
    layer_inputs = staticmethod(definitions.layer_inputs)
    gate_layer_input = staticmethod(definitions.gate_layer_input)
    norm_queries_keys = staticmethod(definitions.norm_queries_keys)
    rope_write = staticmethod(definitions.rope_write)
    gate_heads = staticmethod(definitions.gate_heads)
    block_attention = staticmethod(definitions.block_attention)
    context_write = staticmethod(definitions.context_write)
    accept = staticmethod(definitions.accept)
    draft_children = staticmethod(definitions.draft_children)
    grow_trees = staticmethod(definitions.grow_trees)
    cut_trees = staticmethod(definitions.cut_trees)
    expected_accepted = staticmethod(definitions.expected_accepted)
    tree_attention = staticmethod(definitions.tree_attention)
    chain_attention = staticmethod(definitions.chain_attention)
    accept_trees = staticmethod(definitions.accept_trees)
    move_rows_ = staticmethod(definitions.move_rows_)
    pack_tree_results = staticmethod(definitions.pack_tree_results)
    mask_logits_ = staticmethod(definitions.mask_logits_)
    sample = staticmethod(definitions.sample)
    rejection_sample = staticmethod(definitions.rejection_sample)
    delta_inputs = staticmethod(definitions.delta_inputs)
    delta_rule = staticmethod(definitions.delta_rule)
    delta_chunk = staticmethod(definitions.delta_chunk)
    fold_ = staticmethod(definitions.fold_)
    tree_delta_inputs = staticmethod(definitions.tree_delta_inputs)
    tree_delta_rule = staticmethod(definitions.tree_delta_rule)
    keep_path_ = staticmethod(definitions.keep_path_)
    gated_rms_norm = staticmethod(definitions.gated_rms_norm)
    gated_rms_norm_quantized = staticmethod(definitions.gated_rms_norm_quantized)
    row_top = staticmethod(definitions.row_top)
    row_loss_ = staticmethod(definitions.row_loss_)


Ops = Reference  # the type of both


def ops_for(device: torch.device) -> Ops:
    """Returns the operations of a device: kernels on a CUDA GPU, their definitions elsewhere.

    Raises:
        ModuleNotFoundError: triton is not installed and the device is a GPU.
    """
    if device.type != "cuda":
        return Reference()
    from .gpu import Gpu  # needs triton

    return Gpu()


def unsupported(device: torch.device) -> str | None:
    """Returns why decoding steps do not run on a device, or None; the loss needs less."""
    if device.type != "cuda":
        return None
    try:
        capability = features_of(device).capability
    except ValueError as error:
        return str(error)
    if capability < LEAST_CAPABILITY:
        name, (major, minor) = torch.cuda.get_device_name(device), capability
        return (
            f"{name} has compute capability {major}.{minor}; the runtime needs 8.0 or higher "
            "for bfloat16 matrix products and asynchronous copies"
        )
    try:
        ops_for(device)
    except ModuleNotFoundError:
        return "triton is not installed; install it with: pip install 'dflash-toolkit[gpu]'"
    return None


def unsupported_heads(device: torch.device, width: int, dtype: torch.dtype) -> str | None:
    """Returns the requirement of the attention kernels that this device lacks for this head width, or None."""
    if device.type != "cuda":
        return None
    from .triton.attention import cut_for  # needs triton

    try:
        cut_for(width, dtype.itemsize, features_of(device).shared_memory)
    except ValueError as error:
        return str(error)
    return None
