"""The selection of DSpine: the last injection, computed for each candidate of the slot before."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.candidates import candidate_logits
from ..dflash.network import Drafter
from ..drafting import Pick
from .injection import Injection

LEAST_MASS = 1e-4  # sum of the target's probabilities of the candidates, for the loss to compare with them
CROSS_ENTROPY, L1 = 0.1, 0.9  # weights of the loss


class Refinement:
    """Implements `TokenSelector` with a drafter's own weights: it has none of its own.

    A candidate b after token a scores <norm(h + message of a), row b of the head>. The states of a slot are its
    normed hidden state, which is not read, and h, the output of the last layer before its injection.
    """

    def __init__(self, drafter: Drafter, head: Tensor | None) -> None:
        assert isinstance(drafter.injection, Injection)
        self._codes = drafter.get_buffer("transfer_codes")
        self._injection, self._norm = drafter.injection, drafter.norm
        self._last, self._width, self._head = drafter.config.num_layers - 1, drafter.config.hidden_size, head
        self._multiplier, self._cap = drafter.config.output_multiplier, drafter.config.final_logit_softcapping

    def init_weights(self) -> None:
        """Has nothing to initialise."""

    def _scores(self, h: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """Returns the scores fp32 [..., C] of candidates [..., C] after tokens `before` [...], for h [..., D]."""
        assert self._head is not None
        refined, _ = self._injection(self._last, h, self._injection.code(self._codes, before))
        found = self._multiplier * candidate_logits(self._norm(refined), self._head, candidates)
        return found if self._cap is None else self._cap * torch.tanh(found / self._cap)

    def _before_injection(self, hidden: Tensor) -> Tensor:
        return hidden[..., self._width : 2 * self._width]

    def __call__(self, hidden: Tensor, unary: Tensor, candidates: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Implements `TokenSelector.__call__`."""
        h = self._before_injection(hidden)
        scores = self._scores(h, before, candidates)
        with torch.no_grad():
            return scores, self.walk_blocks(hidden, unary, candidates, before[:, 0])

    def losses(self, scores: Tensor, true: Tensor, teacher: Tensor | None) -> Tensor:
        """Returns 0.1 cross-entropy where the label is a candidate, and 0.9 L1 to the target's distribution over them.

        Without `teacher` it is the whole cross-entropy.
        """
        found = F.cross_entropy(scores, true.long().argmax(1), reduction="none") * true.any(1)
        if teacher is None:
            return found
        apart = (scores.softmax(1) - teacher.softmax(1)).abs().sum(1)
        return CROSS_ENTROPY * found + L1 * apart * (teacher.exp().sum(1) > LEAST_MASS)

    def walk_blocks(self, hidden: Tensor, unary: Tensor, candidates: Tensor, anchors: Tensor) -> Tensor:
        """See `TokenSelector.walk_blocks`."""
        h, last, chosen = self._before_injection(hidden), anchors, []
        for k in range(candidates.shape[1]):
            scores = self._scores(h[:, k], last, candidates[:, k])
            last = candidates[:, k].gather(1, scores.argmax(1, keepdim=True))[:, 0]
            chosen.append(last)
        return torch.stack(chosen, dim=1)

    def walk(
        self,
        hidden: Tensor,
        unary: Tensor,
        candidates: Tensor,
        anchor: int,
        pick: Pick = lambda _, scores: scores.argmax(),
    ) -> Tensor:
        """See `TokenSelector.walk`."""
        h = self._before_injection(hidden)
        chosen, last = [], torch.tensor(anchor, device=candidates.device)
        for k in range(len(candidates)):
            last = candidates[k, pick(k, self._scores(h[k], last, candidates[k]))]
            chosen.append(last)
        return torch.stack(chosen)

    def lattice(self, hidden: Tensor, unary: Tensor, candidates: Tensor, anchor: int) -> Tensor:
        """See `TokenSelector.lattice`."""
        h = self._before_injection(hidden)
        before = torch.cat([torch.full_like(candidates[:1], anchor), candidates[:-1]])  # [K, C]
        return self._scores(h[:, None], before, candidates[:, None].expand(-1, candidates.shape[1], -1))

    def signature(self, hidden: Tensor, signs: Callable[[int], Tensor]) -> dict[str, Tensor]:
        """See `TokenSelector.signature`."""
        return {"transfer_codes": signs(len(self._codes)) @ self._codes}
