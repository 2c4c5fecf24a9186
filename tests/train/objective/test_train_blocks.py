"""Anchors, labels and masks. Each silent failure of training has a test here that fails when its rule is broken."""

import itertools
from typing import Any

import pytest
import torch
from conftest import MASK
from drafter_configs import make_config
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask, flex_attention

from dflash_toolkit import Drafter
from dflash_toolkit.train.objective.blocks import (
    PADDING,
    Blocks,
    Features,
    anchor_candidates,
    dense_mask,
    flex_mask,
    sample_blocks,
)
from dflash_toolkit.train.objective.loss import masks_of

S = 4


def features(documents: list[list[tuple[int, int]]], length: int) -> Features:
    """Rows of packed documents, each (prompt tokens, answer tokens); token ids are all different."""
    rows = len(documents)
    tokens = torch.arange(rows * length).view(rows, length)
    supervised, document = torch.zeros_like(tokens, dtype=torch.bool), torch.full_like(tokens, PADDING)
    positions = torch.zeros_like(tokens)
    for r, row in enumerate(documents):
        at = 0
        for d, (prompt, answer) in enumerate(row):
            n = prompt + answer
            document[r, at : at + n] = 10 * r + d
            supervised[r, at + prompt : at + n] = True
            positions[r, at : at + n] = torch.arange(n)
            at += n
    return Features(tokens, torch.randn(rows, length, 6), supervised, document, positions)


def draw(f: Features, anchors: int = 64, seed: int = 0) -> Blocks:
    return sample_blocks(f, anchors, S, MASK, torch.Generator().manual_seed(seed))


# a prompt of no tokens puts one document's answer right before the next one's
layouts = st.lists(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), min_size=1, max_size=3), min_size=1, max_size=3
)


@settings(max_examples=60, deadline=None)
@given(layouts, st.integers(1, 20), st.integers(0, 1000))
def test_blocks_predict_tokens_at_their_own_positions(
    documents: list[list[tuple[int, int]]], anchors: int, seed: int
) -> None:
    f = features(documents, 40)
    blocks = draw(f, anchors, seed)
    for r in range(len(documents)):
        chosen = blocks.anchor[r][blocks.valid[r]].tolist()
        assert chosen == sorted(set(chosen))
        assert len(chosen) == min(anchors, int(anchor_candidates(f)[r].sum()))
        for a, (anchor, valid) in enumerate(zip(blocks.anchor[r].tolist(), blocks.valid[r].tolist(), strict=True)):
            if not valid:
                assert not blocks.supervised[r, a].any()
                continue
            assert f.supervised[r, anchor] and f.supervised[r, anchor + 1]
            assert f.document[r, anchor] == f.document[r, anchor + 1]
            assert blocks.inputs[r, a].tolist() == [f.tokens[r, anchor].item()] + [MASK] * (S - 1)
            assert blocks.positions[r, a].tolist() == [f.positions[r, anchor].item() + k for k in range(S)]
            assert not blocks.supervised[r, a, 0]
            for k in range(1, S):
                at = anchor + k
                inside = at < 40 and f.document[r, at] == f.document[r, anchor] and bool(f.supervised[r, at])
                assert blocks.supervised[r, a, k] == inside
                if inside:  # same position, no shift
                    assert blocks.labels[r, a, k] == f.tokens[r, at]


def test_the_last_token_of_a_full_row_is_a_label() -> None:
    f = features([[(2, 6)]], 8)
    blocks = draw(f)
    index = blocks.anchor[0, :, None] + torch.arange(S)
    assert (index[blocks.supervised[0]] == 7).any()
    assert torch.equal(blocks.labels[0][blocks.supervised[0]], f.tokens[0][index[blocks.supervised[0]]])


def test_filler_blocks_have_no_loss_and_go_last() -> None:
    f = features([[(2, 9)], [(2, 3)], [(4, 1)]], 12)
    blocks = draw(f, 6)
    assert blocks.valid.sum(1).tolist() == [6, 2, 0]
    assert blocks.valid[1].tolist() == [True, True, False, False, False, False], "fillers go last"
    assert not blocks.supervised[~blocks.valid].any() and not blocks.labels[~blocks.valid].any()
    assert not blocks.anchor[~blocks.valid].any(), "an index that every row has"


def test_without_a_candidate_no_block_is_valid() -> None:
    blocks = draw(features([[(5, 1)], [(3, 0)]], 8))
    assert blocks.inputs.shape == (2, 1, S) and not blocks.valid.any() and not blocks.supervised.any()


def test_anchors_follow_the_generator() -> None:
    f = features([[(2, 11), (0, 5)]], 20)
    candidates = [*range(2, 12), *range(13, 17)]
    assert draw(f, 64).anchor[0].tolist() == anchor_candidates(f)[0].nonzero()[:, 0].tolist() == candidates
    assert torch.equal(draw(f, 3, seed=1).anchor, draw(f, 3, seed=1).anchor)
    assert len({tuple(draw(f, 3, seed).anchor[0].tolist()) for seed in range(20)}) > 10


@pytest.mark.slow
def test_anchors_are_drawn_uniformly() -> None:
    f = features([[(2, 11)]], 20)
    counts = torch.zeros(20)
    for seed in range(1200):
        counts[draw(f, 3, seed).anchor[0]] += 1
    drawn = counts[anchor_candidates(f)[0]]
    assert len(drawn) == 10 and drawn.sum() == 3600
    assert ((drawn - 360) ** 2 / 360).sum() < 27.9  # chi square: 0.999 quantile of 9 degrees of freedom


def oracle(f: Features, blocks: Blocks) -> torch.Tensor:
    """The contract's words as a loop."""
    rows, length = f.tokens.shape
    count = blocks.anchor.shape[1]
    mask = torch.zeros(rows, count, S, length + count * S, dtype=torch.bool)
    for r, a in itertools.product(range(rows), range(count)):
        anchor = int(blocks.anchor[r, a])
        # the anchor's own feature does not exist yet at inference; never across documents, never padding
        for t in range(anchor):
            mask[r, a, :, t] = f.document[r, t] == f.document[r, anchor]
        # inside a block attention is bidirectional, and blocks never see one another
        mask[r, a, :, length + a * S : length + a * S + S] = True
    return mask.flatten(1, 2)[:, None]


PACKED = [[(3, 6), (2, 5)], [(4, 9)]]


@settings(max_examples=25, deadline=None)
@given(layouts, st.integers(1, 6), st.integers(0, 1000))
def test_the_dense_mask_is_the_contract_s_rule(documents: list[list[tuple[int, int]]], anchors: int, seed: int) -> None:
    f = features(documents, 40)
    blocks = draw(f, anchors, seed)
    assert torch.equal(dense_mask(f, blocks), oracle(f, blocks))


FULL, SLIDING = "full_attention", "sliding_attention"
SIGHTS = [
    {"layer_types": kinds, "is_causal": causal}
    for kinds in ((FULL,), (SLIDING,), (SLIDING, FULL))
    for causal in (False, True, None)
]


@settings(max_examples=60, deadline=None)
@given(layouts, st.sampled_from(SIGHTS), st.integers(1, 14), st.integers(0, 1000))
@pytest.mark.slow
def test_training_and_decoding_have_the_same_attention(
    documents: list[list[tuple[int, int]]], sight: dict[str, Any], window: int, seed: int
) -> None:
    """In every layer, with windows shorter and longer than a block and a document, wherever that lies in its row."""
    f = features(documents, 40)
    blocks = draw(f, 6, seed)
    shape = make_config(num_layers=len(sight["layer_types"]), sliding_window=window, block_size=S, **sight)
    with torch.device("meta"):
        drafter = Drafter(shape)
    masks = masks_of(shape, f, blocks, flex=False)
    for r, a in blocks.valid.nonzero().tolist():
        anchor, position = int(blocks.anchor[r, a]), int(blocks.positions[r, a, 0])
        for layer, kind in enumerate(shape.layer_types):
            decoded = drafter.own_mask(layer, blocks.positions[r, a][None], torch.arange(position)[None])
            expected = torch.zeros(S, masks[kind].shape[3], dtype=torch.bool)
            alone = torch.ones(S, position + S, dtype=torch.bool) if decoded is None else decoded[0, 0]
            expected[:, anchor - position : anchor] = alone[:, :position]
            expected[:, 40 + a * S : 40 + a * S + S] = alone[:, position:]
            assert torch.equal(masks[kind][r, 0, a * S : a * S + S], expected)


@pytest.mark.parametrize(("window", "causal"), [(0, False), (3, False), (6, True), (0, True)])
@pytest.mark.slow
def test_flex_mask_and_attention_equal_the_dense_mask(window: int, causal: bool) -> None:
    f = features(PACKED, 18)
    blocks = draw(f, 5)
    queries, (dense, flex) = blocks.anchor.shape[1] * S, (m(f, blocks, window, causal) for m in (dense_mask, flex_mask))
    assert torch.equal(create_mask(flex.mask_mod, 2, 1, queries, 18 + queries, device="cpu"), dense)
    q, k, v = (torch.randn(2, 2, n, 16) for n in (queries, 18 + queries, 18 + queries))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    assert torch.allclose(flex_attention(q, k, v, block_mask=flex), expected, atol=1e-5)


@pytest.mark.parametrize(("window", "listed"), [(0, 13), (8, 11)])
def test_flex_mask_lists_only_visible_tiles(window: int, listed: int) -> None:
    f = features([[(3, 200), (2, 300)]], 520)
    blocks = draw(f, 80)
    mask = flex_mask(f, blocks, window)
    seen = torch.nn.functional.pad(dense_mask(f, blocks, window)[:, 0], (0, -840 % 128, 0, -320 % 128))
    tiles = seen.unflatten(1, (-1, 128)).unflatten(3, (-1, 128)).any(4).any(2)
    assert torch.equal(mask.to_dense()[:, 0].bool(), tiles)
    assert tiles.sum() == listed < tiles.numel()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(2, 300)), min_size=1, max_size=6),
    st.integers(1, 150),
    st.booleans(),
    st.sampled_from([0, 0, 1, 20, 140, 400]),
    st.booleans(),
    st.integers(0, 1000),
)
@example([(300, 2)], 1, False, 300 + S - 129, False, 0)  # the window ends one position after the start of a tile
def test_flex_mask_tiles_cover_every_visible_pair(
    documents: list[tuple[int, int]], anchors: int, fixed: bool, window: int, causal: bool, seed: int
) -> None:
    length = sum(map(sum, documents)) + 17
    f = features([documents], length)
    generator = torch.Generator().manual_seed(seed)
    blocks = sample_blocks(f, min(anchors, length), S, MASK, generator, fixed=fixed)
    mask = flex_mask(f, blocks, window, causal)
    seen = dense_mask(f, blocks, window, causal)[0, 0]
    queries, keys = seen.shape
    listed = torch.zeros(-(-queries // 128), -(-keys // 128), dtype=torch.bool)
    for kind in ("", "full_"):
        counts, tiles = getattr(mask, f"{kind}kv_num_blocks"), getattr(mask, f"{kind}kv_indices")
        for q in range(len(listed)):
            for kv in tiles[0, 0, q, : int(counts[0, 0, q])].tolist():
                assert not listed[q, kv], "a tile is listed once"
                listed[q, kv] = True
                assert not kind or seen[128 * q : 128 * (q + 1), 128 * kv : 128 * (kv + 1)].all()
    q, kv = seen.nonzero(as_tuple=True)
    assert listed[q // 128, kv // 128].all()


def test_features_refuse_shapes_that_do_not_belong_together() -> None:
    f = features([[(2, 4)]], 8)
    with pytest.raises(ValueError, match="share one shape"):
        Features(f.tokens[:, :4], f.hidden, f.supervised, f.document, f.positions)
    with pytest.raises(ValueError, match="does not cover"):
        Features(f.tokens, f.hidden[:, :4], f.supervised, f.document, f.positions)


def test_labels_end_with_the_response_of_the_anchor() -> None:
    """The next turn depends on a question that the block has not seen, however short the question is."""
    f = features([[(4, 14)]], 24)
    f.supervised[0, 9:11] = False  # the second question; a block of 16 slots reaches beyond it
    blocks = sample_blocks(f, 64, 16, MASK, torch.Generator().manual_seed(0))
    pairs = zip(blocks.anchor[0], blocks.supervised[0], strict=True)
    labelled = {int(anchor): (anchor + slots.nonzero()[:, 0]).tolist() for anchor, slots in pairs}
    assert labelled[6] == [7, 8]
    assert labelled == {a: [*range(a + 1, 9 if a < 9 else 18)] for a in (4, 5, 6, 7, *range(11, 17))}
