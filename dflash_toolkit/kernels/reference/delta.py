"""Defines gated delta nets (Yang et al., arXiv 2412.06464), as transformers' Qwen3_5GatedDeltaNet has them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..delta import DeltaMemory, TreeInputs
from ..tree import TreeRows


def delta_inputs(
    qkv: Tensor,
    ba: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    memory: DeltaMemory,
    slots: Tensor,
    stay: Tensor,
    counts: Tensor,
    chains: TreeRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the delta rule's inputs: those of the last block's committed rows, then those of this block's rows.

    The memory's window advances over the committed rows. Then it stores the inputs and gates of this block.

    Args:
        qkv: [M, C] queries, keys and values before the short convolution; row b * S + k is row k of request b. It may
            be columns of a wider matrix.
        ba: [P, M, 2 N] partial sums of the projections to beta and to the decay, of N heads.
        weight: [C, T], of the convolution over the last T inputs of each channel; SiLU follows.
        a_log, dt_bias: [N]; the state decays by exp(-exp(a_log) softplus(a + dt_bias)).
        slots: int32 [B], each request's slot in the memory.
        stay: int32 [B], number of committed rows of a request's last block, see `accept`.
        counts: int32 [B]; rows k >= counts[b] are padding and leave no trace.
        chains: given if the rows are those of trees without siblings: then row k of request b is chains.starts[b] + k,
            counts[b] <= `memory.rows`, and S is `memory.rows`.

    Returns:
        [B, R, C] in qkv's dtype and gates fp32 [B, R, 2, N], R = `memory.rows` + S. Request b has stay[b] +
        counts[b] rows.
    """
    batch, taps = len(slots), weight.shape[1]
    block = len(qkv) // batch if chains is None else memory.rows
    starts = [i * block for i in range(batch)] if chains is None else chains.starts.tolist()
    mixed = qkv.new_zeros(batch, memory.rows + block, qkv.shape[1])
    gates = memory.gates.new_zeros(batch, memory.rows + block, 2, len(a_log))
    own = _gates(ba, a_log, dt_bias, qkv.dtype)
    for i, (slot, old, count) in enumerate(zip(slots.tolist(), stay.tolist(), counts.tolist(), strict=True)):
        if not old + count:
            continue
        rows = slice(starts[i], starts[i] + count)
        sequence = torch.cat([memory.window[slot], memory.inputs[slot, :old], qkv[rows]])  # [T - 1 + old + count, C]
        mixed[i, : old + count] = _convolved(sequence.unfold(0, taps, 1), weight)
        gates[i, : old + count] = torch.cat([memory.gates[slot, :old], own[rows]])
        memory.window[slot] = sequence[old : old + taps - 1]
        memory.inputs[slot, :count], memory.gates[slot, :count] = qkv[rows], own[rows]
    return mixed, gates


def delta_rule(
    mixed: Tensor,
    gates: Tensor,
    memory: DeltaMemory,
    slots: Tensor,
    stay: Tensor,
    counts: Tensor,
    chains: TreeRows | None = None,
) -> Tensor:
    """Returns the outputs of a block's rows, after updating the state with the committed rows of the last block.

    S <- decay S; S <- S + k (beta (v - S^T k))^T; the output is S^T q, with keys and queries of length 1 and queries
    over sqrt(H_k). A head of queries and keys serves the N / G heads of values at its place.

    Args:
        mixed, gates, slots, stay, counts, chains: as for `delta_inputs`; mixed has G heads of queries, G of keys, N of
            values.
        memory: its state is advanced to the beginning of this block.

    Returns:
        [M, N H_v] in mixed's dtype; padding is zero.
    """
    batch, block = len(slots), mixed.shape[1] - memory.rows
    starts = [i * block for i in range(batch)] if chains is None else chains.starts.tolist()
    q, k, v = _heads(mixed, memory)
    out = mixed.new_zeros(batch * block if chains is None else len(chains.requests), v[0, 0].numel())
    for i, (slot, old, count) in enumerate(zip(slots.tolist(), stay.tolist(), counts.tolist(), strict=True)):
        state = memory.state[slot]
        for row in range(old + count):
            if row == old:
                memory.state[slot] = state
            state = _updated(state, k[i, row], v[i, row], gates[i, row])
            if row >= old:
                out[starts[i] + row - old] = _read(state, q[i, row]).to(out.dtype)
        if not count:
            memory.state[slot] = state
    return out


def delta_chunk(
    qkv: Tensor,
    ba: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    memory: DeltaMemory,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
) -> Tensor:
    """Computes `delta_inputs` and `delta_rule` for rows that are all committed, and updates the memory with them.

    Args:
        starts: int32 [B], tokens before the first row; 0 resets the memory.

    Returns:
        [M, N H_v] in qkv's dtype; padding is zero.
    """
    rows = len(qkv) // len(slots)
    at = slots.long()
    state, window = memory.state[at], memory.window[at]
    state[starts == 0], window[starts == 0] = 0.0, 0.0
    kept = (memory.inputs.new_zeros(len(at), rows, qkv.shape[1]), memory.gates.new_zeros(len(at), rows, 2, len(a_log)))
    own, order, none = DeltaMemory(state, window, *kept), torch.arange(len(at)), torch.zeros_like(counts)
    parameters, found = (weight, a_log, dt_bias, own, order), []
    for stay, count in ((none, counts), (counts, none)):
        parts = delta_inputs(qkv, ba, *parameters, stay, count)
        found.append(delta_rule(*parts, own, order, stay, count))
    memory.state[at], memory.window[at] = own.state, own.window
    return found[0]


def fold_(memory: DeltaMemory, weights: Tensor, slots: Tensor, stay: Tensor, counts: Tensor) -> None:
    """Adds the committed rows of the last block to the states and windows of all layers.

    Args:
        memory: that of all layers, see `DeltaMemory.of_layers`.
        weights: [layers, C, T], of the layers' convolutions.
        slots, stay: as for `delta_inputs`.
        counts: int32 [B], zeros.
    """
    heads = memory.gates.shape[3]
    for own, weight in zip(memory.of_layers(len(weights)), weights, strict=True):
        qkv, ba, rate = weight.new_zeros(0, len(weight)), weight.new_zeros(1, 0, 2 * heads), weight.new_zeros(heads)
        parts = delta_inputs(qkv, ba, weight, rate, rate, own, slots, stay, counts)
        delta_rule(*parts, own, slots, stay, counts)


def tree_delta_inputs(
    qkv: Tensor,
    ba: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    memory: DeltaMemory,
    slots: Tensor,
    tree: TreeRows,
    paths: Tensor,
    kept: TreeInputs,
) -> Tensor:
    """Returns the delta rule's inputs for rows of trees. A row follows the rows of its path, and they the window.

    The memory already has the committed rows of the last block, see `fold_`, and does not change.

    Args:
        qkv, ba, weight, a_log, dt_bias, slots: as for `delta_inputs`.
        paths: int32 [B, N + 1, K + 1], see `Trees`.
        kept: receives the inputs and gates of the rows.

    Returns:
        [M, C] in qkv's dtype; padding is undefined.
    """
    mixed, taps = torch.zeros_like(qkv), weight.shape[1]
    for row, (request, depth) in enumerate(zip(tree.requests.tolist(), tree.depths.tolist(), strict=True)):
        if request >= 0:
            first = int(tree.starts[request])
            path = first + paths[request, row - first, : depth + 1].long()
            sequence = torch.cat([memory.window[slots[request]], qkv[path]])
            mixed[row] = _convolved(sequence[-taps:].T, weight)
    kept.inputs.copy_(qkv)
    kept.gates.copy_(_gates(ba, a_log, dt_bias, qkv.dtype))
    return mixed


def tree_delta_rule(
    mixed: Tensor, gates: Tensor, memory: DeltaMemory, slots: Tensor, tree: TreeRows, paths: Tensor
) -> Tensor:
    """Returns the outputs [M, N H_v] of rows of trees. A row's state is that of its parent and one update.

    Args:
        mixed: result of `tree_delta_inputs`.
        gates: those that it has kept.
        memory: its state is that before the anchors; it does not change.
    """
    q, k, v = _heads(mixed, memory)
    out = mixed.new_zeros(len(mixed), v[0].numel())
    states = dict[int, Tensor]()
    for row, (request, parent) in enumerate(zip(tree.requests.tolist(), tree.parents.tolist(), strict=True)):
        if request >= 0:
            before = memory.state[slots[request]] if parent == row else states[parent]
            states[row] = _updated(before, k[row], v[row], gates[row])
            out[row] = _read(states[row], q[row]).to(out.dtype)
    return out


def keep_path_(memory: DeltaMemory, kept: TreeInputs, slots: Tensor, path: Tensor, counts: Tensor) -> None:
    """Stores the inputs and gates of the accepted rows of trees as those of the last block, in all layers.

    Args:
        memory, kept: those of all layers.
        path, counts: results of `accept_trees`.
    """
    for layer, own in enumerate(memory.of_layers(len(kept.inputs))):
        every = kept.of_layer(layer)
        for slot, rows, count in zip(slots.tolist(), path, counts.tolist(), strict=True):
            own.inputs[slot, :count], own.gates[slot, :count] = every.inputs[rows[:count]], every.gates[rows[:count]]


def _gates(ba: Tensor, a_log: Tensor, dt_bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns decay factors and beta, fp32 [M, 2, N]."""
    b, a = ba.float().sum(0).to(dtype).float().chunk(2, dim=1)
    decay = (-a_log.float().exp() * F.softplus(a + dt_bias.float())).exp()
    return torch.stack([decay, b.sigmoid().to(dtype).float()], dim=1)


def _convolved(inputs: Tensor, weight: Tensor) -> Tensor:
    """Returns the short convolution's output [..., C] for its last inputs [..., C, T]."""
    return F.silu((inputs.float() * weight.float()).sum(-1).to(inputs.dtype))


def _heads(mixed: Tensor, memory: DeltaMemory) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys [..., N, H_k] and values [..., N, H_v] of rows [..., C], fp32."""
    heads, width_k, width_v = memory.state.shape[1:]
    groups = (mixed.shape[-1] - heads * width_v) // (2 * width_k)
    q, k, v = mixed.float().split([groups * width_k, groups * width_k, heads * width_v], dim=-1)
    q, k = (t.unflatten(-1, (groups, width_k)).repeat_interleave(heads // groups, dim=-2) for t in (q, k))
    q, k = (t * torch.rsqrt(t.pow(2).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    return q / width_k**0.5, k, v.unflatten(-1, (heads, width_v))


def _updated(state: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    """Returns the state [N, H_k, H_v] after a row."""
    decay, beta = gates[:, :, None]  # [N, 1]
    state = state * decay[..., None]
    delta = (v - (state * k[:, :, None]).sum(1)) * beta
    return state + k[:, :, None] * delta[:, None]


def _read(state: Tensor, q: Tensor) -> Tensor:
    """Returns a row's output [N H_v]."""
    return (state * q[:, :, None]).sum(1).flatten()
