"""The operations of a decoding step and of the loss, and which implementation a device has.

`reference.py` defines each in plain torch; `gpu.py` chooses among the kernels by dtype and shape. Both modules are
of the type `Ops`.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .delta import DeltaMemory
from .mix import LogitScale, LossMix, RowTerms
from .tree import TreeRows, Trees
from .weight import Operand, Stacked, Weight

SHARED_MEMORY = 160 << 10  # bytes that a thread block of some kernels takes


class Ops(Protocol):
    """What `reference.py` defines, with the shapes of every argument.

    No operation's result for a row depends on the rows beside it (batch-invariant), up to MAX_ROWS rows.
    """

    def linear(self, x: Operand, weight: Weight, bias: Tensor | None = None) -> Tensor: ...

    def linear_split_k(self, x: Operand, weight: Weight, bias: Tensor | None = None) -> Tensor: ...

    def linear_swiglu(self, x: Operand, weight: Weight) -> Tensor: ...

    def linear_argmax(self, x: Tensor, weight: Weight) -> Tensor: ...

    def linear_top(self, x: Tensor, weight: Weight, count: int) -> tuple[Tensor, Tensor]: ...

    def linear_top_lse(
        self, x: Tensor, weight: Weight, count: int, scale: LogitScale
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def walk(
        self,
        state: Tensor,
        unary: Tensor,
        candidates: Tensor,
        predecessors: Tensor,
        successors: Tensor,
        anchors: Tensor,
    ) -> Tensor: ...

    def sampled_walk(
        self,
        state: Tensor,
        unary: Tensor,
        candidates: Tensor,
        predecessors: Tensor,
        successors: Tensor,
        anchors: Tensor,
        temperature: Tensor,
        uniform: Tensor,
    ) -> tuple[Tensor, Tensor]: ...

    def block_conv(self, x: Tensor, dynamic: Tensor, base: Tensor, block: int) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, partial_sums: Tensor | None, weight: Tensor, eps: float, tap: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def add_rms_norm_quantized(
        self, x: Tensor, partial_sums: Tensor | None, weight: Tensor, eps: float, tap: Tensor | None = None
    ) -> tuple[Tensor, Operand]: ...

    def conv_add_rms_norm(
        self,
        x: Tensor,
        partial_sums: Tensor,
        dynamic: Tensor,
        base: Tensor,
        block: int,
        weight: Tensor,
        eps: float,
        tap: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def fuses_post_attention(self, x: Tensor, weights: Sequence[Weight | None]) -> bool:
        """Whether `fused_post_attention` takes the stream x [M, D] and these matrices; it is given no bias."""
        ...

    def fused_post_attention(
        self,
        x: Tensor,
        a: Tensor,
        o: Weight,
        post_norm: Tensor,
        gate_up: Weight,
        down: Weight,
        norm: Tensor,
        qkv: Weight | None,
        eps: float,
        tap: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...

    def fuses_conv_post_attention(
        self, x: Tensor, weights: Sequence[Weight | None], convolutions: Sequence[tuple[Tensor, Weight] | None]
    ) -> bool:
        """Whether `fused_conv_post_attention` takes the stream x [M, D], these matrices and convolutions."""
        ...

    def fused_conv_post_attention(
        self,
        x: Tensor,
        a: Tensor,
        behind: Tensor,
        base: Tensor,
        o: Weight,
        post_norm: Tensor,
        ffn: tuple[Tensor, Weight],
        gate_up: Weight,
        down: Weight,
        norm: Tensor,
        following: tuple[Tensor, Weight] | None,
        qkv: Weight | None,
        eps: float,
        block: int,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]: ...

    def top_experts(
        self, partial_sums: Tensor, dtype: torch.dtype, top_k: int, *, normalized: bool, shared: bool
    ) -> tuple[Tensor, Tensor]: ...

    def experts_mlp(self, x: Operand, gate_up: Stacked, down: Stacked, weights: Tensor, experts: Tensor) -> Tensor: ...

    def rope_write(
        self,
        partial_sums: Tensor,
        bias: Tensor | None,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        rope: Tensor,
        lengths: Tensor,
        page_table: Tensor,
        cache: Tensor,
        page_size: int,
        counts: Tensor | None = None,
        *,
        gated: bool = False,
        at: Tensor | None = None,
    ) -> Tensor: ...

    def gate_heads(self, x: Tensor, partial_sums: Tensor, head_dim: int) -> Tensor: ...

    def block_attention(
        self,
        q: Tensor,
        cache: Tensor,
        lengths: Tensor,
        page_table: Tensor,
        page_size: int,
        *,
        causal: bool,
        window: int = 0,
        counts: Tensor | None = None,
    ) -> Tensor: ...

    def context_write(
        self,
        kv: Tensor,
        k_weights: Tensor,
        eps: float,
        rope: Tensor,
        lengths: Tensor,
        counts: Tensor,
        page_table: Tensor,
        cache: Tensor,
        page_size: int,
    ) -> None: ...

    def accept(
        self,
        draft: Tensor,
        choice: Tensor,
        active: Tensor,
        lengths: Tensor,
        last_token: Tensor,
        forced: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def draft_children(
        self,
        unary: Tensor,
        lse: Tensor,
        candidates: Tensor,
        calibration: Tensor,
        width: int,
        pairs: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def grow_trees(self, values: Tensor, ranks: Tensor, candidates: Tensor, limits: Tensor, nodes: int) -> Trees: ...

    def cut_trees(
        self, trees: Trees, last_token: Tensor, lengths: Tensor, page_table: Tensor, page_size: int, rows: int
    ) -> TreeRows: ...

    def promise_trees(
        self, trees: Trees, values: Tensor, ranks: Tensor, limits: Tensor, blocks: Sequence[int], rows: Sequence[int]
    ) -> Tensor: ...

    def tree_attention(
        self,
        q: Tensor,
        cache: Tensor,
        lengths: Tensor,
        page_table: Tensor,
        page_size: int,
        rows: TreeRows,
        paths: Tensor,
        window: int = 0,
    ) -> Tensor: ...

    def chain_attention(
        self,
        q: Tensor,
        cache: Tensor,
        lengths: Tensor,
        page_table: Tensor,
        page_size: int,
        rows: TreeRows,
        longest: int,
        window: int = 0,
    ) -> Tensor: ...

    def accept_trees(
        self,
        rows: TreeRows,
        choice: Tensor,
        active: Tensor,
        lengths: Tensor,
        last_token: Tensor,
        depth: int,
        forced: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def move_rows_(
        self,
        cache: Tensor,
        rows: TreeRows,
        path: Tensor,
        counts: Tensor,
        lengths: Tensor,
        page_table: Tensor,
        page_size: int,
    ) -> None: ...

    def tell_trees(
        self, rows: TreeRows, hidden: Tensor, tokens: Tensor, counts: Tensor, path: Tensor, promise: Tensor
    ) -> Tensor: ...

    def mask_logits_(self, logits: Tensor, masks: Tensor, at: Tensor) -> None: ...

    def sample(
        self, logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor, uniform: Tensor
    ) -> Tensor: ...

    def rejection_sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_p: Tensor,
        top_k: Tensor,
        min_p: Tensor,
        uniform: Tensor,
        draft: Tensor,
        candidates: Tensor,
        q: Tensor,
        acceptance: Tensor,
    ) -> Tensor: ...

    def delta_inputs(
        self,
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
    ) -> tuple[Tensor, Tensor]: ...

    def delta_rule(
        self,
        mixed: Tensor,
        gates: Tensor,
        memory: DeltaMemory,
        slots: Tensor,
        stay: Tensor,
        counts: Tensor,
        chains: TreeRows | None = None,
    ) -> Tensor: ...

    def delta_chunk(
        self,
        qkv: Tensor,
        ba: Tensor,
        weight: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        memory: DeltaMemory,
        slots: Tensor,
        starts: Tensor,
        counts: Tensor,
    ) -> Tensor: ...

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def gated_rms_norm_quantized(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Operand: ...

    def row_top(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]: ...

    def row_loss_(
        self,
        logits: Tensor,
        labels: Tensor,
        terms: RowTerms,
        mix: LossMix,
        gradient: bool,
        target: Tensor | None = None,
        at: Tensor | None = None,
    ) -> None: ...


def ops_for(device: torch.device) -> Ops:
    """The operations on a device: kernels on a CUDA GPU, their definitions elsewhere.

    Raises:
        ModuleNotFoundError: a GPU and no triton.
    """
    if device.type != "cuda":
        from . import reference

        return reference
    from . import gpu  # needs triton

    return gpu


def unsupported(device: torch.device) -> str | None:
    """Why the decoding step does not run on a device; the loss asks for less."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{name} is too old for the runtime: it needs capability 8.0 or more"
    try:
        ops_for(device)
    except ModuleNotFoundError:
        return "triton is not installed; install it with: pip install 'dflash-toolkit[gpu]'"
    from .launch import shared_memory

    shared = shared_memory(device)
    if shared < SHARED_MEMORY:
        return (
            f"{name} has {shared >> 10} KiB of shared memory for a thread block and the runtime's kernels need "
            f"{SHARED_MEMORY >> 10} (A100, H100 and later of their kind have it)"
        )
    return None


def unsupported_heads(device: torch.device, width: int, dtype: torch.dtype) -> str | None:
    """What the attention kernels lack on this device for heads so wide."""
    if device.type != "cuda":
        return None
    from .launch import shared_memory
    from .triton.attention import cut_for  # needs triton

    try:
        cut_for(width, dtype.itemsize, shared_memory(device))
    except ValueError as error:
        return str(error)
    return None
