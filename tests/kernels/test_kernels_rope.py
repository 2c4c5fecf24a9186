"""Norm, RoPE and the write into the pages against their definitions, on the GPU or in Triton's interpreter."""

from collections.abc import Callable

import pytest
import torch
from kernel_inputs import DEVICE, EPS, assert_as_exact_as_torch, exact_norm, in_turn, integers, make_rope, randn
from kernel_pages import make_pages
from torch import Tensor

from dflash_toolkit.kernels import reference
from dflash_toolkit.kernels.triton import rope


def exact_rotated(x: Tensor, weight: Tensor | None, table: Tensor, positions: Tensor) -> Tensor:
    """Heads x [M, heads, H], normed and rotated in float64."""
    first, second = (x.double() if weight is None else exact_norm(x, weight)).chunk(2, dim=-1)
    cos, sin = table.double()[:, positions.flatten(), None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def only_changed(before: Tensor, after: Tensor, slots: Tensor) -> bool:
    """Whether caches [..., slots, G, H] are the same outside `slots`."""
    rest = torch.ones(before.shape[-3], dtype=torch.bool, device=DEVICE)
    rest[slots.flatten()] = False
    return torch.equal(before[..., rest, :, :], after[..., rest, :, :])


WRITES = [  # S, query heads of a group, KV heads, head width, contexts, page size
    (1, 1, 1, 8, (0,), 4),
    (3, 3, 2, 40, (1, 63, 130), 4),
    (8, 4, 2, 64, (130,), 16),
    (16, 7, 1, 128, (63, 0, 260), 64),
]
Write = tuple[int, int, int, int, tuple[int, ...], int]


def twelve_bits(*shape: int) -> Tensor:
    """Random multiples of 2^-12: sums of a few are exact in fp32, and round in fp16."""
    return (randn(*shape) * 4096).round() / 4096


@pytest.mark.parametrize("normed", ["qk", "qkv", ""])
@pytest.mark.parametrize(("parts", "case", "dtype"), in_turn([*zip((4, 3, 2, 1), WRITES, strict=True)]), ids=str)
@pytest.mark.sampled
def test_rope_write_is_as_exact_as_torch_and_batch_invariant(
    parts: int, case: Write, normed: str, dtype: torch.dtype
) -> None:
    block, group, groups, width, contexts, size = case
    heads, rows = group * groups, len(contexts) * block
    pages = make_pages(contexts, block, size, groups, width, dtype)
    before = randn(*pages.cache.shape, dtype=dtype)
    cache, expected_cache = before.clone(), before.clone()
    q_weight, k_weight = (randn(width, dtype=dtype) if name in normed else None for name in "qk")
    columns, table = (heads + 2 * groups) * width, make_rope(max(contexts) + block, width)
    partials = twelve_bits(parts, rows, columns).to(torch.float32 if parts > 1 else dtype)  # or a prefill's, from torch
    bias = None if normed else twelve_bits(columns).to(dtype)
    arguments, how = (q_weight, k_weight, EPS, table), {"normed_values": "v" in normed}
    where = (pages.lengths, pages.table)
    q = rope.rope_write(partials, bias, *arguments, *where, cache, size, **how)
    expected = reference.rope_write(partials, bias, *arguments, *where, expected_cache, size, **how)

    qkv = (partials.double().sum(0) + (0.0 if bias is None else bias.double())).to(dtype)
    positions = pages.lengths[:, None] + torch.arange(block, device=DEVICE)
    each = qkv.unflatten(1, (-1, width))
    slots = pages.slots(block).flatten()
    assert_as_exact_as_torch(q, expected, exact_rotated(each[:, :heads], q_weight, table, positions))
    exact_keys = exact_rotated(each[:, heads : heads + groups], k_weight, table, positions)
    assert_as_exact_as_torch(cache[0, slots], expected_cache[0, slots], exact_keys)
    values = each[:, heads + groups :]
    if "v" in normed:
        assert_as_exact_as_torch(
            cache[1, slots], expected_cache[1, slots], exact_norm(values, torch.ones_like(values[0, 0]))
        )
    else:
        assert torch.equal(cache[1, slots], values)
    assert only_changed(before, cache, slots)
    # the first row alone
    alone_cache, one = before.clone(), pages.one(0)
    first = partials[:, :1].contiguous()
    alone = rope.rope_write(first, bias, *arguments, one.lengths, one.table, alone_cache, size, **how)
    assert torch.equal(alone, q[:1]) and torch.equal(alone_cache[:, slots[0]], cache[:, slots[0]])
    # a layer without own keys and values
    own, bias, after = (
        partials[..., : heads * width].contiguous(),
        bias if bias is None else bias[: heads * width],
        cache.clone(),
    )
    for write in (rope.rope_write, reference.rope_write):
        queries = write(own, bias, q_weight, None, EPS, table, *where, cache, size, queries_only=True)
        assert_as_exact_as_torch(queries, expected, exact_rotated(each[:, :heads], q_weight, table, positions))
    assert torch.equal(cache, after)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("parts", "case", "dtype"), in_turn([(3, WRITES[1]), (1, WRITES[2])]), ids=str)
def test_rope_write_supports_partial_rotation_and_gates(
    parts: int, case: Write, dtype: torch.dtype, interleaved: bool
) -> None:
    """Like heads of Qwen3.5, with norm weights in fp32; interleaved with factors of queries, which Llama 4 has."""
    block, group, groups, width, contexts, size = case
    heads, rows, turning = group * groups, len(contexts) * block, width // 4
    pages = make_pages(contexts, block, size, groups, width, dtype)
    before = randn(*pages.cache.shape, dtype=dtype)
    cache, expected_cache = before.clone(), before.clone()
    q_weight, k_weight = randn(width), randn(width)
    table = make_rope(max(contexts) + block, turning)
    factors = torch.linspace(1.0, 2.0, table.shape[1], device=DEVICE)
    with_factors = torch.cat([table, factors[:, None].expand_as(table[:1])]) if interleaved else table
    arguments = (None, q_weight, k_weight, EPS, with_factors, pages.lengths, pages.table)
    partials = twelve_bits(parts, rows, (2 * heads + 2 * groups) * width)
    how = {"gated": True, "interleaved": interleaved}
    q = rope.rope_write(partials, *arguments, cache, size, **how)
    expected = reference.rope_write(partials, *arguments, expected_cache, size, **how)
    slots, each = pages.slots(block).flatten(), partials.double().sum(0).to(dtype).unflatten(1, (-1, width))

    positions = pages.lengths[:, None] + torch.arange(block, device=DEVICE)

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        turned, rest = exact_norm(x, weight).split([turning, width - turning], dim=-1)
        if interleaved:  # the neighbours of a pair to the two halves, and back
            turned = turned.unflatten(-1, (-1, 2)).mT.flatten(-2)
        turned = exact_rotated(turned, None, table, positions)
        return torch.cat([turned.unflatten(-1, (2, -1)).mT.flatten(-2) if interleaved else turned, rest], dim=-1)

    own = factors[positions.flatten(), None, None].double() if interleaved else 1.0
    assert_as_exact_as_torch(q, expected, exact(each[:, : 2 * heads : 2], q_weight) * own)
    keys = exact(each[:, 2 * heads : 2 * heads + groups], k_weight)
    assert_as_exact_as_torch(cache[0, slots], expected_cache[0, slots], keys)
    assert torch.equal(cache[1, slots], each[:, 2 * heads + groups :])
    x = randn(rows, heads * width, dtype=dtype)
    gated = rope.gate_heads(x, partials, width)
    exactly = x.double() * each[:, 1 : 2 * heads : 2].flatten(1).double().sigmoid()
    assert_as_exact_as_torch(gated, reference.gate_heads(x, partials, width), exactly)


@pytest.mark.parametrize("write", [rope.rope_write, reference.rope_write])
def test_padding_is_written_to_the_null_block(write: Callable[..., Tensor]) -> None:
    table, counts = integers([[3, 1, 0], [2, 4, 0]]), integers([5, 2])
    lengths, partials = integers([1, 3]), twelve_bits(1, 14, 24)  # blocks of 7; pages of 4
    cache = torch.full((2, 20, 1, 8), 7.0, device=DEVICE)
    arguments = (None, None, None, EPS, make_rope(10, 8), lengths, table)
    q = write(partials, *arguments, cache, 4, counts)
    whole = cache.clone()
    assert torch.equal(q, write(partials, *arguments, whole, 4)), "queries of padding are as any"
    slots = torch.cat([reference.slots_of(n + torch.arange(c, device=DEVICE)[None], t[None], 4)[0]
                       for n, c, t in zip((1, 3), (5, 2), table, strict=True)])  # fmt: skip
    assert torch.equal(cache[:, slots], whole[:, slots])
    null = torch.arange(4, device=DEVICE)
    assert only_changed(torch.full_like(cache, 7.0), cache, torch.cat([slots, null])) and (cache[:, :3] != 7).any()


@pytest.mark.parametrize("write", [rope.rope_write, reference.rope_write])
@pytest.mark.parametrize("parts", [(2049.0,), (2048.0, 1.0)])
def test_rope_write_rounds_once_after_the_bias(parts: tuple[float, ...], write: Callable[..., Tensor]) -> None:
    # fp16 cannot represent 2049: rounded before the bias of 1 is added, it would become 2048
    pages = make_pages((0,), 1, 4, 1, 8, torch.float16)
    partials = torch.tensor(parts, device=DEVICE)[:, None, None].repeat(1, 1, 24)
    bias = torch.ones(24, dtype=torch.float16, device=DEVICE)
    write(partials, bias, None, None, EPS, make_rope(1, 8), pages.lengths, pages.table, pages.cache, 4)
    assert (pages.cache[1, pages.slots(1)[0]] == 2050).all()


@pytest.mark.parametrize(("parts", "value"), [((2.0**25, -(2.0**25), 1.0), 1), ((1.0, -(2.0**25), 2.0**25), 0)])
def test_rope_write_adds_parts_in_their_order(parts: tuple[float, ...], value: int) -> None:
    pages, partials = make_pages((0,), 1, 4, 1, 8), torch.tensor(parts, device=DEVICE)[:, None, None].repeat(1, 1, 24)
    rope.rope_write(partials, None, None, None, EPS, make_rope(1, 8), pages.lengths, pages.table, pages.cache, 4)
    assert (pages.cache[1, pages.slots(1)[0]] == value).all()


@pytest.mark.parametrize(("case", "dtype"), in_turn([(case,) for case in WRITES]), ids=str)
def test_context_write_writes_the_counted_rows_of_every_layer(case: Write, dtype: torch.dtype) -> None:
    block, group, groups, width, contexts, size = case
    layers, rows = group, len(contexts) * block
    pages = make_pages(contexts, block, size, groups, width)
    before = randn(layers, *pages.cache.shape, dtype=dtype)
    kv, k_weights = randn(rows, layers * 2 * groups * width, dtype=dtype), randn(layers, width, dtype=dtype)
    table = make_rope(max(contexts) + block, width)
    steps = torch.arange(block, device=DEVICE)
    for counts in ([block, 0, (block + 1) // 2], [0, block, 1]):
        counted = integers(counts[: len(contexts)])
        cache, expected = before.clone(), before.clone()
        arguments = (kv, k_weights, EPS, table, pages.lengths, counted, pages.table)
        rope.context_write(*arguments, cache, size)
        reference.context_write(*arguments, expected, size)
        taken = (steps < counted[:, None]).flatten()
        slots, positions = pages.slots(block).flatten()[taken], (pages.lengths[:, None] + steps).flatten()[taken]
        assert only_changed(before, cache, slots)
        if not taken.any():
            continue
        each = kv[taken].unflatten(1, (layers, 2, groups, width))
        for layer in range(layers):
            exact = exact_rotated(each[:, layer, 0], k_weights[layer], table, positions)
            assert_as_exact_as_torch(cache[layer, 0, slots], expected[layer, 0, slots], exact)
            assert torch.equal(cache[layer, 1, slots], each[:, layer, 1])
