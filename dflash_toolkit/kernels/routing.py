"""The router of GLM-4-MoE, after DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), and that of Llama 4."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SigmoidRouting:
    """Scores of experts are sigmoids of their logits; a correction decides with them, but does not weight.

    Only experts of the best groups are chosen. The score of a group is the sum of its two best. The weights of a row's
    own experts, normed or not, are multiplied by `scale`. Shared experts have the weight 1, and no gate. Without a
    correction the logits decide: large ones have equal sigmoids.
    """

    correction: Tensor | None  # fp32 [E], added to the scores
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
