"""What a run will cost, said before it has cost it: rows, tokens, steps, disk; then, once steps were timed, hours."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dflash_toolkit.models.dflash.network import Drafter

from ..config import TrainConfig
from ..optim.optimizers import is_matrix
from ..responses.corpus import lengths_of
from ..responses.rows import Row

GIB = 2**30
LONG_H = 12.0  # hours, from which on a run is told how it would be shorter


def resume_bytes(drafter: Drafter, config: TrainConfig, muon: bool | None = None) -> int:
    """Bytes of a resume point: fp32 weights and their average, the optimiser's averages (Muon one, AdamW two)."""
    optim = config.optim
    if muon is None:
        auto = drafter.device.type == "cuda" and not config.run.zero
        muon = optim.optimizer == "muon" or (optim.optimizer == "auto" and auto)
    averages = sum(p.numel() * (1 if muon and is_matrix(name, p) else 2) for name, p in drafter.named_parameters())
    weights = sum(p.numel() for p in drafter.parameters())
    return 4 * (weights * (2 if optim.ema else 1) + averages)


def before_training(
    config: TrainConfig, drafter: Drafter, rows: Sequence[Row], steps: int, epochs: float, features: int, work: Path
) -> list[str]:
    """Lines for the user.

    Args:
        steps: of the whole run; 0 where it goes by the clock.
        epochs: of the whole run, likewise.
        features: bytes of the target's hidden states of all rows.
        work: where resume points go.
    """
    tokens = int(np.minimum(lengths_of(rows), config.prompts.max_length).sum())
    how_long = f"{config.optim.minutes:g} minutes of training"
    if steps:
        how_long = f"{steps} steps, {epochs:.3g} epochs" if epochs >= 0.01 else f"{steps} steps"
    point, checkpoint = resume_bytes(drafter, config), 2 * sum(p.numel() for p in drafter.parameters())
    disk = 2 * point + 3 * checkpoint  # the point before it goes only then; the best so far, the export, one beside it
    where = "if they are kept"
    if config.run.features in ("disk", "hybrid"):
        where = "on disk"
        disk += 0 if config.run.feature_dir else features
    free = shutil.disk_usage(work).free
    short = "" if free >= disk else f": TOO LITTLE, of {size(disk)} that it takes at most"
    return [
        f"to train on: {len(rows)} rows, {tokens} tokens an epoch; {how_long}",
        f"disk: {size(point)} a resume point, {size(checkpoint)} a checkpoint; features {size(features)}, {where}; "
        f"{size(free)} free in {work}{short}",
    ]


def once_measured(
    config: TrainConfig, steps: int, seconds: float, evaluations: int, memory: str, world: int
) -> list[str]:
    """Lines for the user.

    Args:
        steps: that are left, of `seconds` each.
        evaluations: that are left, whose time is not known and not counted.
        memory: what was used at most, in words.
    """
    hours = steps * seconds / 3600
    beside = f", beside {evaluations} evaluation{'s' * (evaluations > 1)} of held-out prompts" if evaluations else ""
    lines = [f"about {duration(3600 * hours)} of training left: {steps} steps of {seconds:.3g} s{beside}; {memory}"]
    if hours > LONG_H and not config.optim.minutes:
        ways = [f"optim.epochs below {config.optim.passes}"] if not config.optim.steps else ["fewer optim.steps"]
        if not config.optim.steps:
            ways.append("prompts.max_prompts")
        ways.append("more GPUs (torchrun --nproc-per-node N)" if world == 1 else f"more GPUs than {world}")
        if config.run.features in ("auto", "online"):
            ways.append("features that are kept (run.features=disk, or a larger run.feature_cache_gb)")
        lines.append(f"that is long; shorter with: {', '.join(ways)}, or optim.minutes=M for what M minutes give")
    return lines


def size(count: float) -> str:
    """Bytes for people."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.2g} MiB"


def duration(seconds: float) -> str:
    """Seconds for people: 3 h 20 min, 12 min, 40 s."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
