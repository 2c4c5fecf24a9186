"""The prefill kernel on a CPU, as test_kernels_gluon.py has the others; test_kernels_attention.py has a GPU."""

import itertools
from typing import Any

import pytest
import torch
from gluon_interpreter import Interpreted
from gluon_mistakes import broken, complaint
from kernel_inputs import integers, randn
from kernel_pages import Pages, check_attention, make_pages
from torch import Tensor

from dflash_toolkit.kernels.hopper import prefill

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernel itself")

BF16 = torch.bfloat16


def interpret(patch: pytest.MonkeyPatch, programs: int, stages: int = 3) -> Interpreted:
    """Runs the kernel as on a device of so many multiprocessors."""
    patch.setattr(prefill, "STAGES", type(prefill.STAGES)(stages))
    kernel = Interpreted(prefill.hopper_prefill_kernel, together=False)
    patch.setattr(prefill, "hopper_prefill_kernel", kernel)
    patch.setattr(prefill, "multiprocessors", lambda _: programs)
    return kernel


@pytest.mark.parametrize(
    ("groups", "group", "width", "size", "block", "contexts", "programs"),
    [
        (2, 2, 64, 64, 70, (0,), 3),  # two tiles of two heads
        (1, 4, 128, 128, 40, (90,), 1),
        (1, 7, 64, 64, 30, (190, 0), 4),
        (1, 4, 64, 64, 64, (64, 448), 132),
    ],
    ids=str,
)
def test_prefill_is_as_exact_as_torch(
    groups: int, group: int, width: int, size: int, block: int, contexts: tuple[int, ...], programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    interpret(monkeypatch, programs)
    pages = make_pages(contexts, block, size, groups, width, BF16)
    q = randn(len(contexts) * block, groups * group, width, dtype=BF16)
    check_attention(q, pages, prefill.launch(q, pages.kv()), causal=True)


def test_prefill_tokens_do_not_attend_to_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, 2)
    counts = (45, 1)
    pages, q = make_pages((3, 130), 45, 64, 1, 64, BF16), randn(2 * 60, 4, 64, dtype=BF16)
    padded = prefill.launch(q, pages.kv(), counts=integers(counts)).unflatten(0, (2, 60))
    assert padded.isfinite().all()
    for b, (count, rows) in enumerate(zip(counts, q.unflatten(0, (2, 60)), strict=True)):
        alone = prefill.launch(rows[:count].contiguous(), pages.one(b).kv())
        assert torch.equal(padded[b, :count], alone)


def chunks(q: Tensor, pages: Pages, cuts: tuple[int, ...]) -> Tensor:
    """The rows of one prompt in chunks that begin at `cuts`."""
    parts = itertools.pairwise((*cuts, len(q)))
    return torch.cat([prefill.launch(q[a:b].contiguous(), pages.one(0, a).kv()) for a, b in parts])


def test_prefill_bits_do_not_depend_on_cuts_or_load_order(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpret(monkeypatch, 3)
    pages, q = make_pages((60,), 100, 64, 2, 64, BF16), randn(100, 6, 64, dtype=BF16)
    whole = prefill.launch(q, pages.kv())
    for kernel.seed, cuts in enumerate(((0,), (0, 1), (0, 37, 70), (0, 64))):
        assert torch.equal(chunks(q, pages, cuts), whole)


def test_prefill_fits_if_its_tiles_keep_the_gpu_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = make_pages((0,), 1, 64, 8, 128, BF16)
    monkeypatch.setattr(prefill, "multiprocessors", lambda _: 132)
    monkeypatch.setattr("dflash_toolkit.kernels.hopper.attention.fits", lambda *_: True)
    found = [rows for rows in (65, 256, 512, 513, 600, 1024, 2048) if prefill.fits(randn(rows, 32, 128), pages.kv())]
    assert found == [512, 1024, 2048]


ROWS = (30, 1, 64, 33, 0, 40, 29)  # of requests


def in_one_pass(contexts: tuple[int, ...], padding: int) -> tuple[Tensor, Pages, Tensor]:
    """Queries of chunks of ROWS rows, their pages, and the first row of each."""
    starts = integers([0, *itertools.accumulate(ROWS)])
    return randn(sum(ROWS) + padding, 4, 64, dtype=BF16), make_pages(contexts, max(ROWS), 64, 1, 64, BF16), starts


@pytest.mark.parametrize(("programs", "padding"), [(2, 0), (5, 1), (132, 90)])
def test_a_packed_chunk_has_the_bits_it_has_alone(programs: int, padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, programs)
    q, pages, starts = in_one_pass((0, 100, 63, 340, 5, 200, 31), padding)
    pages.cache.nan_to_num_(0.0)  # rows of the other chunks lie after a short one
    found = prefill.launch(q, pages.kv(), starts=starts)
    for b, (first, end) in enumerate(itertools.pairwise(starts.tolist())):
        if end > first:
            alone = prefill.launch(q[first:end].contiguous(), pages.one(b).kv())
            assert torch.equal(found[first:end], alone)
    assert not found[sum(ROWS) :].any()


# ---- mistakes --------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[str, dict[str, str]]] = {
    "keys used before they have come": ("_attend", {"_wait(k_full, keys)": "pass"}),
    "the first keys used before they have come": ("_attend", {"_wait(k_full, done)": "pass"}),
    "values used before they have come": ("_attend", {
        "_wait(v_full, values)\n                s_0": "pass\n                s_0",
        "_wait(v_full, values)  #": "pass  #",
    }),
    "the last values used before they have come": ("_attend", {"_wait(v_full, done)": "pass"}),
    "no wait for the values' product": ("_attend", {"warpgroup_mma_wait(0, [b_acc])\n                _free":
        "warpgroup_mma_wait(1, [b_acc])\n                _free"}),
    "scores used too early": ("_attend", {"warpgroup_mma_wait(2,": "warpgroup_mma_wait(3,"}),
    "keys freed before their product has ended": ("_attend", {
        "_free(k_free, done)": "pass",
        "b_0, b_1 = warpgroup_mma_wait(0": "_free(k_free, done); b_0, b_1 = warpgroup_mma_wait(0",
    }),
    "values freed before their product has ended": ("_attend", {
        "_free(v_free, values)": "pass", "first = (i + 1) * PAIR": "_free(v_free, values); first = (i + 1) * PAIR",
    }),
    "values never freed": ("_attend", {"_free(v_free, values)": "pass"}),
    "one side waited for": ("hopper_prefill_kernel", {"k_free.index(i), count=SIDES": "k_free.index(i), count=1"}),
    "NaN of unwritten slots": ("_attend", {"b_v.store(": "(lambda _: None)("}),
    "values used while they are cleaned": ("_attend", {"mbarrier.wait(clean, cleaned % 2)": "pass"}),
    "the wrong page": ("_stream", {"(2 * i + 3) * KEYS": "(2 * i + 2) * KEYS"}),
    "another request's pages": ("_stream", {".to(gl.int64) * stride_pages": ".to(gl.int64) * 0"}),
    "an item twice": ("_item", {"programs - 1 - i)": "programs - i)"}),
    "no mask": ("_attend", {"gl.minimum(end, length + top // GROUP + 1)": "end"}),
    "the first tile's mask for both": ("_softmax", {"o_t += KEYS": "pass"}),
}  # fmt: skip
PACKED_MISTAKES: dict[str, tuple[str, dict[str, str]]] = {
    "padding left as it is": ("_attend", {"m_q & (i_b == requests[3])": "m_q & (i_b < 0)"}),
    "the next request's rows": ("_item", {"(first <= i_t)": "(first < i_t)"}),
    "tiles of the next request": ("_item", {"(SIDES * ROWS) - i_b": "(SIDES * ROWS)"}),
}  # fmt: skip


@pytest.mark.parametrize("mistake", [*MISTAKES, *PACKED_MISTAKES])
def test_a_mistake_in_prefill_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = (0, 100, 63, 340, 5, 200, 31)
    packed = mistake in PACKED_MISTAKES
    q, pages, starts = in_one_pass(contexts, 5) if packed else (randn(120, 4, 64, dtype=BF16), None, None)
    pages = pages or make_pages((200, 3), 60, 64, 1, 64, BF16)
    if packed:
        pages.cache.nan_to_num_(0.0)
    how: dict[str, Any] = {"starts": starts} if packed else {}
    interpret(monkeypatch, 2)
    expected = prefill.launch(q, pages.kv(), **how)
    monkeypatch.undo()
    broken(monkeypatch, prefill, *(MISTAKES | PACKED_MISTAKES)[mistake])
    kernel = interpret(monkeypatch, 2, stages=2)

    def attempt() -> None:
        assert torch.equal(prefill.launch(q, pages.kv(), **how), expected)

    assert complaint(kernel, attempt)
