"""The loss of a row of logits: the weights of its terms, and the terms themselves."""

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_ACCEPTANCE = 2.0**-100  # below it, -log(acceptance) is flat; fp32 still divides by it


@dataclass(frozen=True, slots=True)
class LossMix:
    """Weights of the terms of a row's loss, a weighted sum.

    p is the target's distribution and q the drafter's, both softmax(logits / temperature). The acceptance
    a = sum_v min(p_v, q_v) is the probability that exact sampled verification accepts a token sampled from q (Leviathan
    et al., arXiv 2211.17192, theorem 3.5). Gradients are with respect to the drafter's logits z; [q < p] is 1 where
    q_v < p_v and 0 where they are equal.

    | term      | loss                             | T * d loss / d z_v                                      |
    |-----------|----------------------------------|---------------------------------------------------------|
    | ce        | -log q(label), temperature 1     | q_v - [v = label]           (T = 1)                     |
    | kl        | sum_v p_v log(p_v / q_v)         | q_v - p_v                                               |
    | tv        | 1 - a                            | q_v (sum_u q_u [q_u < p_u] - [q_v < p_v])               |
    | lk        | -log a                           | that of tv, divided by a                                |
    | lk_hybrid | l KL + (1 - l) TV, l = exp(-3 a) | the same mix of both; l carries no gradient             |

    TV has hardly any gradient where p and q hardly overlap; the LK losses (Samarin et al., arXiv 2602.23881) fix that.
    `lk` is their LK^alpha, the cross-entropy if p is a point mass. `lk_hybrid` is their LK^lambda with eta = 3 and,
    like in other trainers, l from each row's own acceptance.
    """

    ce: float = 1.0
    kl: float = 0.0
    tv: float = 0.0
    lk: float = 0.0
    lk_hybrid: float = 0.0
    temperature: float = 1.0  # > 0; without a factor T^2, so a higher temperature gives a smaller gradient

    ETA = 3.0  # lk_hybrid's constant

    @property
    def distribution(self) -> bool:
        """Whether a term needs the target's distribution."""
        return bool(self.kl or self.tv or self.lk or self.lk_hybrid)

    def slopes(self, acceptance: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the factors of the gradients of KL and of TV in a row's gradient, both shaped like `acceptance`."""
        share = torch.exp(-self.ETA * acceptance)
        kl = self.kl + self.lk_hybrid * share
        tv = self.tv + self.lk / acceptance.clamp(min=LEAST_ACCEPTANCE) + self.lk_hybrid * (1 - share)
        return kl, tv

    def value(self, terms: "RowTerms") -> Tensor:
        """Returns the loss [R]."""
        loss = self.ce * terms.cross_entropy
        if terms.kl is not None and terms.acceptance is not None:
            a = terms.acceptance
            share = torch.exp(-self.ETA * a)
            loss += self.kl * terms.kl + self.tv * (1 - a) - self.lk * a.clamp(min=LEAST_ACCEPTANCE).log()
            loss += self.lk_hybrid * (share * terms.kl + (1 - share) * (1 - a))
        return loss


CROSS_ENTROPY = LossMix()


@dataclass(frozen=True, slots=True)
class LogitScale:
    """The scale of a head's logits: its products z become cap * tanh(multiplier * z / cap), or multiplier * z."""

    multiplier: float = 1.0  # > 0
    cap: float | None = None  # > 0

    PIECE = 64  # rows that are capped at a time, in fp32

    def apply_(self, products: Tensor, slope: bool = False) -> Tensor | float:
        """Turns a head's products [R, V] into logits, in place and rounded to its dtype once.

        Returns:
            d logits / d products if requested, in that dtype; a number if it is the same everywhere.
        """
        if self.cap is None:
            if self.multiplier != 1.0:
                products.mul_(self.multiplier)
            return self.multiplier
        found = torch.empty_like(products) if slope else None
        for start in range(0, len(products), self.PIECE):
            rows = slice(start, start + self.PIECE)
            bent = (products[rows].float() * (self.multiplier / self.cap)).tanh_()
            if found is not None:
                found[rows] = self.multiplier * (1 - bent * bent)
            products[rows] = bent.mul_(self.cap)
        return 1.0 if found is None else found


PLAIN = LogitScale()


@dataclass(slots=True)
class RowTerms:
    """The results of the kernels for each of R rows of the drafter's logits."""

    cross_entropy: Tensor  # [R] fp32, nats, at temperature 1
    rank: Tensor  # [R] int32, number of tokens before the label: 0 is the argmax; V if its logit is NaN
    kl: Tensor | None = None  # [R] fp32, nats; None without the target's distribution
    acceptance: Tensor | None = None  # [R] fp32, in [0, 1]

    @classmethod
    def empty(cls, rows: int, distribution: bool, device: torch.device | str) -> "RowTerms":
        """Returns uninitialized terms of `rows` rows."""

        def of(dtype: torch.dtype) -> Tensor:
            return torch.empty(rows, dtype=dtype, device=device)

        more = (of(torch.float32), of(torch.float32)) if distribution else (None, None)
        return cls(of(torch.float32), of(torch.int32), *more)

    def __getitem__(self, rows: slice) -> "RowTerms":
        """Returns a view of some rows."""
        more = (None if t is None else t[rows] for t in (self.kl, self.acceptance))
        return RowTerms(self.cross_entropy[rows], self.rank[rows], *more)
