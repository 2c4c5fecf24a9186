"""State that the programs of one runner share: the models, the batch, buffers, graphs and results."""

import functools
import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...grammar import words_of
from ..batch_state import BatchState
from ..graphs import StepGraphs, bucket_of
from ..proposer import Proposer
from ..request import StepShape
from ..sampler import Mode
from ..verifier import Verifier
from .buffers import StepBuffers
from .results import Results


class Part(NamedTuple):
    """Names the work of one graph: a whole step (greedy or over trees) or a part of a step.

    The mode is the mode of the rows that choose; over trees it is the largest mode of any request.
    """

    kind: Literal["step", "propose", "read", "choose", "end", "tree"]
    rows: int
    block: int
    mode: Mode = Mode.GREEDY
    nodes: int = 0  # rows of all draft trees together, anchors included; 0 without trees

    @classmethod
    def whole_step(cls, rows: int, shape: StepShape) -> "Part":
        """Returns a greedy step."""
        return cls("tree" if shape.rows else "step", rows, shape.block, nodes=shape.rows)


class StepContext:
    """Shared by the programs of one runner.

    Attributes:
        bucket: returns the number of rows that are computed for a batch, with graphs.
        modes: how the request of each row chooses tokens.
        random_tokens: int64, verified instead of the drafts while step times are measured.
        words: int32 values of a grammar's mask.
    """

    def __init__(
        self,
        verifier: Verifier,
        proposer: Proposer | None,
        state: BatchState,
        buffers: StepBuffers,
        graphs: StepGraphs,
        results: Results,
    ) -> None:
        self.verifier, self.proposer, self.target = verifier, proposer, verifier.weights
        self.state, self.buffers, self.graphs, self.results = state, buffers, graphs, results
        self.ops, self.device = verifier.stack.ops, state.lengths.device
        self.modes = [Mode.GREEDY] * len(state.lengths)
        self.random_tokens: Tensor | None = None
        self.words = words_of(self.target.spec.vocab_size)
        # a bound method would create a reference cycle
        self.bucket = functools.partial(bucket_of, len(state.lengths))
        self._not_finite = torch.full((), -1, device=self.device)

    def computed_rows(self, count: int) -> int:
        """Returns the number of rows that are computed for a batch."""
        return self.bucket(count) if self.device.type == "cuda" else count

    def mark_finite(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Returns the tokens [B, S], with -1 after each state [B, S, D] that is not finite."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        norm = torch.linalg.vector_norm(hidden, dim=-1, dtype=wide)  # one kernel, and NaN stays NaN
        return torch.where(norm < math.inf, tokens, self._not_finite)
