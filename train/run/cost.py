"""Cost of a run. Before training: rows, steps, FLOPs and disk; once steps are timed: hours."""

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dflash_toolkit import DrafterConfig
from dflash_toolkit.models.dflash.network import Drafter
from dflash_toolkit.preflight import ANSWER_BYTES, check_space, disk_line, size

from ..config import TrainConfig
from ..objective.blocks import Blocks
from ..optim.optimizers import is_matrix, uses_muon
from ..responses.corpus import lengths_of
from ..responses.rows import Row

LONG_H = 12.0  # hours from which ways to shorten a run are printed


def resume_bytes(drafter: Drafter, config: TrainConfig, muon: bool | None = None) -> int:
    """Returns the bytes of a resume point: fp32 weights and their average, and moments (Muon one, AdamW two)."""
    if muon is None:
        muon = uses_muon(config, drafter.device.type == "cuda")
    averages = sum(p.numel() * (1 if muon and is_matrix(name, p) else 2) for name, p in drafter.named_parameters())
    weights = sum(p.numel() for p in drafter.parameters())
    return 4 * (weights * (2 if config.optim.ema else 1) + averages)


def checkpoint_bytes(drafter: Drafter, config: TrainConfig) -> int:
    """Returns the bytes of all checkpoints that exist at a time.

    A new resume point is written before the old one is removed, next to three drafters: best, export, and best or last.
    """
    fixed = sum(tensor.numel() for tensor in drafter.buffers())  # also in fp32 in a resume point
    weights = sum(p.numel() for p in drafter.parameters())
    return 2 * (resume_bytes(drafter, config) + 4 * fixed) + 3 * 2 * (weights + fixed)


def check_checkpoints(config: TrainConfig, shape: DrafterConfig, output: Path) -> None:
    """Raises UserError if the checkpoints of a run do not fit on the disk, counting what an earlier start has left."""
    there = sum(path.stat().st_size for path in output.rglob("*.*") if path.is_file())
    check_space(output, checkpoint_bytes(_without_weights(shape), config) - there, "the checkpoints of this run")


def before_responses(config: TrainConfig, shape: DrafterConfig, prompts: int, work: Path) -> list[str]:
    """Returns a line for each disk: the most that a run writes there, and what is free."""
    samples, longest = config.responses.samples, config.prompts.max_length
    answers = prompts * samples * min(config.responses.max_tokens, longest) * ANSWER_BYTES
    parts = {"responses": answers, "checkpoints": checkpoint_bytes(_without_weights(shape), config)}
    way_out = "lower prompts.max_prompts or responses.max_tokens"
    places = {work: parts}
    if config.run.features in ("disk", "hybrid"):
        width = 1 if config.run.feature_dtype == "float8" else 2
        folder = Path(config.run.feature_dir) if config.run.feature_dir else work
        width *= shape.feature_size + shape.hidden_size * config.loss.distribution
        places.setdefault(folder, {})["features"] = prompts * samples * longest * width
    return [disk_line(each, folder, way_out) for folder, each in places.items()]


def _without_weights(shape: DrafterConfig) -> Drafter:
    with torch.device("meta"):
        return Drafter(shape)


def before_training(
    config: TrainConfig, drafter: Drafter, rows: Sequence[Row], steps: int, epochs: float, features: int, work: Path
) -> list[str]:
    """Returns lines on rows, steps and disk.

    Args:
        steps: of the whole run; 0 if it ends by the clock.
        epochs: of the whole run.
        features: bytes of the target's hidden states of all rows.
        work: directory of the resume points.
    """
    tokens = int(np.minimum(lengths_of(rows), config.prompts.row_tokens).sum())
    how_long = f"{config.optim.minutes:g} minutes of training"
    if steps:
        how_long = f"{steps} steps, {epochs:.3g} epochs" if epochs >= 0.01 else f"{steps} steps"
    point, checkpoint = resume_bytes(drafter, config), 2 * sum(p.numel() for p in drafter.parameters())
    disk = checkpoint_bytes(drafter, config)
    where = "if they are kept"
    if config.run.features in ("disk", "hybrid"):
        where = "on disk"
        disk += 0 if config.run.feature_dir else features
    free = shutil.disk_usage(work).free
    short = "" if free >= disk else f": TOO LITTLE, the run needs up to {size(disk)}"
    return [
        f"training data: {len(rows)} rows, {tokens} tokens per epoch; {how_long}",
        f"disk: resume point {size(point)}, checkpoint {size(checkpoint)}, features {size(features)} {where}; "
        f"{size(free)} free in {work}{short}",
    ]


def once_measured(
    config: TrainConfig, steps: int, seconds: float, evaluations: int, memory: str, world: int
) -> list[str]:
    """Returns lines on the time that is left.

    Args:
        steps: steps left, of `seconds` each.
        evaluations: evaluations left; their time is not included.
        memory: peak memory, in words.
    """
    hours = steps * seconds / 3600
    more = f", plus {evaluations} evaluation{'s' * (evaluations > 1)} of held-out prompts" if evaluations else ""
    lines = [f"about {duration(3600 * hours)} of training left: {steps} steps of {seconds:.3g} s{more}; {memory}"]
    if hours > LONG_H and not config.optim.minutes:
        ways = [f"optim.epochs below {config.optim.passes}"] if not config.optim.steps else ["fewer optim.steps"]
        if not config.optim.steps:
            ways.append("prompts.max_prompts")
        ways.append("more GPUs (torchrun --nproc-per-node N)" if world == 1 else f"more GPUs than {world}")
        if config.run.features in ("auto", "online"):
            ways.append("stored features (run.features=disk, or a larger run.feature_cache_gb)")
        lines.append(f"to shorten it: {', '.join(ways)}, or optim.minutes=M for a run of M minutes")
    return lines


def duration(seconds: float) -> str:
    """Formats seconds: 3 h 20 min, 12 min, 40 s."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def drafter_step_flops(
    shape: DrafterConfig, context_tokens: int, block_rows: int, visible_pairs: int, head_rows: int, vocab: int
) -> float:
    """Returns the FLOPs of one forward and backward of the drafter and the frozen head after it, the numerator of MFU.

    A multiply-add is two FLOPs. Only matrix products are counted, and only necessary ones: no masked pairs, invalid
    blocks, padding or recomputation.

    A product of R rows with a matrix [I, O] is 2*R*I*O forward, and as much each for the gradients of the matrix and of
    the rows. `fc` reads frozen features without gradient, and the head's matrix has none:

        fc          4 * T * K*D * D
        context     6 * T * D * 2*G*H                           per layer
        block       6 * R * (2*N*H*D + 2*G*H*D + 3*I*D)         per layer
        attention   12 * N*H * P                                of all layers: QK', PV and four products backward
        head        4 * R' * D * V

    An architecture adds 6 FLOPs for each of its multiply-adds: per row in a layer, per R' slot in a selector.

    Args:
        context_tokens: T, tokens of all documents whose features are projected.
        block_rows: R, slots of the valid blocks, anchors included.
        visible_pairs: P, (query slot, visible key) pairs of one head of every layer; see `visible_pairs`.
        head_rows: R', supervised slots.
        vocab: V, rows of the head.
    """
    d, queries, keys = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    context = 6 * context_tokens * d * 2 * keys
    block = 6 * block_rows * d * (2 * queries + 2 * keys + 3 * shape.intermediate_size)
    attention = 12 * queries * visible_pairs
    fusion = 4 * context_tokens * shape.feature_size * d
    head = 4 * head_rows * d * vocab
    selector = 6 * head_rows * shape.architecture.selector_products(shape)
    block += 6 * block_rows * shape.architecture.layer_products(shape)
    return float(fusion + shape.num_layers * (context + block) + attention + head + selector)


def visible_pairs(blocks: Blocks, shape: DrafterConfig) -> Tensor:
    """Returns the number of (query slot, visible key) pairs over all layers, a scalar: of the context before the slot's
    anchor and its own block, as far as the layer sees."""
    before = blocks.positions[:, :, :1]  # the anchor's position in its document, [B, A, 1]
    slot = torch.arange(blocks.size, device=before.device)
    distance, pairs = slot[:, None] - slot, before.new_zeros(())
    for kind, layers in Counter(shape.layer_types).items():
        layer = shape.layer_types.index(kind)
        window = shape.window(layer)
        inside = distance >= 0 if shape.causal_inside_block(layer) else torch.ones_like(distance, dtype=torch.bool)
        context = before.expand(-1, -1, blocks.size)
        if window:
            inside = inside & (distance.abs() < window)
            context = context.minimum((window - 1 - slot).clamp(min=0))
        pairs = pairs + layers * ((context + inside.sum(1)) * blocks.valid[:, :, None]).sum()
    return pairs
