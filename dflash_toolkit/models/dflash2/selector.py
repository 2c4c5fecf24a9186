"""A selector that makes the slots of a block dependent: it scores each candidate after the token chosen before it."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels import reference
from ...kernels.ops import ops_for
from ..drafting import Pick


class CandidateSelector(nn.Module):
    """Scores of pairs of tokens, of rank r. Parameter names are those of the checkpoint, also without `.weight`."""

    def __init__(self, hidden_size: int, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialises without preferences: the drafter then proposes the same as without a selector."""
        self.successor_codebook.zero_()

    def forward(self, hidden: Tensor, unary: Tensor, candidates: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Implements `TokenSelector.__call__`."""
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

    def losses(self, scores: Tensor, true: Tensor, teacher: Tensor | None) -> Tensor:
        """Returns the cross-entropy over the candidates, 0 without a label; see `TokenSelector.losses`."""
        return F.cross_entropy(scores, true.long().argmax(1), reduction="none") * true.any(1)

    def walk_blocks(self, hidden: Tensor, unary: Tensor, candidates: Tensor, anchors: Tensor) -> Tensor:
        """Runs `walk` for many blocks at once, see `TokenSelector.walk_blocks`."""
        state = self.hidden_projection(hidden)
        return reference.walk(state, unary, candidates, self.predecessor_codebook, self.successor_codebook, anchors)

    def walk(
        self,
        hidden: Tensor,
        unary: Tensor,
        candidates: Tensor,
        anchor: int,
        pick: Pick = lambda _, scores: scores.argmax(),
    ) -> Tensor:
        """See `TokenSelector.walk`. A candidate b after token a scores unary(b) + <P[a] * (W h), Q[b]>, in fp32."""
        state = self.hidden_projection(hidden).float()  # [K, r]
        successors = self.successor_codebook[candidates].float()  # [K, C, r]
        chosen, last = [], torch.tensor(anchor, device=candidates.device)
        for k in range(len(candidates)):
            query = self.predecessor_codebook[last].float() * state[k]
            last = candidates[k, pick(k, unary[k] + successors[k] @ query)]
            chosen.append(last)
        return torch.stack(chosen)

    def lattice(self, hidden: Tensor, unary: Tensor, candidates: Tensor, anchor: int) -> Tensor:
        """Returns the scores of every walk at once, see `TokenSelector.lattice`."""
        before = torch.cat([torch.full_like(candidates[:1], anchor), candidates[:-1]])  # [K, C]
        query = self.predecessor_codebook[before].float() * self.hidden_projection(hidden).float()[:, None]
        return unary[:, None] + query @ self.successor_codebook[candidates].float().mT

    def signature(self, hidden: Tensor, signs: Callable[[int], Tensor]) -> dict[str, Tensor]:
        """Returns its output for `hidden`, and for all tokens; see `TokenSelector.signature`."""
        found = {"selector": self.hidden_projection(hidden)}
        for name, rows in self.named_parameters(recurse=False):
            found[name] = signs(len(rows)) @ rows
        return found
