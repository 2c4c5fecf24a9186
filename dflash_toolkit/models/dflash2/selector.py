"""A selector that chains the slots of a block: which of a slot's best tokens goes with the one chosen before it."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.ops import ops_for


class CandidateSelector(nn.Module):
    """Scores of pairs of tokens, of rank r. Parameter names are those of the checkpoint, also without `.weight`."""

    def __init__(self, hidden_size: int, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))

    @torch.no_grad()
    def init_weights(self) -> None:
        """No pair is preferred: with it a drafter proposes what the one without a selector does."""
        self.successor_codebook.zero_()

    def forward(self, hidden: Tensor, unary: Tensor, candidates: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """What training asks of a head behind the backbone, in one call: weights in shards are gathered for it.

        Args:
            hidden: [B, K, D], final and normed, of the K slots of B blocks.
            unary: logits of the candidates as they stand behind the head, fp32 [B, K, C].
            candidates: token ids [B, K, C].
            before: the true token before each slot, [B, K]; the first is the anchor.

        Returns:
            scores fp32 [B, K, C] of the candidates behind the tokens `before`, and the tokens [B, K] of the walk.
        """
        state = self.hidden_projection(hidden)  # [B, K, r]
        # in the dtype of products: rows of [B, K, C, r] in fp32 would be gigabytes
        predecessors, successors = (
            book.to(state.dtype) for book in (self.predecessor_codebook, self.successor_codebook)
        )
        query = F.embedding(before, predecessors) * state
        pair = F.embedding(candidates, successors) @ query[..., None]  # [B, K, C, 1]
        with torch.no_grad():
            walk = ops_for(state.device).walk
            walked = walk(state, unary, candidates, predecessors, successors, before[:, 0].contiguous())
        return unary + pair[..., 0].float(), walked

    def walk(
        self,
        hidden: Tensor,
        unary: Tensor,
        candidates: Tensor,
        anchor: int,
        pick: Callable[[int, Tensor], Tensor] = lambda _, scores: scores.argmax(),
    ) -> Tensor:
        """The tokens [K] of K slots, chosen one behind the other, each by its scores beside the one before it.

        A candidate b behind token a scores unary(b) + <P[a] * (W h), Q[b]>, in fp32.

        Args:
            hidden: [K, D], final and normed.
            unary: logits of the candidates as they stand behind the head, fp32 [K, C].
            candidates: token ids [K, C].
            anchor: the token before the first slot.
            pick: the place of the token that slot k takes, of k and its scores [C]: the best, of equal ones the first.
        """
        state = self.hidden_projection(hidden).float()  # [K, r]
        successors = self.successor_codebook[candidates].float()  # [K, C, r]
        chosen, last = [], torch.tensor(anchor, device=candidates.device)
        for k in range(len(candidates)):
            query = self.predecessor_codebook[last].float() * state[k]
            last = candidates[k, pick(k, unary[k] + successors[k] @ query)]
            chosen.append(last)
        return torch.stack(chosen)

    def lattice(self, hidden: Tensor, unary: Tensor, candidates: Tensor, anchor: int) -> Tensor:
        """The scores of every walk at once, fp32 [K, C, C]: [k, b, c] of candidate c of slot k behind candidate b of
        slot k - 1; all of the first slot's are those behind the anchor. Arguments as of `walk`.
        """
        before = torch.cat([torch.full_like(candidates[:1], anchor), candidates[:-1]])  # [K, C]
        query = self.predecessor_codebook[before].float() * self.hidden_projection(hidden).float()[:, None]
        return unary[:, None] + query @ self.successor_codebook[candidates].float().mT
