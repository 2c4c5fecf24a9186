"""Mixers of gated delta nets with random parameters, and their steps by any operations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import ModuleType

import torch
from kernel_inputs import DEVICE, guarded, integers
from torch import Tensor

from dflash_toolkit.kernels.delta import DeltaMemory, TreeInputs
from dflash_toolkit.kernels.tree import TreeRows

TAPS, ROWS = 4, 5  # taps of the convolution; rows of the longest block


@dataclass(frozen=True)
class Net:
    """A mixer's parameters and sizes."""

    groups: int
    heads: int
    width_k: int
    width_v: int
    weight: Tensor  # [C, T]
    a_log: Tensor
    dt_bias: Tensor
    dtype: torch.dtype

    @property
    def channels(self) -> int:
        return len(self.weight)

    def memory(self, slots: int) -> DeltaMemory:
        widths = self.width_k, self.width_v
        return DeltaMemory.empty(slots, ROWS, TAPS, self.channels, self.heads, widths, self.dtype, torch.device(DEVICE))

    def rows(self, batch: int, block: int) -> Tensor:
        """Random inputs [B * S, C + 2 N] of a block."""
        return torch.randn(batch * block, self.channels + 2 * self.heads, device=DEVICE).to(self.dtype)

    def parted(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the inputs of the convolution, and partial sums of the gates' inputs."""
        qkv, ba = rows.split([self.channels, 2 * self.heads], dim=1)
        return qkv, torch.stack([0.75 * ba.float(), 0.25 * ba.float()])

    def step(
        self, ops: ModuleType, rows: Tensor, memory: DeltaMemory, slots: Sequence[int], stay: Sequence[int],
        counts: Sequence[int], chains: TreeRows | None = None,
    ) -> Tensor:  # fmt: skip
        """Outputs [M, N H_v] of rows [M, C + 2 N], between columns of NaN."""
        qkv, ba = self.parted(between_nan(rows))
        where = integers(slots), integers(stay), integers(counts)
        parts = ops.delta_inputs(qkv, ba, self.weight, self.a_log, self.dt_bias, memory, *where, chains)
        return ops.delta_rule(*parts, memory, *where, chains)

    def tree_step(
        self, ops: ModuleType, rows: Tensor, memory: DeltaMemory, slots: Tensor, tree: TreeRows, paths: Tensor
    ) -> tuple[Tensor, TreeInputs]:
        """Outputs [M, N H_v] of rows of trees [M, C + 2 N], between columns of NaN, and what they keep."""
        qkv, ba = self.parted(between_nan(rows))
        kept = TreeInputs(torch.full_like(qkv, math.nan), ba.new_full((len(rows), 2, self.heads), math.nan))
        parameters = self.weight, self.a_log, self.dt_bias, memory, slots
        mixed = ops.tree_delta_inputs(qkv, ba, *parameters, tree, paths, kept)
        return ops.tree_delta_rule(mixed, kept.gates, memory, slots, tree, paths), kept


def between_nan(rows: Tensor) -> Tensor:
    wide = torch.full((len(rows), rows.shape[1] + 7), math.nan, dtype=rows.dtype, device=DEVICE)
    wide[:, 2:-5] = rows
    return wide[:, 2:-5]


def net(groups: int, heads: int, width_k: int, width_v: int, dtype: torch.dtype = torch.float32) -> Net:
    channels = 2 * groups * width_k + heads * width_v
    weight = guarded((torch.randn(channels, TAPS) / 2).to(dtype))
    rates, bias = torch.empty(heads).uniform_(0.01, 4).log(), torch.randn(heads)
    return Net(groups, heads, width_k, width_v, weight, guarded(rates), guarded(bias.to(dtype)), dtype)


def copied(memory: DeltaMemory) -> DeltaMemory:
    return DeltaMemory(*(getattr(memory, each.name).clone() for each in fields(memory)))
