"""Training and serving compute the same thing, and every silent failure of the contract would be noticed."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MASK, make_dflash2, make_drafter, make_target
from training_runs import run_of

from dflash_toolkit import Drafter, SamplingParams, Target, generate, load_drafter, save_drafter
from dflash_toolkit.decode import propose
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.features.source import FeatureSource
from dflash_toolkit.train.loop import train
from dflash_toolkit.train.objective.blocks import Blocks, Features, sample_blocks
from dflash_toolkit.train.objective.loss import masks_of
from dflash_toolkit.train.responses.rows import Row
from dflash_toolkit.train.training_options import DrafterOptions, LossOptions, OptimOptions, RunOptions

PROMPT = list(range(40, 60))
Masks = dict[str, torch.Tensor]
ROWS = [Row(0, 20, torch.randint(0, 250, (60,), generator=torch.Generator().manual_seed(3)).tolist()),
        Row(1, 9, torch.randint(0, 250, (31,), generator=torch.Generator().manual_seed(4)).tolist())]  # fmt: skip


def trained_hidden(target: Target, drafter: Drafter, f: Features, blocks: Blocks, masks: Masks) -> torch.Tensor:
    """Hidden states [B, A, S, D] by the trainer's path: all blocks at once under a mask."""
    context = drafter.context_kv(f.hidden, f.positions)
    hidden = drafter(target.embed(blocks.inputs.flatten(1)), blocks.positions.flatten(1), context, masks)
    return hidden.view(*blocks.inputs.shape, -1)


@functools.cache  # the same for every test of a pair
def served_hidden(target: Target, drafter: Drafter, tokens: tuple[int, ...], anchor: int) -> torch.Tensor:
    """Hidden states [S, D] by decoding's path: one block, context strictly before it, cached in two pieces."""
    taps = drafter.config.target_layer_ids
    features = target.forward(torch.tensor([tokens[:anchor]]), taps=taps).features
    assert features is not None
    cut = anchor // 2
    positions = torch.arange(anchor)[None]
    context = drafter.context_kv(features[:, :cut].clone(), positions[:, :cut]).append(
        drafter.context_kv(features[:, cut:].clone(), positions[:, cut:])
    )
    size = drafter.config.block_size
    ids = torch.tensor([[tokens[anchor]] + [drafter.config.mask_token_id] * (size - 1)])
    return drafter(target.embed(ids), torch.arange(anchor, anchor + size)[None], context)[0]


SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWS = {"layers": 5, "layer_types": (*[SLIDING] * 4, FULL), "sliding_window": 12}
SIGHTS: dict[str, dict[str, Any] | None] = {
    "full": {}, "4 sliding, 1 full": WINDOWS, "sliding ones causal": WINDOWS | {"is_causal": None},
    "all causal": {"is_causal": True}, "DFlash 2": None,
}  # fmt: skip


@pytest.fixture(scope="module", params=SIGHTS)
def pair(request: pytest.FixtureRequest) -> tuple[Target, Drafter]:
    target = make_target()
    sight = SIGHTS[request.param]
    return target, make_dflash2(target) if sight is None else make_drafter(target, **sight)


def batch(target: Target, drafter: Drafter) -> tuple[Features, Blocks]:
    f = FeatureSource(target, drafter.config.target_layer_ids, 100)(ROWS)
    return f, sample_blocks(f, 12, drafter.config.block_size, drafter.config.mask_token_id, torch.Generator())


@torch.no_grad()
def largest_gap(target: Target, drafter: Drafter, hidden: torch.Tensor, blocks: Blocks) -> float:
    places = blocks.valid.nonzero().tolist()
    assert len(places) >= 20
    served = [served_hidden(target, drafter, tuple(ROWS[r].tokens), int(blocks.anchor[r, a])) for r, a in places]
    return max(float((hidden[r, a] - own).abs().max()) for (r, a), own in zip(places, served, strict=True))


@torch.no_grad()
def test_a_block_in_training_is_the_block_that_decoding_drafts(pair: tuple[Target, Drafter]) -> None:
    target, drafter = pair
    f, blocks = batch(target, drafter)
    hidden = trained_hidden(target, drafter, f, blocks, masks_of(drafter.config, f, blocks, False))
    assert largest_gap(target, drafter, hidden, blocks) < 1e-4


@torch.no_grad()
def test_packed_documents_draft_like_separate_rows(pair: tuple[Target, Drafter]) -> None:
    target, drafter = pair
    alone = [FeatureSource(target, drafter.config.target_layer_ids, 100)([row]) for row in ROWS]
    packed = Features(
        *(torch.cat([getattr(f, name) for f in alone], 1) for name in ("tokens", "hidden", "supervised")),
        document=torch.cat([alone[0].document, alone[1].document + 1], 1),
        positions=torch.cat([f.positions for f in alone], 1),
    )
    config = drafter.config
    blocks = sample_blocks(packed, 60, config.block_size, config.mask_token_id, torch.Generator())
    hidden = trained_hidden(target, drafter, packed, blocks, masks_of(drafter.config, packed, blocks, False))
    first = len(ROWS[0].tokens)
    assert 0 < int((blocks.anchor < first).sum()) < blocks.anchor.shape[1] == 39 + 21
    for a, anchor in enumerate(blocks.anchor[0].tolist()):
        tokens, at = (ROWS[0].tokens, anchor) if anchor < first else (ROWS[1].tokens, anchor - first)
        assert torch.allclose(hidden[0, a], served_hidden(target, drafter, tuple(tokens), at), atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("fault", ["anchor visible", "blocks mixed", "positions", "layer id", "theta", "mask row"])
def test_parity_check_detects_each_known_fault(pair: tuple[Target, Drafter], fault: str) -> None:
    target, drafter = pair
    f, blocks = batch(target, drafter)
    masks = masks_of(drafter.config, f, blocks, False)
    trainer = drafter
    if fault == "anchor visible":
        anchors = blocks.anchor.repeat_interleave(blocks.size, 1)[:, None, :, None]
        for mask in masks.values():
            mask.scatter_(3, anchors, torch.ones_like(anchors, dtype=torch.bool))
    elif fault == "blocks mixed":
        for mask in masks.values():
            mask[:, :, :, f.tokens.shape[1] :] = True
    elif fault == "positions":
        blocks = replace(blocks, positions=blocks.positions + 1)
    elif fault == "mask row":
        blocks = replace(blocks, inputs=torch.where(blocks.inputs == MASK, MASK - 1, blocks.inputs))
    else:
        shifted = tuple(i + 1 for i in drafter.config.target_layer_ids)
        change = {"rope_theta": 1e6} if fault == "theta" else {"target_layer_ids": shifted}
        trainer = Drafter(replace(drafter.config, **change))
        trainer.load_state_dict(drafter.state_dict())
        f = FeatureSource(target, trainer.config.target_layer_ids, 100)(ROWS)
    assert largest_gap(target, drafter, trained_hidden(target, trainer, f, blocks, masks), blocks) > 1e-2


@torch.no_grad()
def test_the_export_computes_the_same_as_the_trained_module(pair: tuple[Target, Drafter], tmp_path: Path) -> None:
    target, drafter = pair
    save_drafter(drafter, tmp_path)
    exported = load_drafter(str(tmp_path), dtype=torch.float32)
    rounded = Drafter(drafter.config)
    rounded.load_state_dict({n: p.bfloat16().float() for n, p in drafter.state_dict().items()})
    f, blocks = batch(target, drafter)
    masks = masks_of(drafter.config, f, blocks, False)
    a, b = (target.head(trained_hidden(target, d, f, blocks, masks)) for d in (rounded, exported))
    assert torch.equal(a, b)


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Drafter]:
    """A drafter trained on the target's one answer to PROMPT until that is memorised."""
    torch.set_num_threads(1)
    target = make_target()
    answer = generate(target, None, PROMPT, SamplingParams(max_tokens=64, ignore_eos=True)).tokens
    assert len(set(answer)) > 20, "a varied answer"
    config = TrainConfig(
        target="tiny", drafter=DrafterOptions(block_size=8), loss=LossOptions(anchors=64),
        optim=OptimOptions(steps=70, batch_size=1, learning_rate=7e-3),
        run=RunOptions(feature_cache_gb=1, log_every=100),
    )  # fmt: skip
    run = run_of(config, target, [Row(0, len(PROMPT), PROMPT + answer)], tmp_path_factory.mktemp("work"))
    train(run)
    return target, run.drafter.eval()


@torch.no_grad()
def test_training_and_decoding_draft_the_same_tokens(overfitted: tuple[Target, Drafter]) -> None:
    target, drafter = overfitted
    f, blocks = batch(target, drafter)
    drafted = target.head(
        trained_hidden(target, drafter, f, blocks, masks_of(drafter.config, f, blocks, False))[:, :, 1:]
    ).argmax(-1)
    seen = set()
    for r, row in enumerate(ROWS):
        for anchor, tokens in zip(blocks.anchor[r].tolist(), drafted[r].tolist(), strict=True):
            taps = drafter.config.target_layer_ids
            features = target.forward(torch.tensor([row.tokens[:anchor]]), taps=taps).features
            context = drafter.context_kv(features.clone(), torch.arange(anchor)[None])
            assert propose(target, drafter, context, row.tokens[anchor], anchor) == tokens
            seen.add(tuple(tokens))
    assert blocks.valid.all() and len(seen) > 10, "a drafter that drafts the same everywhere proves nothing"


def tau(target: Target, drafter: Drafter) -> float:
    return generate(target, drafter, PROMPT, SamplingParams(max_tokens=64, ignore_eos=True)).acceptance_length


def test_a_sample_learnt_by_heart_is_accepted_almost_entirely(overfitted: tuple[Target, Drafter]) -> None:
    assert tau(*overfitted) >= 0.9 * 63 / 8  # 63 tokens after the prefill's, at most 8 a step


@pytest.mark.parametrize(
    "change",
    [{"rope_theta": 1e2}, {"mask_token_id": MASK - 1}, {"target_layer_ids": (2, 3, 4)}],
    ids=lambda c: next(iter(c)),
)
def test_the_same_weights_under_a_wrong_setting_are_accepted_less(
    overfitted: tuple[Target, Drafter], change: dict
) -> None:
    target, drafter = overfitted
    wrong = Drafter(replace(drafter.config, **change))
    wrong.load_state_dict(drafter.state_dict())
    assert tau(target, wrong.eval()) < 0.8 * tau(target, drafter)
