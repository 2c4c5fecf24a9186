"""Registers DFlash 2 as an architecture: its two parts, each of which may be used alone."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..dflash.architecture import DraftArchitecture, Idle, Part, Size, Swap

if TYPE_CHECKING:
    from torch import Tensor

    from ..dflash.config import DrafterConfig
    from ..drafting import Empty
    from ..spec import ConvolutionSpec
    from .convolution import DynamicConvolution
    from .proposer import PairWeights
    from .selector import CandidateSelector

# the sizes are those of its published drafters
CONVOLUTION = Part(
    name="convolution",
    sizes={
        "conv_kernel_size": Size(2, "kernel size of the convolutions of DFlash 2; 0 disables them (default: 2)"),
        "conv_group_size": Size(16, "channels of a convolution of DFlash 2 that share coefficients (default: 16)"),
    },
    needed_by=("vllm",),
    idle=(
        Idle(
            "_conv.kernel_projection",
            "it mixes no slots",
            "train it longer, with gradients for it, or leave it out: it costs time and adapts to no token",
        ),
    ),
)
CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
SELECTOR = Part(
    name="selector",
    sizes={
        "selector_rank": Size(256, "rank of the pair scores of the DFlash 2 selector; 0 disables it (default: 256)"),
        "selector_top_k": Size(16, "candidate tokens per slot of the DFlash 2 selector (default: 16)"),
    },
    selects=True,
    needed_by=("vllm", "sglang"),
    idle=(
        Idle(
            CODEBOOKS[1],
            "it has no effect",
            "train it longer, with a loss of its own, or leave it out: it costs time and changes no draft",
        ),
    ),
    swaps=(Swap("codebooks", "predecessor and successor codebook", CODEBOOKS),),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class DFlash2(DraftArchitecture):
    """Convolutions around every sublayer, a selector of pairs of tokens."""

    def check(self, config: "DrafterConfig") -> None:
        if config.conv_group_size and config.hidden_size % config.conv_group_size:
            raise ValueError(
                f"hidden_size {config.hidden_size} is not a multiple of conv_group_size {config.conv_group_size}"
            )
        if config.conv_kernel_size > config.block_size:
            raise ValueError(f"conv_kernel_size is {config.conv_kernel_size}, more than a block of {config.block_size}")
        if config.selector_top_k > config.vocab_size:
            raise ValueError(f"selector_top_k is {config.selector_top_k}; the vocabulary has {config.vocab_size}")

    def around(self, config: "DrafterConfig") -> "DynamicConvolution | None":
        from .convolution import DynamicConvolution

        sizes = config.hidden_size, config.conv_kernel_size, config.conv_group_size
        return DynamicConvolution(*sizes) if config.conv_kernel_size else None

    def around_spec(self, config: "DrafterConfig") -> "ConvolutionSpec | None":
        from ..spec import ConvolutionSpec

        return ConvolutionSpec(config.conv_kernel_size, config.conv_group_size) if config.conv_kernel_size else None

    def selector(self, config: "DrafterConfig") -> "CandidateSelector | None":
        from .selector import CandidateSelector

        sizes = config.hidden_size, config.vocab_size, config.selector_rank
        return CandidateSelector(*sizes) if config.selector_rank else None

    def selector_weights(self, config: "DrafterConfig", empty: "Empty") -> "PairWeights | None":
        from .proposer import PairWeights

        d, r, v = config.hidden_size, config.selector_rank, config.vocab_size
        return PairWeights(empty(r, d), empty(v, r), empty(v, r)) if r else None

    def candidates(self, config: "DrafterConfig") -> int:
        return config.selector_top_k or super().candidates(config)

    def layer_products(self, config: "DrafterConfig") -> int:
        if not config.conv_kernel_size:
            return 0
        groups = config.hidden_size // config.conv_group_size
        return 2 * (2 * config.conv_kernel_size * groups * config.hidden_size)  # around two sublayers

    def selector_products(self, config: "DrafterConfig") -> int:
        return config.selector_rank * (config.hidden_size + config.selector_top_k)

    def is_initial(self, name: str, tensor: "Tensor") -> bool | None:
        if name.endswith("base_kernel"):
            return bool((tensor[:, 0] == 1).all() and not tensor[:, 1:].any())
        return super().is_initial(name, tensor)


ARCHITECTURE = DFlash2(
    kind="dflash2",
    title="DFlash 2",
    names=("DFlash2DraftModel",),
    parts=(CONVOLUTION, SELECTOR),
    releases={"vllm": "0.28.0", "sglang": "0.5.19"},
    scaled_by=("vllm",),
)
