"""Steps over draft trees verify the nodes that are most likely to be accepted, over all requests of the batch.

The drafter's probabilities in the slots of its block grow a tree as large as possible for every request. The step
verifies the most likely nodes of all trees, as many as it has rows, so a request with poor drafts uses only the row of
its anchor. The target reads each anchor after the request's context and each node after its own path. The walk from
the anchor follows the target's choices, and the keys and values of the accepted rows move to their positions.
`trees/budget.py` chooses the number of rows of a step before its trees are grown. The result also reports how many
accepted tokens the trees promised at other numbers of rows, and which nodes were accepted.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...calibration import Calibration
from ...kernels.tree import TreeRows, Trees
from ..graphs import to_device
from ..request import Committed, Request, StepShape
from ..sampler import Mode
from ..trees.budget import row_buckets
from ..trees.result import TreeStepResult
from .context import Part, StepContext
from .results import PendingResult, TreesInFlight


class TreeProgram:
    """Decoding steps over trees, for the first requests of a batch, none of which has a grammar.

    Args:
        nodes: the most nodes of a request's tree.
        width: the most children of a node; 1 makes chains, each of its own length.
        blocks: block lengths S that may be drafted.
        chains: block lengths S of steps over blocks; their promises are also reported.
        offered: report the candidates of the trees at the positions of committed tokens.

    Attributes:
        promised: `blocks` and `chains` in order.
        calibration: calibration of the steps from now on.
    """

    def __init__(
        self,
        context: StepContext,
        nodes: int,
        width: int,
        blocks: Sequence[int],
        chains: Sequence[int] = (),
        offered: bool = False,
    ) -> None:
        assert context.proposer is not None
        self._context, self._proposer, self._offered = context, context.proposer, offered
        self.nodes, self.width, self.blocks = nodes, width, tuple(sorted(blocks))
        self.promised = tuple(sorted((*blocks, *chains)))
        rows = len(context.modes)
        self._calibration = torch.zeros(self.blocks[-1], dtype=torch.float64, device=context.device)
        self._discounts = torch.zeros(rows, dtype=torch.float32, device=context.device)
        self._discounts_on_device = (0.0,) * rows
        self._initial = self._proposer.weights.config.calibration.of_slots(self.blocks[-1] - 1)
        self.reset_calibration()

    def reset_calibration(self) -> None:
        """Uses the drafter's own calibration again."""
        self.calibrate(self._initial)

    def calibrate(self, calibration: Calibration) -> None:
        """Sets the calibration of the steps from now on, including captured ones."""
        self.calibration = calibration
        values = [calibration.slope, *calibration.bias]
        self._calibration.copy_(to_device(values, torch.float64, self._context.device))

    def discount(self, log_probs: Sequence[float]) -> None:
        """Sets the discounts of the first requests, see `Trust`; -inf: draft nothing."""
        if (given := tuple(log_probs)) != self._discounts_on_device[: len(given)]:
            self._discounts[: len(given)].copy_(to_device(given, torch.float32, self._context.device))
            self._discounts_on_device = (*given, *self._discounts_on_device[len(given) :])

    # ---- launch and read -------------------------------------------------------------------------------

    def launch(self, requests: Sequence[Request], shape: StepShape) -> PendingResult:
        """Launches one step of rows 0..len(requests) - 1."""
        context, requests = self._context, list(requests)
        batch = context.computed_rows(len(requests))
        if context.device.type == "cuda":  # some requests may have been preempted since the shape was chosen
            shape = StepShape(shape.block, min(shape.rows, row_buckets(batch)[-1]))
        discounts = [request.trust.log_discount if request.drafts else -math.inf for request in requests]
        self.discount(discounts)
        mode = max(context.modes[: len(requests)])
        values = context.graphs.run(Part("tree", batch, shape.block, mode, shape.rows), self.run)
        assert values is not None
        wanted = {row: (row, top) for row, one in enumerate(requests) if (top := one.params.logprobs) is not None}
        logprobs = context.buffers.logprobs(mode, len(requests), shape.block).clone() if wanted else None
        trees = TreesInFlight(requests, batch, shape, self.calibration, discounts)
        return context.results.send(values, logprobs, wanted, trees=trees)

    def read(self, pending: PendingResult, trees: TreesInFlight) -> tuple[list[Committed], TreeStepResult]:
        """Reads the result of a step, which has arrived on the host."""
        how = trees.batch, trees.shape, trees.calibration, trees.discounts
        result = TreeStepResult.parse(pending.tokens, len(trees.requests), *how)
        offered = result.offered() if self._offered else itertools.repeat(())
        self._context.results.give_back(pending)
        committed = [
            Committed(
                tokens[:count], pending.logprobs_of(row, count), finite=-1 not in tokens[:count], poisons=poisons > 0,
                depth=depth, offered=each,
            )
            for row, ((count, depth, poisons, *tokens), each) in enumerate(zip(result.answers, offered, strict=False))
        ]  # fmt: skip
        return committed, result

    # ---- captured steps --------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, part: Part) -> Tensor:
        """Runs a step without a graph.

        Args:
            part: M rows for the anchors and nodes of all requests, and S, the most tokens that a request commits: the
                trees are S - 1 deep.

        Returns:
            int64 in one dimension, see `TreeStepResult.parse`. In the full mode the log-probabilities [batch, S] of the
            accepted rows' tokens are in the buffers.
        """
        batch, block, rows, mode = part.rows, part.block, part.nodes, part.mode
        context, state, target = self._context, self._context.state, self._context.target
        verifier, ops = context.verifier, context.ops
        at, chains = state.rows(batch, block=0), self.width == 1
        if at.states is not None and not chains:
            at = replace(at, states=replace(at.states, nodes=verifier.stack.nodes(rows)))
        last = state.last_token[:batch]
        room = state.sampler.ends_at[:batch] - at.lengths - 1  # the bonus token is always committed
        discounts = self._discounts[:batch]
        limits = torch.where(state.active[:batch] & discounts.isfinite(), room.clamp(0, block - 1), 0).int()
        values, ranks, candidates = self._proposer.children(last, at, block, self._calibration[:block], self.width)
        values[:, 0] += discounts[:, None, None]
        trees = ops.grow_trees(values, ranks, candidates, limits, self.nodes)
        tree = ops.cut_trees(trees, last, at.lengths, at.page_table, at.page_size, rows)
        drafted = [each for each in self.promised if 1 < each <= block]
        promise = ops.expected_accepted(trees, values, ranks, limits, drafted, row_buckets(batch))
        if context.random_tokens is not None:
            tree = replace(tree, tokens=context.random_tokens[:rows])
        hidden, features = verifier.read_trees(trees, tree, at, chains=chains)
        requests, logits = tree.requests.clamp(min=0).long(), None
        if mode == Mode.FULL:
            paths = tree.positions, *_drafted(trees, tree, requests)
            choice, logits = state.sampler.choose_edited(hidden, target.head, requests, *paths)
        elif mode == Mode.SAMPLED:
            choice = state.sampler.choose_each(hidden, target.head, requests, tree.positions)
        else:
            choice = state.sampler.greedy(hidden, target.head)
        verdict, path = verifier.commit_trees(tree, choice, state, at, block, chains=chains)
        if features is not None:
            self._proposer.write_context(features.index_select(0, path.flatten()), at, verdict.counts)
        logprobs = None
        if logits is not None:
            state.sampler.count(slice(0, batch), verdict.path, verdict.counts)
            taken = path.flatten()
            logprobs = state.sampler.logprobs(logits[taken], choice[taken], batch)
        values = ops.pack_tree_results(tree, hidden, verdict.path, verdict.counts, path, promise)
        if logprobs is not None:
            context.buffers.put_logprobs(mode, logprobs)
        return values


def _drafted(trees: Trees, tree: TreeRows, requests: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the tokens int64 [M, K] on the path from its anchor to each row, and where there are any."""
    first = tree.starts[requests].long()
    places = torch.arange(len(requests), device=first.device) - first
    paths = trees.paths[requests, places.clamp(max=trees.paths.shape[1] - 1)][:, 1:]
    inside = torch.arange(paths.shape[1], device=first.device) < tree.depths[:, None]
    return tree.tokens[torch.where(inside, first[:, None] + paths, 0)], inside
