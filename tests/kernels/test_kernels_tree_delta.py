"""Gated delta nets over draft trees: the definition against single paths, the kernels against both."""

import math
from collections.abc import Sequence
from dataclasses import fields

import pytest
import torch
from delta_nets import ROWS, Net, copied, net
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_inputs import DEVICE, in_turn, integers
from torch import Tensor

from dflash_toolkit.kernels import reference
from dflash_toolkit.kernels.delta import DeltaMemory, TreeInputs
from dflash_toolkit.kernels.tree import TreeRows
from dflash_toolkit.kernels.triton import delta as kernels
from dflash_toolkit.kernels.triton import tree_delta as tree_kernels

pytestmark = [pytest.mark.gpu] * (DEVICE == "cuda")  # `make test-gpu` runs them there
SLOTS = (4, 1, 2)
FAMILY = [[0, 0, 1, 1, 2, 3, 3, 5], [], [0, 1, 2, 3]]  # parents of the nodes of three requests: places
Parents = Sequence[Sequence[int]]


@st.composite
def families(draw: st.DrawFn) -> list[list[int]]:
    """Parents of random trees of three requests, at most ROWS - 1 deep."""
    found = []
    for _ in SLOTS:
        depths, parents = [0], list[int]()
        for _ in range(draw(st.integers(0, 12))):
            parents.append(draw(st.sampled_from([i for i, depth in enumerate(depths) if depth < ROWS - 1])))
            depths.append(depths[parents[-1]] + 1)
        found.append(parents)
    return found


def trees_of(families: Parents, padding: int) -> tuple[TreeRows, Tensor]:
    """Rows of trees with these parents, and the paths to each place; what the paths leave undefined is huge."""
    starts, requests, parents, depths = [0], list[int](), list[int](), list[int]()
    paths = torch.full((len(families), 1 + max(map(len, families)), ROWS), 10**6, dtype=torch.int32)
    for b, family in enumerate(families):
        own = [0]
        paths[b, 0, 0] = 0
        for place, parent in enumerate(family, 1):
            own.append(own[parent] + 1)
            paths[b, place, : own[place]] = paths[b, parent, : own[place]]
            paths[b, place, own[place]] = place
        requests += [b] * len(own)
        parents += [starts[-1] + parent for parent in (0, *family)]
        depths += own
        starts.append(len(requests))
    requests, depths = [*requests, *[-1] * padding], [*depths, *[0] * padding]
    parents += range(len(parents), len(requests))
    rest = torch.zeros(len(requests), dtype=torch.int64, device=DEVICE)
    rows = TreeRows(integers(starts), integers(requests), integers(parents), integers(depths), *[rest] * 5)
    return rows, paths.to(DEVICE)


def paths_to_rows(rows: TreeRows) -> list[list[int]]:
    """The rows from the anchor to each row; empty for padding."""
    found = list[list[int]]()
    for row, (request, parent) in enumerate(zip(rows.requests.tolist(), rows.parents.tolist(), strict=True)):
        found.append([] if request < 0 else [row] if parent == row else [*found[parent], row])
    return found


def begun(own: Net) -> DeltaMemory:
    """A memory with random states; slot 3 is another request's."""
    memory = own.memory(5)
    memory.state.normal_()
    memory.window.normal_()
    memory.inputs[3] = memory.gates[3] = memory.state[3] = memory.window[3] = math.nan
    return memory


def alone(own: Net, rows: Tensor, path: Sequence[int], memory: DeltaMemory, slot: int) -> tuple[Tensor, DeltaMemory]:
    """The outputs of a path, one row after the other; the memory after them, the last one added."""
    kept = copied(memory)
    found = [own.step(kernels, rows[row : row + 1], kept, (slot,), (i > 0,), (1,)) for i, row in enumerate(path)]
    own.step(kernels, rows[:1], kept, (slot,), (1,), (0,))
    return torch.cat(found), kept


def check_trees(own: Net, parents: Parents, padding: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have the bits of their paths in plain decoding, near the definition; the memory gets the kept path alone."""
    monkeypatch.setattr(tree_kernels, "PROGRAMS", programs)
    tree, paths = trees_of(parents, padding)
    memory = begun(own)
    before, rows = copied(memory), torch.randn(len(tree.requests), own.channels + 2 * own.heads, device=DEVICE)
    rows = rows.to(own.dtype)
    rows[len(rows) - padding :] = math.nan
    found, kept = own.tree_step(tree_kernels, rows, memory, integers(SLOTS), tree, paths)
    defined, _ = own.tree_step(reference, rows, before, integers(SLOTS), tree, paths)
    eps = torch.finfo(own.dtype).eps
    torch.testing.assert_close(found, defined, rtol=4 * eps, atol=4 * eps * max(1.0, defined.abs().max().item()))
    ways, starts = paths_to_rows(tree), tree.starts.tolist()
    assert not found[len(rows) - padding :].any() and found[0].any()
    for each in fields(memory):
        assert torch.equal(getattr(memory, each.name).nan_to_num(), getattr(before, each.name).nan_to_num())
    taken = [ways[starts[b + 1] - 1] for b in range(len(SLOTS))]  # to the last node
    path = torch.tensor([[*way, *[way[-1]] * (ROWS - len(way))] for way in taken], device=DEVICE)
    counts = [len(way) for way in taken]
    counts[1] = 0  # an inactive request
    where = integers(SLOTS), integers(counts)
    both = DeltaMemory(*(torch.cat([getattr(each, f.name) for each in (before, memory)]) for f in fields(memory)))
    every = TreeInputs(torch.stack([kept.inputs.flip(0), kept.inputs]), torch.stack([kept.gates, kept.gates]))
    tree_kernels.keep_path_(both, every, where[0], path, where[1])
    kernels.fold_(both, torch.stack([own.weight.flip(0), own.weight]), *where, integers([0, 0, 0]))
    other, memory = both.of_layers(2)
    assert not torch.equal(other.state[SLOTS[0]], memory.state[SLOTS[0]]), "layers have rows of their own"
    for b, slot in enumerate(SLOTS):
        inner = {way[-2] for way in ways if len(way) > 1}
        for leaf in set(range(starts[b], starts[b + 1])) - inner:
            outputs, after = alone(own, rows, ways[leaf], before, slot)
            assert torch.equal(found[ways[leaf]], outputs)
            if ways[leaf] == taken[b] and counts[b]:
                assert torch.equal(memory.state[slot], after.state[slot])
                assert torch.equal(memory.window[slot], after.window[slot])
    for each in ("state", "window"):
        assert torch.equal(getattr(memory, each)[[0, 1]], getattr(before, each)[[0, 1]])


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    in_turn([((1, 1, 8, 8),), ((2, 6, 12, 40),)])
    + ([((16, 48, 128, 128), torch.bfloat16), ((16, 32, 128, 128), torch.bfloat16)] if DEVICE == "cuda" else []),
)
def test_tree_rows_have_the_bits_of_plain_decoding(
    sizes: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_trees(net(*sizes, dtype), FAMILY, 3, tree_kernels.PROGRAMS, monkeypatch)


@settings(max_examples=2 if DEVICE == "cpu" else 40, deadline=None)
@given(families(), st.integers(0, 4), st.sampled_from([1, 24, 4096]))
@example([[0] * 12, [0, 1, 2, 3], []], 0, 1)
def test_random_trees_have_the_bits_of_plain_decoding(parents: list[list[int]], padding: int, programs: int) -> None:
    """A program computes all leaves of a request, or some, or one."""
    torch.manual_seed(0)
    own = net(1, 2, 8, 20, torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        check_trees(own, parents, padding, programs, patch)
