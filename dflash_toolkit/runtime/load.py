"""An engine from names: checkpoints go from disk to the device without a Hugging Face module in between."""

import sys
from typing import TYPE_CHECKING, Any

from ..checkpoint.readahead import read_ahead
from ..checkpoint.reader import locate
from .options import EngineOptions

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from ..models.spec import ModelSpec
    from .engine import Engine
    from .weights import DrafterWeights, TargetWeights


def load_engine(
    target: str,
    drafter: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    options: EngineOptions | None = None,
) -> "tuple[Engine, Any]":
    """Load a target and, unless it is None, its drafter; what is wrong shows before the large files are loaded.

    Args:
        target, drafter: Hugging Face id or directory.
        device: auto, cpu or cuda.
        dtype: auto, bfloat16, float16 or float32.

    Returns:
        The engine and the target's tokenizer.

    Raises:
        UserError: one line that says what does not fit, is missing or is not supported.
    """
    if f"{__package__}.engine" not in sys.modules:  # else nothing is left to import, and the loader reads at once
        read_ahead(drafter, target)
    # not above: this imports torch and transformers, seconds in which the disk is to read already
    from ..models.spec import ModelSpec
    from ..models.target import load_config, load_tokenizer, resolve_dtype, use_device
    from .engine import Engine, operations
    from .memory import check_heads

    config = load_config(target)
    spec = ModelSpec.of_target(config)
    where = use_device(device)
    precision = resolve_dtype(dtype, where)
    operations(where)
    draft = None
    if drafter is not None:
        draft = load_draft(drafter, config, where, precision)
        check_heads(draft.spec, where, precision)
    options = (options or EngineOptions()).fitted(spec, draft.config if draft else None, where)
    tokenizer = load_tokenizer(target)
    weights, stop_ids = load_target(target, config, spec, where, precision)
    return Engine(weights, draft, stop_ids, options), tokenizer


def load_draft(name: str, target: "PreTrainedConfig", device: "torch.device", dtype: "torch.dtype") -> "DrafterWeights":
    """The weights of a drafter that fits the target. Raises UserError."""
    from ..models.dflash.checkpoint import check_fits, load_drafter
    from .memory import for_the_drafter
    from .weights import DrafterWeights

    with for_the_drafter(device):
        module = load_drafter(name, device, dtype)
        check_fits(module.config, target)
        return DrafterWeights.of_module(module)


def load_target(
    name: str, config: "PreTrainedConfig", spec: "ModelSpec", device: "torch.device", dtype: "torch.dtype"
) -> "tuple[TargetWeights, tuple[int, ...]]":
    """The weights of a target and every end-of-sequence id it declares. Raises UserError."""
    from ..models.target import declared_stop_ids, load_generation_config
    from .memory import check_heads, check_weights
    from .weights import TargetWeights

    folder = locate("target", name)
    stop_ids = declared_stop_ids(config, load_generation_config(folder))
    check_heads(spec, device, dtype)
    check_weights(name, spec, device, dtype)
    return TargetWeights.load(folder, spec, device, dtype), stop_ids
