"""Teacher-forced acceptance length on responses that were kept out of training: comparable at no cost of decoding."""

from dflash_toolkit.models.dflash.network import Drafter
from dflash_toolkit.models.target import Target

from ..config import TrainConfig
from ..features.source import FeatureSource
from ..objective.blocks import sample_blocks
from ..objective.loss import compute_loss, use_flex
from ..optim.schedule import PackedSchedule, Schedule, packing, rng_for
from ..responses.rows import Row


def teacher_forced_length(
    drafter: Drafter, target: Target, source: FeatureSource, rows: list[Row], config: TrainConfig
) -> float:
    """Mean over blocks of `rows` of 1 + the slots drafted right before the first wrong one.

    The blocks are drawn from the rows and the options of packing alone, so every drafter of one block size sees the
    same ones. An estimate of tau: real decoding takes its anchors where the last block ended.

    Args:
        rows: with at least one anchor each.
    """
    tokens, count = packing(config, target.device)
    flex = use_flex(config.run.attention, target.device)
    schedule: Schedule | PackedSchedule = Schedule(len(rows), config.optim.batch_size, epochs=1, steps=0, seed=0)
    if tokens:
        schedule = PackedSchedule([min(len(row.tokens), tokens) for row in rows], tokens, epochs=1, steps=0, seed=0)
    length, seen = 0.0, 0
    for step in range(schedule.total):
        features = source([rows[i] for i in schedule.indices(step)])
        blocks = sample_blocks(
            features, count or config.loss.anchors, config.drafter.block_size, drafter.config.mask_token_id,
            rng_for(0, 2, step), fixed=bool(tokens),
        )  # fmt: skip
        # with gradients, which nobody uses: so the step that was compiled for training serves here too
        result = compute_loss(drafter, target, features, blocks, config, flex)
        valid = int(blocks.valid.sum())
        length += valid * float(result.acceptance_length.detach())
        seen += valid
    return length / seen
