"""The biases and the activation of gpt-oss's experts."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ClampedExperts:
    """Experts with biases that compute (up + 1) * gate * sigmoid(alpha * gate) of clamped gates and ups.

    Rows of gates and ups alternate in their matrices. Gates have no lower limit.
    """

    gate_up_bias: Tensor  # [E, 2 I]
    down_bias: Tensor  # [E, D]
    alpha: float
    limit: float

    def biases(self, expert: int) -> tuple[Tensor, Tensor]:
        return self.gate_up_bias[expert], self.down_bias[expert]

    def activate(self, product: Tensor) -> Tensor:
        """Returns [M, I] of a product [M, 2 I] with its bias."""
        gate, up = product[:, 0::2].clamp(max=self.limit), product[:, 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * (gate * (gate * self.alpha).sigmoid())
