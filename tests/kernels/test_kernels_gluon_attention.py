"""The Gluon attention kernel on a CPU, as test_kernels_gluon.py has the others; test_kernels_attention.py has a GPU."""

from dataclasses import replace

import pytest
import torch
from gluon_mistakes import broken, complaint, interpret_attention
from kernel_inputs import randn
from kernel_pages import attend, check_attention, check_padding, check_slots, make_pages

from dflash_toolkit.kernels.hopper import attention as attention_hopper
from dflash_toolkit.kernels.triton import attention

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernel itself")

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("groups", "group", "width", "size", "block", "contexts", "window", "causal", "short", "scores"),
    [
        (2, 2, 64, 64, 2, (130, 0, 63), 0, True, 64, ""),
        (2, 2, 64, 64, 2, (130, 0, 63), 0, False, 64, ""),
        (1, 4, 128, 128, 2, (700, 5), 100, True, 128, "sinks"),
        (1, 4, 128, 128, 2, (700, 5), 100, False, 64, ""),
        (1, 7, 64, 64, 12, (200,), 0, True, 64, ""),  # two tiles of rows
        (2, 1, 128, 64, 1, (64, 449, 127), 0, True, 128, ""),
        (2, 1, 128, 64, 1, (64, 449, 127), 0, False, 64, ""),
        (1, 4, 64, 64, 3, (191, 255, 900), 60, True, 64, "sinks"),
        (1, 4, 64, 64, 3, (191, 255, 900), 60, True, 128, ""),
        (1, 5, 64, 64, 5, (255, 509), -256, True, 128, ""),  # chunks that begin inside blocks
    ],
    ids=str,
)
@pytest.mark.sampled
def test_attention_is_as_exact_as_torch_in_one_pass_and_in_two(
    groups: int, group: int, width: int, size: int, block: int, contexts: tuple[int, ...], window: int,
    causal: bool, short: int, scores: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    kernel = interpret_attention(monkeypatch, short)
    pages = make_pages(contexts, block, size, groups, width, BF16).scored(scores, groups * group)
    q = randn(len(contexts) * block, groups * group, width, dtype=BF16)
    for whole, pairs in ((False, False), (False, True), (True, False)):
        found = attend(q, pages, causal=causal, window=window, whole=whole, pairs=pairs)
        check_attention(q, pages, found, causal=causal, window=window)
        assert (kernel.launches[-1]["WHOLE"], kernel.launches[-1]["PAIRS"]) == (whole, pairs)


def test_middle_splits_are_summed_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_attention(monkeypatch)
    monkeypatch.setattr(attention, "SHORT_SPLITS", type(attention.SHORT)(4))  # 256 keys, then one split of 256
    pages, q = make_pages((250, 300, 511, 900), 2, 64, 1, 64, BF16), randn(8, 3, 64, dtype=BF16)
    found = attend(q, pages, causal=True)
    check_attention(q, pages, found, causal=True)
    assert torch.equal(attend(q, pages, causal=True, pairs=True), found)


@pytest.mark.parametrize(
    ("groups", "group", "width", "size", "block", "contexts", "window"),
    [(2, 2, 64, 64, 2, (130, 0, 63), 0), (2, 4, 128, 128, 2, (700, 5), 100), (1, 7, 64, 64, 12, (200,), 0)],
    ids=str,
)
def test_fp8_caches_have_the_bits_of_their_values_in_bf16(
    groups: int, group: int, width: int, size: int, block: int, contexts: tuple[int, ...], window: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    kernel = interpret_attention(monkeypatch, 128)
    pages = make_pages(contexts, block, size, groups, width, BF16)
    scale = torch.logspace(-3, 3, pages.cache.shape[1])[:, None, None]
    pages = replace(pages, cache=(pages.cache.float() * torch.stack([scale.flip(0) ** 0.1, scale])).bfloat16()).in_fp8()
    pages.cache.view(torch.uint8)[1, 1::2] = 0  # then the sums of some rows are tiny
    q = 40 * randn(len(contexts) * block, groups * group, width, dtype=BF16)
    for kernel.seed, (whole, pairs, causal) in enumerate(((0, 0, True), (0, 1, False), (1, 0, True))):
        how = {"whole": bool(whole), "pairs": bool(pairs), "causal": causal, "window": window}
        found = attend(q, pages, **how)
        assert found.isfinite().all() and torch.equal(found, attend(q, pages.read(), **how))


def test_tokens_do_not_attend_to_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpret_attention(monkeypatch)
    check_padding(64, BF16)
    assert kernel.launches[0]["COUNTED"]


def test_attention_bits_do_not_depend_on_load_order(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpret_attention(monkeypatch)
    pages = make_pages((5, 130, 460), 2, 64, 1, 64, BF16)
    q = randn(6, 3, 64, dtype=BF16)
    first = attend(q, pages, causal=True, whole=True)
    for seed in range(1, 9):
        kernel.seed = seed
        assert torch.equal(attend(q, pages, causal=True, whole=True), first)


def test_a_slot_of_a_causal_block_is_the_plain_step_at_its_position(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_attention(monkeypatch)
    pages = make_pages((186,), 8, 64, 1, 64, BF16)
    check_slots(randn(8, 3, 64, dtype=BF16), pages, range(8), whole=True)


# ---- mistakes --------------------------------------------------------------------------------------


HOPPER = "hopper_attention_kernel"
EARLY = (
    "k = i + 4 < loads; _expect(k_bar, before + i + 4, k, BYTES); "
    "_load(cache_d, k_s, k_bar, before + i + 4, next_slot, column, k)"
)
MISTAKES: dict[str, tuple[str, dict[str, str]]] = {
    "the second keys used before they have come": ("_state", {"_wait(k_bar, before, 1, tiles)": "pass"}),
    "keys used before they have come": ("_state", {"_wait(k_bar, before, i + 2, tiles)": "pass"}),
    "values used before they have come": ("_state", {"_wait(v_bar, before, done, tiles)\n": "pass\n"}),
    "values taken to come in order": ("_state", {"_wait(v_bar, before, done, tiles)  #": "pass  #"}),
    "the last values changed before they have come": ("_state", {"_wait(v_bar, before, i, tiles)\n": "pass\n"}),
    "keys overwritten before their product has ended": ("_state", {
        "_expect(k_bar, before + i + 4, k_wanted, BYTES)": "pass",
        "_load(cache_d, k_s, k_bar, before + i + 4, next_slot, column, k_wanted)": "pass",
        "b_s, b_out = warpgroup_mma_wait": f"{EARLY}; b_s, b_out = warpgroup_mma_wait",
    }),
    "no bytes expected": ("_state", {"_expect(v_bar, before + i + 2, v_wanted, BYTES)": "pass"}),
    "values loaded twice": ("_state", {"(i > 0) & (i + 2 < loads)": "i + 2 < loads"}),
    "a wait for the wrong phase": ("_wait", {"i // STAGES % 2": "(i // STAGES + 1) % 2"}),
    "NaN of unwritten slots": ("_state", {"b_v.store(gl.where((o_t < end)[:, None], b_v.load(wide), 0.0))": "pass"}),
    "the wrong page": ("_state", {"start + (i + 5) * KEYS": "start + (i + 4) * KEYS"}),
    "a page after the end of the table": ("_slot", {"gl.minimum(position // PAGE, columns - 1)": "position // PAGE"}),
}  # fmt: skip
SECOND_TILES = "second = _tiles(stop, _split_start(i_s + 2, SHORT, SHORT_SPLITS, LONG), end)"
THIRD = "slots + slot, column, second > 2"
PAIR_MISTAKES: dict[str, tuple[str, dict[str, str]]] = {  # between the two splits of a program
    "the rings begun anew by the second split": (HOPPER, {"stop, tiles, second, s": "stop, 0, second, s"}),
    "the second split where the first begins": (HOPPER, {"stop, tiles, second, s": "start, tiles, second, s"}),
    "the second values never expected": ("_load_second", {"_expect(v_bar, tiles + 1, second > 1, BYTES)": "pass"}),
    "the third values from the second's place": ("_load_second", {THIRD: THIRD.replace("slot,", "values,")}),
    "the third values loaded before the first split ends": ("_state", {"(i > 0) & (i + 2 < loads)": "i + 2 < loads"}),
    "the fifth keys from the fourth's place": (HOPPER, {"stop + 4 * KEYS": "stop + 3 * KEYS"}),
    "the fourth keys never expected": ("_state", {"_expect(k_bar, before + 3, loads > 3, BYTES)": "pass"}),
    "more tiles than the first split has": ("_tiles", {"gl.minimum(stop, end)": "end"}),
    "the first split left out": (HOPPER, {"gl.fma(b_1, e_1, b_out * e_0)": "b_1"}),
    "the second split left out": (HOPPER, {SECOND_TILES: "pass"}),
    "a third split": (HOPPER, {SECOND_TILES: SECOND_TILES.replace("i_s + 2", "i_s + 3")}),
}  # fmt: skip


PRODUCT = "    b_out = warpgroup_mma_wait(0, [b_acc]) * gl.convert"
FP8_MISTAKES: dict[str, tuple[str, dict[str, str]]] = {
    "no bytes of scales": (HOPPER, {"else HEAD + 2": "else HEAD"}),
    "scales of the next tile": ("_tile", {"ring[1].index(i %": "ring[1].index((i + 1) %"}),
    "scales of another head": (HOPPER, {"_ring(cache_d, i_g * slots, HEAD)": "_ring(cache_d, 0, HEAD)"}),
    "values with the scales of keys": (HOPPER, {"(i_g + G - 1) * slots": "(i_g - 1) * slots"}),
    "NaN of unwritten scales": ("_tile", {"gl.where((o_t < end)[:, None], b_x, 0.0)": "b_x"}),
    "values converted before the product before has ended": ("_state", {
        PRODUCT: f"    _tile(v_s, before + i, start, end, HEAD, BYTES, False)\n{PRODUCT}",
    }),
}  # fmt: skip


@pytest.mark.parametrize("mistake", FP8_MISTAKES)
def test_a_mistake_with_fp8_caches_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, attention_hopper, *FP8_MISTAKES[mistake])
    kernel = interpret_attention(monkeypatch)
    pages, q = make_pages((5, 130, 460), 2, 64, 2, 64, BF16).in_fp8(), randn(6, 6, 64, dtype=BF16)
    assert complaint(kernel, lambda: check_attention(q, pages, attend(q, pages, causal=True), causal=True))


@pytest.mark.parametrize("mistake", [*MISTAKES, *PAIR_MISTAKES])
def test_a_mistake_in_attention_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = mistake in PAIR_MISTAKES
    broken(monkeypatch, attention_hopper, *(MISTAKES | PAIR_MISTAKES)[mistake])
    kernel = interpret_attention(monkeypatch, 128 if pairs else 64)
    contexts = (130, 250, 850) if pairs else (5, 130, 200, 460)
    pages, q = make_pages(contexts, 2, 64, 1, 64, BF16), randn(2 * len(contexts), 3, 64, dtype=BF16)

    def attempt() -> None:
        check_attention(q, pages, attend(q, pages, causal=True, whole=not pairs, pairs=pairs), causal=True)

    assert complaint(kernel, attempt)


@pytest.mark.parametrize("pairs", [False, True], ids=["one", "two"])
def test_dependent_launch_reads_after_its_predecessor_ends(pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpret_attention(monkeypatch, 128)
    block, contexts = 3, (63, 128, 190, 700)
    pages = make_pages(contexts, block, 64, 1, 64, BF16)
    q = randn(len(contexts) * block, 3, 64, dtype=BF16)
    expected = attend(q, pages, causal=True, pairs=pairs)
    queries, cache = q.clone(), pages.cache.clone()
    places = [
        int(pages.table[i, at // 64]) * 64 + at % 64 for i, n in enumerate(contexts) for at in range(n, n + block)
    ]

    def not_yet() -> None:
        q.fill_(torch.nan)
        pages.cache[:, places] = torch.nan

    def ended() -> None:
        q.copy_(queries)
        pages.cache.copy_(cache)

    monkeypatch.setattr(attention_hopper, "grid_launch", not_yet)
    monkeypatch.setattr(attention_hopper, "grid_wait", ended)

    def attempt() -> None:
        assert torch.equal(attend(q, pages, causal=True, pairs=pairs), expected)

    for kernel.seed in range(4):
        attempt()
    everything = {"gl.maximum(length - start, 0) // KEYS": "1 + gl.maximum(length - start, 0) // KEYS"}
    broken(monkeypatch, attention_hopper, HOPPER, everything)
    mistaken = interpret_attention(monkeypatch, 128)
    assert complaint(mistaken, attempt)
