"""Gated delta nets that can take rows back: the definition against transformers, the kernels against both."""

import math
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest
import torch
from delta_nets import ROWS, TAPS, Net, copied, net
from kernel_inputs import DEVICE, assert_as_exact_as_torch, guarded, in_turn, integers
from torch import Tensor
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, Qwen3_5RMSNormGated

from dflash_toolkit.kernels import fla, reference
from dflash_toolkit.kernels.reference import cut_trees, grow_trees
from dflash_toolkit.kernels.tree import TreeRows
from dflash_toolkit.kernels.triton import delta as kernels
from dflash_toolkit.kernels.triton import delta_chunk as chunked

pytestmark = [pytest.mark.gpu] * (DEVICE == "cuda")  # `make test-gpu` runs them there


# for every step: how many rows of the last block stayed, and how many of this one are real, for three requests
STEPS = [
    ((0, 0, 0), (5, 4, 0)), ((5, 1, 0), (5, 5, 3)), ((2, 3, 3), (1, 5, 0)), ((1, 0, 0), (0, 2, 0)),
    ((0, 2, 0), (5, 1, 4)),
]  # fmt: skip


@pytest.mark.skipif(DEVICE == "cuda", reason="compares definitions, and transformers may take kernels on a GPU")
def test_delta_net_definition_equals_transformers() -> None:
    config = Qwen3_5TextConfig(
        hidden_size=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6,
        linear_value_head_dim=5, linear_conv_kernel_dim=TAPS, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    mixer = Qwen3_5GatedDeltaNet(config, 0).eval()
    with torch.no_grad():
        mixer.dt_bias.normal_()
        mixer.norm.weight.normal_()
    ours = Net(2, 4, 6, 5, mixer.conv1d.weight[:, 0], mixer.A_log, mixer.dt_bias, torch.float32)
    memory = ours.memory(4)
    texts: list[list[Tensor]] = [[], [], []]  # hidden states that stayed
    last: list[Tensor] = []
    for stay, counts in STEPS:
        for i, hidden in enumerate(last):
            texts[i].extend(hidden[: stay[i]])
        last = list(torch.randn(3, ROWS, 16))
        rows = torch.stack(last).flatten(0, 1)
        with torch.no_grad():
            projected = torch.cat([p(rows) for p in (mixer.in_proj_qkv, mixer.in_proj_b, mixer.in_proj_a)], dim=1)
            found = ours.step(reference, projected, memory, (3, 0, 2), stay, counts)
            gate = mixer.in_proj_z(rows)
            found = mixer.out_proj(reference.gated_rms_norm(found, gate, mixer.norm.weight, config.rms_norm_eps))
            for i, count in enumerate(counts):
                if count:
                    text = torch.stack([*texts[i], *last[i][:count]])[None]
                    expected = mixer(text)[0, -count:]
                    torch.testing.assert_close(found.view(3, ROWS, -1)[i, :count], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    in_turn([((1, 1, 8, 8),), ((2, 6, 12, 40),)])
    + ([((16, 48, 128, 128), torch.bfloat16)] if DEVICE == "cuda" else []),
)
def test_a_step_leaves_outputs_and_memory_as_defined(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    own = net(*sizes, dtype)
    memory, slots = own.memory(5), (4, 1, 2)
    memory.state.normal_()
    memory.window.normal_()
    for stay, counts in STEPS:
        expected = copied(memory)
        memory.inputs[3] = memory.gates[3] = memory.state[3] = math.nan  # another request's
        rows = own.rows(3, ROWS)
        for i, count in enumerate(counts):
            rows.view(3, ROWS, -1)[i, count:] = math.nan
        defined = own.step(reference, rows, expected, slots, stay, counts)
        found = own.step(kernels, rows, memory, slots, stay, counts)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found, defined, rtol=4 * eps, atol=4 * eps * max(1.0, defined.abs().max().item()))
        for name in ("window", "inputs"):
            assert torch.equal(getattr(memory, name)[list(slots)], getattr(expected, name)[list(slots)])
        for name in ("state", "gates"):
            ours, theirs = (getattr(each, name)[list(slots)] for each in (memory, expected))
            torch.testing.assert_close(ours, theirs, rtol=8 * eps, atol=8 * eps)


def test_drafts_leave_the_bits_that_one_row_at_a_time_leaves() -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    own = net(2, 6, 12, 40, dtype) if DEVICE == "cpu" else net(16, 48, 128, 128, dtype)
    drafted, plain = own.memory(1), own.memory(1)
    text = own.rows(1, 14)
    alone = []
    for i in range(len(text)):
        alone.append(own.step(kernels, text[i : i + 1], plain, (0,), (min(i, 1),), (1,)))
    at, stay = 0, 0
    for accepted in (3, 1, 5, 2, 3):
        block = own.rows(1, ROWS)  # a wrong draft is any row
        block[:accepted] = text[at : at + accepted]
        found = own.step(kernels, block, drafted, (0,), (stay,), (ROWS,))
        assert torch.equal(found[:accepted], torch.cat(alone[at : at + accepted])), at
        at, stay = at + accepted, accepted
    for memory, last in ((drafted, stay), (plain, 1)):  # adds the rows that stayed
        own.step(kernels, own.rows(1, 1), memory, (0,), (last,), (0,))
    assert torch.equal(drafted.state, plain.state) and torch.equal(drafted.window, plain.window)
    assert plain.state.any()


def chains_of(counts: Sequence[int], rows: int) -> TreeRows:
    """Chains after anchors, of so many rows each; `rows` with the padding after them."""
    batch, slots = len(counts), ROWS - 1
    ranks = torch.zeros(batch, slots, 1, 1, dtype=torch.int32)
    limits = torch.tensor(counts, dtype=torch.int32) - 1
    candidates = torch.zeros(batch, slots, 1, dtype=torch.int64)
    trees = grow_trees(torch.full_like(ranks, -0.5, dtype=torch.float32), ranks, candidates, limits, slots)
    none = torch.zeros(batch, dtype=torch.int32)
    found = cut_trees(trees, none.long(), none, torch.zeros(batch, 1, dtype=torch.int32), 64, rows)
    assert found.starts.diff().tolist() == [*counts]
    return TreeRows(*(getattr(found, each.name).to(DEVICE) for each in fields(found)))


def test_chains_are_blocks_of_as_many_rows_of_each_request() -> None:
    """Rows are consecutive; outputs and memory have the bits of padded blocks."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    own, slots, width = net(1, 2, 8, 20, dtype), (4, 1, 2), 40
    ragged = own.memory(5)
    ragged.state.normal_()
    padded, defined = copied(ragged), copied(ragged)
    steps = [((0, 0, 0), (5, 1, 3)), ((5, 1, 2), (1, 4, 2)), ((1, 0, 1), (2, 1, 5))]
    for padding, (stay, counts) in enumerate(steps):
        for memory in (ragged, padded):
            memory.inputs[3] = memory.gates[3] = memory.state[3] = math.nan  # another request's
        block = own.rows(3, ROWS).view(3, ROWS, -1)
        every = torch.full((padding, block.shape[2]), math.nan, dtype=dtype, device=DEVICE)
        rows = torch.cat([*(each[:n] for each, n in zip(block, counts, strict=True)), every])
        chains = chains_of(counts, len(rows))
        found = own.step(kernels, rows, ragged, slots, stay, counts, chains)
        expected = own.step(kernels, block.flatten(0, 1), padded, slots, stay, counts).view(3, ROWS, -1)
        zeros = found.new_zeros(padding, width)
        assert torch.equal(found, torch.cat([*(each[:n] for each, n in zip(expected, counts, strict=True)), zeros]))
        eps = torch.finfo(dtype).eps
        close = {"rtol": 4 * eps, "atol": 4 * eps * max(1.0, found.abs().max().item())}
        torch.testing.assert_close(own.step(reference, rows, defined, slots, stay, counts, chains), found, **close)
        for each in fields(ragged):
            ours, theirs, exact = (getattr(memory, each.name)[list(slots)] for memory in (ragged, padded, defined))
            assert torch.equal(ours, theirs), each.name
            torch.testing.assert_close(ours, exact, rtol=8 * eps, atol=8 * eps)
    assert found.any()


def test_request_bits_do_not_depend_on_batch_or_padding() -> None:
    own = net(2, 4, 8, 16)
    memory = own.memory(4)
    memory.state.normal_()
    memory.inputs.normal_()
    memory.gates.uniform_(0, 1)
    alone, before, rows = copied(memory), copied(memory), own.rows(3, 3)
    rows[6:] = math.nan
    found = own.step(kernels, rows, memory, (2, 0, 3), (1, 2, 0), (3, 2, 0))
    assert torch.equal(own.step(kernels, rows[3:6], alone, (0,), (2,), (2,)), found[3:6])
    assert not found[5].any() and not found[6:].any()
    for each in fields(memory):
        kept, was = getattr(memory, each.name), getattr(before, each.name)
        assert torch.equal(kept[3], was[3]) and torch.equal(kept[1], was[1])
        assert torch.equal(kept[0], getattr(alone, each.name)[0])
    assert torch.equal(memory.inputs[0, 2:], before.inputs[0, 2:])


@pytest.mark.parametrize(("sizes", "dtype"), in_turn([((2, 6, 12, 40),)]))
def test_chunked_prefill_equals_single_row_prefill(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    own, slots = net(*sizes, dtype), integers([3, 1])
    by_rows, in_chunks, defined, plain = (own.memory(4) for _ in range(4))
    for memory in (by_rows, in_chunks, defined):  # left by earlier requests
        for each in fields(memory):
            getattr(memory, each.name)[[1, 3]] = math.nan
    text = own.rows(2, 19).view(2, 19, -1)
    alone = [
        own.step(reference, text[:, i].contiguous(), plain, (3, 1), (min(i, 1),) * 2, (1, 1)).float() for i in range(19)
    ]
    own.step(reference, text[:, 0].contiguous(), plain, (3, 1), (1, 1), (0, 0))
    start, ways = 0, [(kernels, by_rows, list[Tensor]()), (chunked, in_chunks, []), (reference, defined, [])]
    if DEVICE == "cuda" and dtype == torch.float32:
        del ways[1]  # `gpu.delta_chunk` computes fp32 row by row; the chunks of fp32 do not fit every GPU
    for size in (2, 8, 7, 2):
        rows = torch.full((2, size + 3, text.shape[2]), math.nan, dtype=dtype, device=DEVICE)  # three are padding
        rows[:, :size] = text[:, start : start + size]
        for ops, memory, outputs in ways:
            qkv, ba = own.parted(rows.flatten(0, 1))
            where = slots, integers([start] * 2), integers([size] * 2)
            out = ops.delta_chunk(qkv, ba, own.weight, own.a_log, own.dt_bias, memory, *where).unflatten(0, (2, -1))
            assert not out[:, size:].any()
            outputs.append(out[:, :size].float())
        start += size
    eps = torch.finfo(dtype).eps
    close = {"rtol": 8 * eps, "atol": 8 * eps * max(1.0, *(out.abs().max().item() for out in alone))}
    for _, memory, outputs in ways:
        torch.testing.assert_close(torch.cat(outputs, dim=1), torch.stack(alone, dim=1), **close)
        torch.testing.assert_close(memory.state[[1, 3]], plain.state[[1, 3]], **close)
        assert torch.equal(memory.window[[1, 3]], plain.window[[1, 3]])


def exact_rule(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Row by row in float64: outputs [B, S, N, H_v], and the state [B, N, H_k, H_v] after them."""
    q, k = (x.double().repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    state, found = state.double(), list[Tensor]()
    decay, beta = gates[0].double().exp()[..., None], gates[1].double()[..., None]
    for i in range(q.shape[1]):
        state = state * decay[:, i, ..., None]
        delta = (v[:, i].double() - (state * k[:, i, ..., None]).sum(2)) * beta[:, i]
        state = state + k[:, i, ..., None] * delta[:, :, None]
        found.append((state * q[:, i, ..., None]).sum(2) / q.shape[-1] ** 0.5)
    return torch.stack(found, dim=1), state


@pytest.mark.parametrize("parallel", [False, True])
def test_delta_rule_in_chunks_equals_one_row_at_a_time(parallel: bool) -> None:
    """`parallel` keys have one direction and are written whole, so that powers of the triangle are huge."""
    sizes = (2, 200, 16, 48, 128) if DEVICE == "cuda" else (2, 83, 1, 2, 12)
    batch, rows, groups, heads, width = sizes
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    q, k = (torch.randn(batch, rows, groups, width, device=DEVICE) for _ in range(2))
    if parallel:
        k = k[:, :1] + 0.01 * k
    q, k = (torch.nn.functional.normalize(x, dim=-1).to(dtype) for x in (q, k))
    v = torch.randn(batch, rows, heads, width, device=DEVICE).to(dtype)
    gates = torch.rand(2, batch, rows, heads, device=DEVICE)
    gates[0] *= -0.001 if parallel else -1.0
    gates[1] += parallel * (1.0 - gates[1])
    state = torch.randn(4, heads, width, width, device=DEVICE)
    outputs, after = exact_rule(
        q, k, v, gates, state[[3, 1]] * torch.tensor([1.0, 0.0], device=DEVICE).view(2, 1, 1, 1)
    )
    rules = [chunked.chunk_rule] + [fla.chunk_rule] * (DEVICE == "cuda" and fla.delta_rule() is not None)
    bound = 0.02 if DEVICE == "cuda" else 1e-5
    for rule in rules:
        own = state.clone()
        found = rule(q, k, v, gates, own, integers([3, 1]), integers([64, 0]), integers([rows, rows]))
        assert (found.view_as(outputs).double() - outputs).norm() <= bound * outputs.norm()
        assert (own[[3, 1]].double() - after).norm() <= bound * after.norm()
        assert torch.equal(own[[0, 2]], state[[0, 2]])


def test_prompt_bits_do_not_depend_on_chunk_boundaries() -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    own = net(16, 48, 128, 128, dtype) if DEVICE == "cuda" else net(1, 2, 8, 16)
    memories, found = [], []
    text = own.rows(1, 150)
    for cuts in ([0, 150], [0, 64, 128, 150]):
        memory, outputs = own.memory(2), []
        for start, end in pairwise(cuts):
            qkv, ba = own.parted(text[start:end])
            where = integers([1]), integers([start]), integers([end - start])
            outputs.append(chunked.delta_chunk(qkv, ba, own.weight, own.a_log, own.dt_bias, memory, *where))
        memories.append(memory)
        found.append(torch.cat(outputs))
    assert torch.equal(*found) and found[0].any()
    assert torch.equal(memories[0].state, memories[1].state) and torch.equal(memories[0].window, memories[1].window)


@pytest.mark.parametrize(
    ("m", "heads", "width", "dtype"),
    in_turn([(3, 6, 16), (1, 5, 12), (2, 3, 300)] + [(64, 48, 128)] * (DEVICE == "cuda")),
)
def test_heads_are_normed_and_gated(m: int, heads: int, width: int, dtype: torch.dtype) -> None:
    x, weight = guarded(torch.randn(m, heads * width).to(dtype)), guarded(torch.randn(width).to(dtype))
    wide = torch.full((m, heads * width + 9), math.nan, dtype=dtype, device=DEVICE)
    gate = wide[:, 4:-5]
    gate[:] = torch.randn(m, heads * width)
    double = x.double().unflatten(1, (heads, width))
    exact = double * torch.rsqrt(double.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
    exact = exact.flatten(1) * torch.nn.functional.silu(gate.double())
    defined = reference.gated_rms_norm(x, gate, weight, 1e-6)
    assert_as_exact_as_torch(kernels.gated_rms_norm(x, gate, weight, 1e-6), defined, exact)
    theirs: Any = Qwen3_5RMSNormGated(width, 1e-6).to(DEVICE)
    theirs.weight.data = weight
    expected = theirs(x.reshape(-1, width), gate.reshape(-1, width)).view_as(x)
    torch.testing.assert_close(defined, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
