"""The Gluon kernels of draft trees, as test_kernels_gluon.py has the others; test_kernels_tree.py has a GPU."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gluon_interpreter import Interpreted
from test_kernels_gluon import broken, complaint
from test_kernels_gluon_attention import interpret_attention
from test_kernels_step import assert_as_exact_as_torch
from test_kernels_tree import Forest, plant

from dflash_toolkit.kernels.hopper import tree_attention as tree_hopper
from dflash_toolkit.kernels.triton import tree_attention

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")

BF16 = torch.bfloat16


def interpret(patch: pytest.MonkeyPatch, short: int = 64) -> list[Interpreted]:
    """Splits of a tile, twice, and then of five; of two tiles they go in pairs. The plain step's kernel too."""
    interpret_attention(patch, short)
    patch.setattr(tree_attention, "multiprocessors", lambda _: 0 if short == 128 else 999)  # pairs, or not
    found = []
    for name in ("hopper_prefix_kernel", "hopper_tail_kernel"):
        found.append(Interpreted(getattr(tree_hopper, name), together=False))
        patch.setattr(tree_hopper, name, found[-1])
    return found


def check(forest: Forest, window: int = 0) -> None:
    found, used = forest.attend(window), int(forest.rows.starts[-1])
    assert_as_exact_as_torch(found, forest.defined(BF16, window), forest.defined(torch.float64, window))
    assert not found[used:].any()
    for row in {0, used // 3, used // 2, used - 1}:
        assert torch.equal(found[row], forest.plain(row, window)), row


@pytest.mark.parametrize(
    ("shape", "window", "short"),
    [  # contexts, slots, nodes, rows, page, KV heads, group, head width
        (((126, 60, 210), 5, 8, 14, 64, 2, 2, 64), 0, 64),
        (((452,), 6, 12, 13, 128, 1, 7, 128), 60, 64),  # two tiles of rows
        (((0, 64, 63, 5, 1, 2, 3, 4, 130), 3, 4, 24, 64, 1, 2, 64), 0, 64),  # in one pass
        (((191, 300, 255, 63), 5, 8, 24, 64, 1, 2, 64), 0, 128),  # pairs that a path reaches into, and does not
    ],
    ids=str,
)
def test_a_node_is_that_token_decoded_plainly(
    shape: tuple[Any, ...], window: int, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, tail = interpret(monkeypatch, short)
    check(plant(*shape, dtype=BF16), window)
    assert tail.launches[-1]["WHOLE"] == (len(shape[0]) > 8) and prefix.launches[-1]["PAIRS"] == (short == 128)


PREFIX, TAIL = "hopper_prefix_kernel", "hopper_tail_kernel"
MISTAKES = {
    "nodes in the order of their places": (TAIL, {"length + places": "o_t"}),
    "the state begun anew": (TAIL, {"real & (start > begin)": "False"}),
    "another's path": (TAIL, {"(i_m - gl.load(starts_p + i_b)) * P": "0"}),
    "the whole tiles twice": (PREFIX, {"length // KEYS * KEYS": "length"}),
    "values that are not there": (TAIL, {
        "gl.load(p_head + o_v, mask=m_t[:, None], other=0.0)": "gl.load(p_head + o_v)",
    }),
    "a path's split joined": (PREFIX, {"end >= stop + SHORT": "True"}),
    "no splits joined": (PREFIX, {"end >= stop + SHORT": "False"}),
    "one split of two": (TAIL, {"SHORT_SPLITS, LONG) + i_t": "SHORT_SPLITS, LONG)"}),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, tree_hopper, *MISTAKES[mistake])
    pairs = "joined" in mistake
    _, tail = interpret(monkeypatch, 128 if pairs else 64)
    contexts = (200, 320) if pairs else (210, 126)
    assert complaint(tail, lambda: check(plant(contexts, 5, 8, 14, 64, 1, 2, 64, BF16)))
