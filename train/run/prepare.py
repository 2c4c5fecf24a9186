"""Checks a run's inputs before a model is loaded, so that mistakes do not show after hours of responses."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dflash_toolkit import DrafterConfig, UserError
from dflash_toolkit.config import to_mapping
from dflash_toolkit.fingerprint import drafter_digest, template_digest
from dflash_toolkit.models.device import resolve_device
from dflash_toolkit.models.dflash.checkpoint import check_fits
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.dflash.speculators import check_form
from dflash_toolkit.models.spec import context_limit
from dflash_toolkit.models.target_files import choose_mask_token, load_config, warn_of_penalty
from dflash_toolkit.preflight import check_target, make_folder
from dflash_toolkit.tracking import import_wandb

from ..config import TrainConfig, check_effects
from ..distributed.ranks import speaks
from ..distributed.zero import import_deepspeed
from ..optim.optimizers import peak_rate, uses_muon
from ..optim.schedule import packing
from ..prompts.split import PromptData, Reading
from ..responses.conversation import load_chat_tokenizer
from ..responses.generate import limit_of
from .cost import check_checkpoints
from .definition import WORK
from .memory import check_memory, memory_of
from .metrics_log import WANDB_OPTION
from .provenance import is_finished, provenance
from .start import Start, load_start, options_of
from .target_weights import Weights


@dataclass(frozen=True, slots=True)
class Prepared:
    """Inputs of a run before a model is loaded."""

    config: TrainConfig
    tokenizer: Any
    shape: DrafterConfig
    data: PromptData  # complete after the rows are built
    reading: Reading
    work: Path
    record: dict[str, Any]
    start: Start | None  # for `init_from`


def prepare(config: TrainConfig, given: Iterable[str], digest: str) -> Prepared | str:
    """Checks a run's inputs and returns them, or a message if the run is finished. Raises UserError."""
    output = Path(config.output_dir)
    if config.run.wandb:
        import_wandb(WANDB_OPTION)  # raises now, not after hours of responses
    if config.run.zero:
        import_deepspeed()
    device = resolve_device(config.device)
    packing(config, device)  # raises for options without effect on this device
    if config.run.attention == "flex" and device.type != "cuda":
        raise UserError("run.attention=flex has no backward on a CPU; leave it at auto")
    target_config = load_config(config.target)
    check_target(config.target)
    context = context_limit(target_config)
    limit = limit_of(config.prompts.max_length, context)
    length = min(config.prompts.max_length, context)  # no response is longer
    if config.prompts.row_tokens > max(context, config.prompts.max_length):
        raise UserError(
            f"prompts.join_to is {config.prompts.join_to}, but the target's context is {context} tokens; lower it"
        )
    config = replace(config, prompts=replace(config.prompts, max_length=length))
    tokenizer = load_chat_tokenizer(config.target, config.responses.thinking, config.rendering)
    if speaks():
        warn_of_penalty(config.target)
    start = None
    if config.init_from:
        start = load_start(config.init_from, target_config, config.drafter, given, output, config.run.seed)
        rate = peak_rate(config.optim, uses_muon(config, device.type == "cuda"), warm=True)
        config = replace(
            config,
            drafter=options_of(start.drafter.config),
            optim=replace(config.optim, learning_rate=rate),
        )
    shape = start.drafter.config if start else drafter_config(config, target_config, tokenizer)
    sizes: dict[str, Any] = {
        "kind": shape.architecture.kind,
        "layers": shape.num_layers,
        "taps": len(shape.target_layer_ids),
    }
    sizes |= config.drafter.sizes_in(shape)
    # with the target's values for defaults, since a resumed run compares numbers
    config = replace(
        config, drafter=replace(config.drafter, **sizes), optim=replace(config.optim, epochs=config.epochs)
    )
    config = config.with_loss_of(shape.architecture)
    check_effects(config)  # again, now that the kind is known
    check_fits(shape, target_config)
    if config.run.speculators:
        check_form(shape, output / "speculators")
    data = PromptData(digest)
    work = output / WORK
    make_folder(work, f"output {output}")
    record = provenance(config, shape, data, template_digest(tokenizer))
    record["architecture"] = next(iter(target_config.architectures or ()), "")
    if start:
        record["start"] = {"drafter": config.init_from, "sha256": drafter_digest(start.drafter)}
    if is_finished(output, record):
        return f"{output} holds this run, which is finished; give another --output to train again"
    if config.run.feature_dir and config.run.features in ("disk", "hybrid"):
        make_folder(Path(config.run.feature_dir), f"run.feature_dir {config.run.feature_dir}")
    check_checkpoints(config, shape, output)
    return Prepared(
        config, tokenizer, shape, data, Reading(config, tokenizer, limit, shape.vocab_size), work, record, start
    )


def fit_memory(prepared: Prepared, free: int, total: int, world: int) -> tuple[Prepared, str]:
    """Returns the run with a step that fits into a GPU, and a line if it is not the usual one. See `check_memory`."""
    config, target = prepared.config, load_config(prepared.config.target)
    memory = memory_of(
        config, target, Weights.of_target(target), prepared.shape, config.prompts.row_tokens, world=world
    )  # fmt: skip
    config, line = check_memory(config, memory, free, total)
    return replace(prepared, config=config, record=prepared.record | {"config": to_mapping(config)}), line


def drafter_config(config: TrainConfig, target: Any, tokenizer: Any) -> DrafterConfig:
    """Returns the drafter's configuration: the options, with the target's values as defaults.

    Raises:
        UserError: an impossible combination, or no unused row for the mask token.
    """
    given = config.drafter.mask_token_id
    mask = choose_mask_token(tokenizer, int(target.vocab_size)) if given is None else given
    if mask in {tokenizer.eos_token_id, tokenizer.pad_token_id}:
        raise UserError(f"drafter.mask_token_id {mask} is the end-of-sequence or padding token; choose an unused one")
    try:
        return drafter_shape(target, **(asdict(config.drafter) | {"mask_token_id": mask}))
    except ValueError as error:
        raise UserError(f"drafter: {error}") from error
