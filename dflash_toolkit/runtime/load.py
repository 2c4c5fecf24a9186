"""Loads engines from checkpoints or from modules in memory."""

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..checkpoint.readahead import read_ahead
from ..checkpoint.reader import locate, stores_own_head, weight_files
from ..models.restrictions import Restrictions, restrictions
from .options import EngineOptions

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from ..models.dflash.config import DrafterConfig
    from ..models.dflash.network import Drafter
    from ..models.target import Target
    from .engine import Engine
    from .weights import DrafterWeights, TargetWeights


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an engine."""

    target: "TargetWeights"
    drafter: "DrafterWeights | None"
    stop_ids: tuple[int, ...]
    restrictions: Restrictions

    def engine(self, options: EngineOptions | None = None, tokenizer: Any = None) -> "Engine":
        """Returns an engine over these weights, which several engines may share. Raises UserError."""
        from .engine import Engine

        return Engine(self.target, self.drafter, self.stop_ids, options, tokenizer, self.restrictions)


def load_engine(
    target: "str | Target",
    drafter: "str | Drafter | None" = None,
    device: str = "auto",
    dtype: str = "auto",
    options: EngineOptions | None = None,
    chat_template: str | None = None,
) -> "tuple[Engine, Any]":
    """Loads a target and its drafter, and returns an engine and the target's tokenizer.

    Args:
        target: Hugging Face id or directory, or a `Target` in memory.
        drafter: the same for the drafter; None decodes plainly.
        device: auto, cpu, cuda, cuda:1, ...
        dtype: auto is bfloat16 on a GPU and float32 on a CPU.
        chat_template: a file. Answers end with its end of a response; None is the target's own template.

    Raises:
        UserError: no such model, a target or GPU that the engine does not support, too little memory.
    """
    options = options or EngineOptions()
    if not isinstance(target, str):
        return load_parts(target, drafter, device, dtype, options).engine(options, target.tokenizer), target.tokenizer
    if f"{__package__}.engine" not in sys.modules:  # otherwise there is no import to wait for
        read_ahead(drafter if isinstance(drafter, str) else None, target)
    # not above: it imports torch and transformers for seconds, while the disk already reads
    from ..models.target_files import load_config, load_tokenizer

    load_config(target)  # reports first if there is no such target
    tokenizer = load_tokenizer(target, chat_template=chat_template)
    parts = load_parts(target, drafter, device, dtype, options, tokenizer=tokenizer)
    return parts.engine(options, tokenizer), tokenizer


def load_parts(
    target: "str | Target",
    drafter: "str | Drafter | None" = None,
    device: str = "auto",
    dtype: str = "auto",
    options: EngineOptions | None = None,
    *,
    share: bool = False,
    tokenizer: Any = None,
) -> Parts:
    """Loads a target and, unless it is None, its drafter. Checks everything before it loads any weights.

    Args:
        target, drafter: Hugging Face id, directory, or module; weights of a module are copied.
        device: auto, cpu or cuda; ignored for a target in memory.
        dtype: auto, bfloat16, float16 or float32; a target in memory keeps its own.
        options: UserError if they do not fit.
        tokenizer: tokenizer of a target that is given by name; loaded if None.
        share: a target in memory uses the engine's weights from now on, so that memory holds them once.

    Raises:
        UserError: something does not fit, is missing or is not supported.
    """
    from ..models.device import resolve_dtype, use_device
    from ..models.spec import ModelSpec
    from ..models.target_files import load_config, load_generation_config, load_tokenizer
    from ..stop_tokens import stop_tokens
    from . import precompile
    from .engine import operations
    from .fit import Budget, fit, planner_for
    from .memory import check_heads, check_weights, for_the_drafter
    from .weights import DrafterWeights, TargetWeights

    if isinstance(target, str):
        config, where = load_config(target), use_device(device)
        precision = resolve_dtype(dtype, where)
    else:
        config, where, precision = target.config, target.device, target.dtype
    spec = ModelSpec.of_target(config)
    operations(where)
    drafts = None
    if drafter is not None:
        drafts = read_drafter_config(drafter, config) if isinstance(drafter, str) else drafter.config
    if options:
        options.fitted(spec, drafts, where)  # raises for an option that does not fit the pair
    for each in (spec, *([drafts.spec()] if drafts else [])):
        check_heads(each, where, precision)
    if isinstance(target, str):
        folder = locate("target", target)
        generation = load_generation_config(folder)
        stop_ids = stop_tokens(config, generation, tokenizer or load_tokenizer(target))
        forbidden = restrictions(target, generation, spec.vocab_size)
        if spec.tied_head and stores_own_head(weight_files(folder)):
            spec = replace(spec, tied_head=False)
        if where.type == "cuda":
            planner = planner_for(spec, drafts, where, precision)
            check_weights(target, planner, where, options)
            if options:  # the kernels compile while the weights are read
                fitted, _ = fit(options, planner, Budget.of(options, where).bytes, where)
                precompile.start(spec, drafts, precision, fitted, where)
    else:
        stop_ids, forbidden = target.stop_token_ids, target.restrictions
    draft = None
    if drafter is not None:
        module = read_drafter(drafter, config, where, precision) if isinstance(drafter, str) else drafter
        with for_the_drafter(where):
            draft = DrafterWeights.of_module(module.to(where, precision))
        del module  # before the target is loaded: the weights are copies
    if isinstance(target, str):
        if where.type == "cuda":
            check_weights(target, planner, where)  # with the memory that the drafter leaves
        weights = TargetWeights.load(folder, spec, where, precision)
    else:
        weights = (TargetWeights.shared_with if share else TargetWeights.of_module)(target.model, spec)
    return Parts(weights, draft, stop_ids, forbidden)


def read_drafter_config(name: str, target: "PreTrainedConfig") -> "DrafterConfig":
    """Returns the configuration of a drafter that fits the target. Raises UserError."""
    from ..models.dflash.checkpoint import check_fits, read_config

    config = read_config(locate("drafter", name))
    check_fits(config, target)
    return config


def read_drafter(name: str, target: "PreTrainedConfig", device: "torch.device", dtype: "torch.dtype") -> "Drafter":
    """Loads a drafter that fits the target. Raises UserError."""
    from ..models.dflash.checkpoint import check_fits, load_drafter
    from .memory import for_the_drafter

    with for_the_drafter(device):
        module = load_drafter(name, device, dtype)
    check_fits(module.config, target)
    return module
