"""Registers DSpine as an architecture: causal blocks, an injection after every layer, a selection by pairs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..dflash.architecture import DraftArchitecture, Idle, Part, Size

if TYPE_CHECKING:
    from torch import Tensor

    from ..dflash.config import DrafterConfig
    from ..dflash.network import Drafter
    from ..drafting import Empty, TokenSelector
    from .injection import Injection
    from .proposer import InjectionWeights

PAIR_ROWS = 8192  # pairs of a slot and a token before it that the engine scores at a time
# the sizes are those of its published drafters
INJECTION = Part(
    name="injection",
    sizes={
        "transfer_rank": Size(
            1024, "size of the token codes of DSpine (default: 1024, at most the hidden size)", up_to_width=True
        ),
        "message_size": Size(512, "size of the messages between slots of DSpine (default: 512)"),
        "refine_top_k": Size(16, "candidate tokens per slot of DSpine (default: 16)", stored="top_k"),
    },
    idle=(
        Idle(
            "injection.writes",
            "no message changes a slot",
            "train it longer, with gradients for it, or train plain DFlash: the part costs time and changes no draft",
        ),
    ),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class DSpine(DraftArchitecture):
    """Each slot gets a message from the slot before it, after every layer."""

    def config(self) -> "type[DrafterConfig]":
        from .injection import DSpineConfig

        return DSpineConfig

    def check(self, config: "DrafterConfig") -> None:
        sizes = config.sizes
        if sizes["transfer_rank"] > config.hidden_size:
            raise ValueError(
                f"transfer_rank is {sizes['transfer_rank']}; it must be at most hidden_size {config.hidden_size}"
            )
        if sizes["refine_top_k"] > config.vocab_size:
            raise ValueError(f"refine_top_k is {sizes['refine_top_k']}; the vocabulary has {config.vocab_size}")

    def between(self, config: "DrafterConfig") -> "Injection":
        from .injection import Injection

        sizes = config.sizes
        return Injection(config.hidden_size, config.num_layers, sizes["transfer_rank"], sizes["message_size"])

    def between_weights(self, config: "DrafterConfig", empty: "Empty") -> "InjectionWeights":
        import torch

        from .proposer import InjectionWeights

        layers, d, (rank, m, _) = config.num_layers, config.hidden_size, config.sizes.values()
        ones = empty(rank)
        if not ones.is_meta:
            ones.fill_(1.0)
        return InjectionWeights(
            empty(layers, rank, d), empty(layers, d, m), empty(3 * m, rank), empty(m), empty(config.vocab_size, rank),
            empty((), dtype=torch.bool), ones,
        )  # fmt: skip

    def fixed_tensors(self, config: "DrafterConfig") -> "Mapping[str, Tensor]":
        import torch

        codes = torch.zeros(config.vocab_size, config.sizes["transfer_rank"])
        return {"transfer_codes": codes, "transfer_ready": torch.tensor(False)}

    def fit_head(self, drafter: "Drafter", head: "Tensor") -> None:
        from .codes import make_codes

        if not drafter.transfer_ready:
            make_codes(drafter, head)

    def unusable(self, drafter: "Drafter") -> str:
        return "" if drafter.transfer_ready else "its transfer codes were never computed (transfer_ready is false)"

    def chooser(self, drafter: "Drafter", head: "Tensor | None") -> "TokenSelector":
        from .refinement import Refinement

        return Refinement(drafter, head)

    def candidates(self, config: "DrafterConfig") -> int:
        return config.sizes["refine_top_k"]

    def layer_products(self, config: "DrafterConfig") -> int:
        rank, message = config.sizes["transfer_rank"], config.sizes["message_size"]
        return 2 * rank * config.hidden_size + 3 * message * rank + message * config.hidden_size

    def selector_products(self, config: "DrafterConfig") -> int:
        return self.layer_products(config) + config.sizes["refine_top_k"] * config.hidden_size

    def choice_bytes(self, config: "DrafterConfig", slots: int, size: int) -> int:
        rank, m, candidates = config.sizes.values()
        together = min(PAIR_ROWS, slots * candidates)
        return together * size * (2 * rank + 3 * m + config.hidden_size) + 8 * slots * candidates * candidates

    def is_initial(self, name: str, tensor: "Tensor") -> bool | None:
        if name.startswith("transfer_"):  # never trained
            return not tensor.any()
        return super().is_initial(name, tensor)


ARCHITECTURE = DSpine(
    kind="dspine",
    title="DSpine",
    names=("DSpineDraftModel",),
    parts=(INJECTION,),
    selector_name="",
    between_name="injection",
    stored_in="dspine_config",
    causal=True,
    # loss terms of its authors: 0.1 CE and 0.9 L1, which is twice the total variation
    loss={"ce": 0.1, "tv": 1.8, "weights": "decay"},
)
