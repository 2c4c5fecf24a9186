"""The Gluon kernels of draft trees, as test_kernels_gluon.py has the others; test_kernels_tree.py has a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from gluon_interpreter import Interpreted
from gluon_mistakes import broken, complaint, interpret_attention
from kernel_forests import Forest, plant, without_others
from kernel_inputs import assert_as_exact_as_torch
from torch import Tensor

from dflash_toolkit.kernels.hopper import attention as attention_hopper
from dflash_toolkit.kernels.hopper import tree_attention as tree_hopper
from dflash_toolkit.kernels.triton import attention, tree_attention

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")

BF16 = torch.bfloat16


def interpret(patch: pytest.MonkeyPatch, short: int = 64) -> list[Interpreted]:
    """Splits of a tile, twice, and then of five; of two tiles they go in pairs. Also the plain step's kernel."""
    interpret_attention(patch, short)
    patch.setattr(tree_attention, "multiprocessors", lambda _: 0 if short == 128 else 999)  # pairs, or not
    found = []
    for name in ("hopper_prefix_kernel", "hopper_tail_kernel"):
        found.append(Interpreted(getattr(tree_hopper, name), together=False))
        patch.setattr(tree_hopper, name, found[-1])
    return found


def check(forest: Forest, found: Tensor, window: int = 0) -> None:
    used = int(forest.rows.starts[-1])
    assert_as_exact_as_torch(found, forest.defined(BF16, window), forest.defined(torch.float64, window))
    assert not found[used:].any()
    for row in {0, used // 3, used // 2, used - 1}:
        assert torch.equal(found[row], forest.plain(row, window)), row


@pytest.mark.parametrize(
    ("shape", "window", "short"),
    [  # contexts, slots, nodes, rows, page, KV heads, group, head width
        (((126, 60, 210), 5, 8, 14, 64, 2, 2, 64), 0, 64),
        (((452,), 6, 12, 13, 128, 1, 7, 128), 60, 64),  # two tiles of rows
        (((191, 300, 902, 790), 5, 8, 24, 64, 1, 2, 64), 0, 128),  # pairs that a path reaches into, and does not
        (((191, 300, 902, 790), 5, 8, 24, 64, 1, 2, 64), 70, 128),  # pairs whose first half is before the window
        (((255, 509), 5, 8, 14, 64, 1, 2, 64), -256, 128),  # chunks that begin inside trees
    ],
    ids=str,
)
def test_a_node_is_that_token_decoded_plainly(
    shape: tuple[Any, ...], window: int, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, _ = interpret(monkeypatch, short)
    forest = plant(*shape, dtype=BF16, scores="sinks" if window else "")
    check(forest, forest.attend(window), window)
    assert prefix.launches[-1]["PAIRS"] == (short == 128)


def test_nodes_after_middle_splits_are_tokens_decoded_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    monkeypatch.setattr(attention, "SHORT_SPLITS", type(attention.SHORT)(4))
    forest = plant((252, 300, 509, 830), 5, 8, 24, 64, 1, 2, 64, BF16)
    check(forest, forest.attend())


@pytest.mark.parametrize(("contexts", "short"), [((126, 60, 210), 64), ((191, 300, 902), 128)], ids=str)
@pytest.mark.parametrize("children", [3, 1])
def test_nodes_over_fp8_caches_have_the_bits_of_their_values_in_bf16(
    contexts: tuple[int, ...], short: int, children: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpret(monkeypatch, short)
    forest = plant(contexts, 5, 8, 18, 64, 2, 2, 64, BF16, children)
    forest = replace(forest, pages=forest.pages.in_fp8())
    read = replace(forest, pages=forest.pages.read())
    found = forest.attend()
    assert found.isfinite().all() and torch.equal(found, read.attend())
    assert torch.equal(found[2], forest.plain(2))
    assert children == 3 or torch.equal(found, forest.attend_chains())


@pytest.mark.parametrize(
    ("shape", "window", "short"),
    [  # contexts, slots, nodes, rows, page, KV heads, group, head width
        (((126, 60, 210), 5, 8, 14, 64, 2, 2, 64), 0, 64),
        (((452,), 12, 12, 13, 128, 1, 7, 128), 60, 64),  # two tiles of rows
        (((0, 64, 63, 5, 1, 2, 3, 4, 130), 3, 4, 60, 64, 1, 2, 64), 0, 64),  # in one pass, with padding
        (((191, 790, 255, 63), 5, 8, 40, 64, 1, 2, 64), 0, 128),  # in pairs, with padding
        (((191, 790, 255, 63), 5, 8, 40, 64, 1, 2, 64), 70, 128),
    ],
    ids=str,
)
def test_a_chain_is_a_block(shape: tuple[Any, ...], window: int, short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpret_attention(monkeypatch, short)
    monkeypatch.setattr(attention, "multiprocessors", lambda _: 0 if short == 128 else 999)  # pairs, or not
    forest = plant(*shape, dtype=BF16, children=1)
    found = forest.attend_chains(window)
    check(forest, found, window)
    kernel.seed = 1
    assert torch.equal(forest.attend_chains(window), found)
    launched = {"WHOLE": len(shape[0]) > 8, "PAIRS": short == 128, "RAGGED": True}
    assert launched.items() <= kernel.launches[-1].items()


CHAIN_MISTAKES = {
    "another request's rows": {"row = gl.load(starts_p + i_b)\n": "row = gl.load(starts_p)\n"},
    "rows of the next request": {"gl.load(starts_p + i_b + 1) - row": "S - row"},
    "padding left as it is": {"if i_s == 0:": "if i_s < 0:"},
    "padding by the last request": {"i_x + G >= gl.num_programs(1)": "i_x + 2 * G >= gl.num_programs(1)"},
}


@pytest.mark.parametrize("mistake", CHAIN_MISTAKES)
def test_a_mistake_with_chains_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, attention_hopper, "hopper_attention_kernel", CHAIN_MISTAKES[mistake])
    kernel = interpret_attention(monkeypatch)
    forest = plant((210, 126), 5, 8, 14, 64, 1, 2, 64, BF16, children=1)
    assert complaint(kernel, lambda: check(forest, forest.attend_chains()))


def check_masked(forest: Forest, window: int = 0) -> Tensor:
    found = forest.attend(window)
    assert_as_exact_as_torch(found, forest.defined(BF16, window), forest.defined(torch.float64, window))
    assert not found[int(forest.rows.starts[-1]) :].any()
    mine = forest.rows.requests == 2
    assert torch.equal(found[mine], without_others(forest, 2).attend(window)[mine])
    return found


@pytest.mark.parametrize(
    ("shape", "window"),
    [  # contexts, slots, nodes, rows, page, KV heads, group, head width
        (((0, 64, 63, 5, 1, 2, 3, 4, 130), 3, 4, 60, 64, 1, 2, 64), 0),  # with padding
        (((60, 64, 62, 5, 1, 2, 3, 4, 0), 5, 8, 60, 64, 1, 1, 64), -64),
        (((60, 64, 62, 5, 1, 2, 3, 4, 250), 5, 20, 120, 64, 1, 7, 128), 6),  # tiles of rows, a short window
        (((0, 191, 63, 126, 1, 2, 3, 4, 65), 6, 64, 585, 128, 1, 2, 64), 0),  # every node that there may be
    ],
    ids=str,
)
def test_tree_nodes_of_many_requests_attend_to_ancestors(
    shape: tuple[Any, ...], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = interpret_attention(monkeypatch)
    forest = plant(*shape, dtype=BF16)
    found = check_masked(forest, window)
    assert {"WHOLE": True, "RAGGED": True, "TREE": True}.items() <= kernel.launches[-1].items()
    for kernel.seed in range(1, 3):
        assert torch.equal(forest.attend(window), found)


MASK_MISTAKES = {
    "the parent's family": ("_softmax", {"o_place - 1, 0": "o_place, 0"}),
    "no anchor": ("_softmax", {"o_place <= 0": "o_place < 0"}),
    "positions of places": ("_softmax", {"length + depths": "length + o_place"}),
    "no mask": ("hopper_attention_kernel", {"full = gl.minimum(end, length + 1)": "pass"}),
    "another row's ancestors": ("hopper_attention_kernel", {"ancestors_p + row + o_slot": "ancestors_p + o_slot"}),
    "another request's depths": ("hopper_attention_kernel", {"length, depths_p + row)": "length, depths_p)"}),
}


@pytest.mark.parametrize("mistake", MASK_MISTAKES)
def test_a_mistake_in_the_mask_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, attention_hopper, *MASK_MISTAKES[mistake])
    kernel = interpret_attention(monkeypatch)
    forest = plant((0, 64, 63, 5, 1, 2, 3, 4, 62), 4, 12, 70, 64, 1, 2, 64, BF16)
    assert complaint(kernel, lambda: check_masked(forest, 0 if mistake == "no mask" else 2))


PREFIX, TAIL = "hopper_prefix_kernel", "hopper_tail_kernel"
MISTAKES = {
    "nodes in the order of their places": (TAIL, {"length + places": "o_t"}),
    "the state begun anew": (TAIL, {"real & (start > begin)": "False"}),
    "another's path": (TAIL, {"(i_m - gl.load(starts_p + i_b)) * P": "0"}),
    "the whole tiles twice": (PREFIX, {"length // KEYS * KEYS": "length"}),
    "values that are not there": (TAIL, {
        "gl.load(p_head + o_v, mask=m_t[:, None], other=0)": "gl.load(p_head + o_v)",
    }),
    "a path's split joined": (PREFIX, {"end >= after": "True"}),
    "no splits joined": (PREFIX, {"end >= after": "False"}),
    "long splits joined as if short": (PREFIX, {"end >= after": "end >= stop + SHORT"}),
    "one split of two": (TAIL, {"SHORT_SPLITS, LONG) + i_t": "SHORT_SPLITS, LONG)"}),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, tree_hopper, *MISTAKES[mistake])
    pairs = "joined" in mistake
    _, tail = interpret(monkeypatch, 128 if pairs else 64)
    contexts = (200, 800) if pairs else (210, 126)
    forest = plant(contexts, 5, 8, 14, 64, 1, 2, 64, BF16)
    assert complaint(tail, lambda: check(forest, forest.attend()))
