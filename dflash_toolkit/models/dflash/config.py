"""The configuration of a drafter: its shape, its place on the target, and the parts of its architecture."""

import math
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from ...calibration import Calibration
from ..rope import RopeScaling
from ..spec import ARCHITECTURES, LayerSpec, MlpSpec, ModelSpec, Rope
from .architecture import DraftArchitecture, of_config, of_sizes

LONGEST_BLOCK = 1024  # far beyond what is ever accepted; a typing error would use all memory


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """The configuration of the network, its place on the target and the shapes of its checkpoint.

    Raises:
        ValueError: a combination that cannot work; the message names the numbers.
    """

    hidden_size: int  # D, the target's
    num_layers: int  # L
    num_heads: int  # N
    num_kv_heads: int  # G
    head_dim: int  # H
    intermediate_size: int
    vocab_size: int  # V, the target's
    num_target_layers: int
    target_layer_ids: tuple[int, ...]  # 0-based; the feature is that layer's output
    mask_token_id: int
    block_size: int = 16  # S: one anchor and S - 1 drafted tokens
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 32768
    layer_types: tuple[str, ...] = ()  # empty: full attention on every layer
    sliding_window: int | None = None
    is_causal: bool | None = False  # None: sliding layers are causal inside the block, full ones are not
    attention_bias: bool = False
    rope_scaling: RopeScaling | None = None  # None: plain RoPE
    input_embedding_scale: float = 1.0  # on a block's rows of the target's embedding table
    output_multiplier: float = 1.0  # on the head's logits
    final_logit_softcapping: float | None = None  # then: cap * tanh(logits / cap)
    conv_kernel_size: int = 0  # taps of the convolutions around every sublayer; 0: there are none
    conv_group_size: int = 0  # channels that share the coefficients of a row
    selector_rank: int = 0  # rank of the scores of pairs of tokens; 0: every slot takes its own best
    selector_top_k: int = 0  # scored best tokens per slot
    # the measured calibration, see `Calibration`; not part of the network, and not compared
    acceptance_slope: float = field(default=1.0, compare=False)
    acceptance_bias: tuple[float, ...] = field(default=(), compare=False)  # slots 1..S - 1; empty: not measured
    rope_factor: float = field(default=1.0, init=False, repr=False, compare=False)  # on cosines and sines
    scaled_frequencies: tuple[float, ...] = field(default=(), init=False, repr=False, compare=False)  # [H / 2] or none

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be >= 1")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; RoPE turns pairs, so it must be even")
        if not 2 <= self.block_size <= LONGEST_BLOCK:
            raise ValueError(
                f"block_size is {self.block_size}: a block needs an anchor and at least one mask (2..{LONGEST_BLOCK})"
            )
        for name in ("rms_norm_eps", "rope_theta", "input_embedding_scale", "output_multiplier", *self._capped):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a number > 0")
        if not (0 < self.acceptance_slope < math.inf and all(map(math.isfinite, self.acceptance_bias))):
            raise ValueError(
                f"acceptance_slope is {self.acceptance_slope} and acceptance_bias {list(self.acceptance_bias)}; "
                f"the slope must be > 0, and all of them finite"
            )
        if self.num_layers < 1:
            raise ValueError(f"num_layers is {self.num_layers}: a drafter needs at least one layer")
        if not self.target_layer_ids:
            raise ValueError("target_layer_ids is empty: a drafter needs at least one tapped layer")
        if len(set(self.target_layer_ids)) != len(self.target_layer_ids):
            raise ValueError(f"target_layer_ids {list(self.target_layer_ids)} names a layer twice")
        last = self.num_target_layers - 1
        for layer in self.target_layer_ids:
            if layer == last:
                raise ValueError(
                    f"target_layer_ids names layer {layer}, the target's last: its output comes already normed; "
                    f"use ids 0..{last - 1}"
                )
            if not 0 <= layer < last:
                raise ValueError(f"target layer id {layer} is out of range for a target of {last + 1} layers")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is not a row of the target's embedding (0..{self.vocab_size - 1})"
            )
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full_attention",) * self.num_layers)
        if len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries for {self.num_layers} layers")
        unknown = set(self.layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ValueError(f"layer_types holds {sorted(unknown)}; known: full_attention, sliding_attention")
        if "sliding_attention" in self.layer_types and (self.sliding_window or 0) < 1:
            raise ValueError(f"layer_types has sliding_attention, but sliding_window is {self.sliding_window}")
        self._check_parts()
        if self.architecture.causal:
            object.__setattr__(self, "is_causal", True)
        self.architecture.check(self)
        if self.rope_scaling is not None:  # once, and not in a forward, which torch.compile would have to trace
            frequencies, factor = self.rope_scaling.frequencies(self.rope_theta, self.head_dim)
            object.__setattr__(self, "scaled_frequencies", frequencies)
            object.__setattr__(self, "rope_factor", factor)

    def _check_parts(self) -> None:
        for part in self.architecture.parts:
            sizes = [getattr(self, name) for name in part.sizes]
            if min(sizes) < 0 or (min(sizes) == 0) != (max(sizes) == 0):
                found = " and ".join(f"{name} {size}" for name, size in zip(part.sizes, sizes, strict=True))
                wanted = "both, each >= 1, or neither" if len(sizes) == 2 else "a number >= 1 for each, or for none"
                raise ValueError(f"{found.replace(' ', ' is ', 1)}; give {wanted}")

    @property
    def architecture(self) -> DraftArchitecture:
        """The architecture, by its parts."""
        return of_config(self)

    @property
    def is_dflash2(self) -> bool:
        return self.architecture.kind == "dflash2"

    @property
    def has_selector(self) -> bool:
        """Whether a selector chooses the tokens of slots."""
        return self.architecture.has_selector(self.sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of its architecture's parts."""
        return {name: getattr(self, name) for name in self.architecture.sizes}

    @property
    def draft_candidates(self) -> int:
        """The number of best tokens of a slot to sample its draft from."""
        return self.architecture.candidates(self)

    @property
    def calibration(self) -> Calibration:
        """The calibration of the slots of a block; a slot without a measured bias has the last one's."""
        return Calibration(self.acceptance_slope, self.acceptance_bias or (0.0,)).of_slots(self.block_size - 1)

    @property
    def _capped(self) -> tuple[str, ...]:
        return () if self.final_logit_softcapping is None else ("final_logit_softcapping",)

    @property
    def feature_size(self) -> int:
        """K * D, the width of the concatenated taps."""
        return len(self.target_layer_ids) * self.hidden_size

    def spec(self) -> ModelSpec:
        """Returns the layers for an engine: Qwen3's, optionally with convolutions around them."""
        mixers = [
            ARCHITECTURES["qwen3"].attention(
                self.attention_bias,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                causal=self.causal_inside_block(i),
                window=self.window(i),
                rope=Rope(tuple(self.rope_frequencies().double().tolist()), self.rope_factor),
            )
            for i in range(self.num_layers)
        ]
        conv = self.architecture.around_spec(self)
        return ModelSpec(
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            layers=tuple(LayerSpec(mixer, MlpSpec(self.intermediate_size), conv) for mixer in mixers),
            rms_norm_eps=self.rms_norm_eps,
            tied_head=True,
            context_limit=self.max_position_embeddings,
        )

    def causal_inside_block(self, layer: int) -> bool:
        """Whether block slots of this layer see only earlier slots (the rule of vLLM and z-lab 0.1.0)."""
        return self.layer_types[layer] == "sliding_attention" if self.is_causal is None else self.is_causal

    def window(self, layer: int) -> int:
        """The distance of keys, before or after, from which a query of this layer does not see them; 0 is no limit."""
        return (self.sliding_window or 0) if self.layer_types[layer] == "sliding_attention" else 0

    def rope_frequencies(self, device: torch.device | None = None) -> Tensor:
        """Radians per position, fp32 [H / 2]."""
        if self.rope_scaling is not None:
            return torch.tensor(self.scaled_frequencies, device=device, dtype=torch.float32)
        half = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32)
        return self.rope_theta ** (-half / self.head_dim)

    def with_block_size(self, block_size: int) -> "DrafterConfig":
        """Returns the drafter with another block size (shorter than it was trained with works well)."""
        return replace(self, block_size=block_size)

    def resized(self, **sizes: int) -> "DrafterConfig":
        """Returns the drafter with parts of these sizes, 0 for a part that it loses; so it may be of another
        architecture."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.init} | sizes
        made = of_sizes(values).config()
        known = {each.name for each in fields(made)}
        return made(**{name: value for name, value in values.items() if name in known})
