"""Plain torch definitions of the operations of draft trees, written for reading."""

import heapq
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..tree import TreeRows, Trees

EXTREME = 1e-6  # probabilities this close to 0 or 1 count as this


def draft_children(
    unary: Tensor,
    lse: Tensor,
    candidates: Tensor,
    calibration: Tensor,
    width: int,
    pairs: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the most probable candidates of every slot after each candidate of the slot before, calibrated.

    A candidate of probability p at slot k counts as sigmoid(slope * log-odds(p) + bias[k]).

    Args:
        unary: fp32 [B, K, C], the logits of the candidates. May, like the next two, have the slots of longer blocks.
        lse: fp32 [B, K], from `linear_top_lse`.
        candidates: int64 [B, K, C], tokens.
        calibration: fp64 [1 + K], the slope, then a bias of every slot.
        width: children of a node, W <= C.
        pairs: given for a drafter with a selector: state [B, K, r], predecessors and successors [V, r] and anchors
            int64 [B] as in `walk`. The softmax is then over the candidates' scores, and `lse` is not read.

    Returns:
        Log-probabilities fp32 [B, K, Q, W], largest first, and their candidates, int32. Q is 1, or C with pairs: [k, b]
        has the children of candidate b of slot k - 1, and [0, b] those of the anchor.
    """
    if pairs is None:
        own = (unary - lse[..., None])[:, :, None]
    else:
        state, predecessors, successors, anchors = pairs
        before = torch.cat([anchors[:, None, None].expand_as(candidates[:, :1]), candidates[:, :-1]], dim=1)
        query = predecessors[before].float() * state.float()[:, :, None]  # [B, K, C, r]
        own = (unary[:, :, None] + query @ successors[candidates].float().mT).log_softmax(-1)
    odds = torch.logit(own.double().exp(), eps=EXTREME)
    values = F.logsigmoid(calibration[0] * odds + calibration[1:, None, None]).float()
    values, ranks = values.masked_fill(values.isnan(), -torch.inf).sort(dim=-1, descending=True, stable=True)
    return values[..., :width].contiguous(), ranks[..., :width].int().contiguous()


def grow_trees(values: Tensor, ranks: Tensor, candidates: Tensor, limits: Tensor, nodes: int) -> Trees:
    """Grows each request's tree of the `nodes` most probable paths, or of all paths.

    A shorter path comes before an equally probable one, then the path of the earlier parent, then the more probable
    child.

    Args:
        values, ranks, candidates: results of `draft_children`.
        limits: int32 [B], maximum depth of a request's tree; 0: no tree.
    """
    batch, slots = values.shape[:2]
    shape, device = (batch, nodes), values.device
    parents, depths = (torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(2))
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)
    log_probs = torch.full(shape, -torch.inf, device=device)
    paths = torch.zeros(batch, nodes + 1, slots + 1, dtype=torch.int32, device=device)
    ancestors = torch.zeros_like(tokens)
    bits = torch.ones_like(tokens[0]) << torch.arange(nodes, device=device)
    for b, limit in enumerate(limits.tolist()):
        grown = _grow(values[b].cpu(), ranks[b].cpu(), min(limit, slots), nodes)
        for i, (depth, parent, rank, log_prob) in enumerate(grown):
            tokens[b, i], parents[b, i] = candidates[b, depth - 1, rank], parent
            depths[b, i], log_probs[b, i] = depth, log_prob
            paths[b, i + 1] = paths[b, parent]
            paths[b, i + 1, depth] = i + 1
            ancestors[b, i] = bits[paths[b, i + 1, 1 : depth + 1].long() - 1].sum()
    return Trees(tokens, parents, depths, log_probs, paths, ancestors)


def _grow(values: Tensor, ranks: Tensor, limit: int, nodes: int) -> list[tuple[int, int, int, Tensor]]:
    """Returns depth, parent's place, candidate and path of the nodes of one request, from its [K, Q, W]."""
    found: list[tuple[int, int, int, Tensor]] = []
    heap: list[tuple[float, int, int, int, Tensor]] = []

    def push(place: int, depth: int, rank: int, path: Tensor) -> None:
        """Adds the children of a node, which is candidate `rank` of the slot before `depth`."""
        for order, total in enumerate(path + values[depth, rank if values.shape[1] > 1 else 0]):
            heapq.heappush(heap, (-float(total), depth + 1, place, order, total))

    if limit > 0:
        push(0, 0, 0, torch.tensor(0.0))
    while heap and len(found) < nodes:
        _, depth, parent, order, total = heapq.heappop(heap)
        family = found[parent - 1][2] if parent and values.shape[1] > 1 else 0
        rank = int(ranks[depth - 1, family, order])
        found.append((depth, parent, rank, total))
        if depth < limit:
            push(len(found), depth, rank, total)
    return found


def cut_trees(
    trees: Trees, last_token: Tensor, lengths: Tensor, page_table: Tensor, page_size: int, rows: int
) -> TreeRows:
    """Returns the anchors of all requests, and the most probable nodes of all trees, for the given number of rows.

    Among equal nodes lower places come first, then lower requests, so every node's parent is kept.

    Args:
        last_token: int64 [B], the anchors.
        lengths: int32 [B], tokens before the anchors.
        page_table: int32 [B, pages of a request].
        rows: M >= B; unused rows are padding.
    """
    batch, nodes = trees.depths.shape
    every = [
        (-float(trees.log_probs[b, i]), i, b) for b in range(batch) for i in range(nodes) if int(trees.depths[b, i])
    ]
    kept = [b for _, _, b in sorted(every)[: rows - batch]]  # the first nodes of each request
    starts, found, log_probs = [0], list[tuple[int, ...]](), list[float]()
    for b, (length, table) in enumerate(zip(lengths.tolist(), page_table.tolist(), strict=True)):
        start = starts[-1]
        for place in range(1 + kept.count(b)):
            parent, depth, token, above, log_prob = 0, 0, int(last_token[b]), 0, 0.0
            if place:
                node = (trees.parents, trees.depths, trees.tokens, trees.ancestors)
                parent, depth, token, above = (int(part[b, place - 1]) for part in node)
                log_prob = float(trees.log_probs[b, place - 1])
            slot = table[(length + place) // page_size] * page_size + (length + place) % page_size
            found.append((b, start + parent, depth, token, length + depth, slot, above))
            log_probs.append(log_prob)
        starts.append(len(found))
    found += [(-1, row, 0, 0, 0, 0, 0) for row in range(len(found), rows)]
    log_probs += [0.0] * (rows - len(log_probs))
    device = lengths.device
    requests, parents, depths, tokens, positions, slots, ancestors = (
        torch.tensor(part, dtype=torch.int64, device=device) for part in zip(*found, strict=True)
    )
    return TreeRows(
        torch.tensor(starts, dtype=torch.int32, device=device), requests.int(), parents.int(), depths.int(), tokens,
        positions.int(), slots.int(), torch.tensor(log_probs, dtype=torch.float32, device=device), ancestors,
    )  # fmt: skip


def expected_accepted(
    trees: Trees, values: Tensor, ranks: Tensor, limits: Tensor, blocks: Sequence[int], rows: Sequence[int]
) -> Tensor:
    """Sums of path probabilities over a batch.

    Args:
        trees: all nodes of B requests.
        values, ranks, limits: inputs of `grow_trees` for these trees.
        blocks: lengths > 1, up to the drafted one, ascending.
        rows: numbers of rows M > B that a step may have.

    Returns:
        fp32 [blocks, 1 + rows]: sums for the most probable chains of block - 1 tokens, and for the M - B most probable
        nodes less than `block` positions after their anchors.
    """
    batch, slots = values.shape[:2]
    best = values[:, :, 0, 0]
    if values.shape[2] > 1:  # after the best candidate of the slot before
        every, rank, along = torch.arange(batch, device=values.device), torch.zeros_like(limits).long(), list[Tensor]()
        for slot in range(slots):
            along.append(values[every, slot, rank, 0])
            rank = ranks[every, slot, rank, 0].long()
        best = torch.stack(along, dim=1)
    within = torch.arange(slots, device=values.device) < limits[:, None]
    accepted = best.cumsum(1).exp().where(within, 0.0).sum(0).cumsum(0)
    chains = torch.stack([accepted[min(block - 1, slots) - 1] for block in blocks])
    likely = trees.log_probs.exp().where(trees.depths > 0, 0.0)
    kept = torch.stack([likely.where(trees.depths < block, 0.0).flatten() for block in blocks])
    nodes = kept.sort(dim=1, descending=True).values.cumsum(1)
    ends = [min(each - batch, nodes.shape[1]) - 1 for each in rows]
    return torch.stack([chains, *(nodes[:, end] for end in ends)], dim=1)


def accept_trees(
    rows: TreeRows,
    choice: Tensor,
    active: Tensor,
    lengths: Tensor,
    last_token: Tensor,
    depth: int,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Follows the target's choices from every anchor as far as its tree contains them, and commits them.

    Args:
        choice: int64 [M], the target's token after each row.
        active: bool [B]; other requests commit nothing.
        lengths: int32 [B], advanced in place by the number of committed tokens.
        last_token: int64 [B], replaced in place by the last committed token.
        depth: P, rows of the longest path, its anchor included.
        forced: int32 [B], numbers of steps to the first child, whatever the target chose (synthetic acceptance).

    Returns:
        counts int32 [B], the committed tokens of each request (0 where inactive); tokens int64 [B, P], of which the
        first `counts` are committed; and the rows that keep their K/V and features, int64 [B, P]: the rows of the path,
        then its last row repeated.
    """
    batch = len(lengths)
    counts, tokens = torch.zeros_like(lengths), choice.new_zeros(batch, depth)
    path = choice.new_zeros(batch, depth)
    for b in range(batch):
        start, end = int(rows.starts[b]), int(rows.starts[b + 1])
        at, walked, committed = start, [start], list[int]()
        while True:
            children = [row for row in range(at + 1, end) if int(rows.parents[row]) == at]
            token = int(choice[at])
            if forced is None:
                children = [row for row in children if int(rows.tokens[row]) == token]
            elif len(walked) > int(forced[b]):
                children = []
            if not children:
                break
            at = children[0]
            walked.append(at)
            committed.append(int(rows.tokens[at]))
        committed.append(token)
        path[b] = torch.tensor([*walked, *[at] * (depth - len(walked))])
        tokens[b] = torch.tensor([*committed, *[token] * (depth - len(committed))])
        if active[b]:
            counts[b] = len(committed)
            last_token[b] = token
    lengths += counts
    return counts, tokens, path


def move_rows_(
    cache: Tensor,
    rows: TreeRows,
    path: Tensor,
    counts: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    page_size: int,
) -> None:
    """Moves the accepted rows' keys and values of every layer from the slots of their places to their positions.

    Args:
        cache: [L, 2, slots, G, H], or [L, 2, slots, G], the scales of an fp8 cache transposed; written in place.
        path, counts: results of `accept_trees`.
        lengths: int32 [B], lengths before `accept_trees`.
    """
    for b, count in enumerate(counts.tolist()):
        at = int(lengths[b]) + torch.arange(count, device=path.device)
        positions = page_table[b, at // page_size].long() * page_size + at % page_size
        cache[:, :, positions] = cache[:, :, rows.slots[path[b, :count]].long()]


def pack_tree_results(
    rows: TreeRows, hidden: Tensor, tokens: Tensor, counts: Tensor, path: Tensor, expected: Tensor
) -> Tensor:
    """Returns the result of a step over trees for the host.

    Args:
        hidden: [M, D], the target's states of the rows.
        tokens, counts, path: results of `accept_trees`, for P rows.
        expected: result of `expected_accepted`.

    Returns:
        int64 in one dimension. Each request has 3 + P numbers: committed tokens, depth of its tree, whether a row has a
        norm that is not finite, and its tokens, with -1 after such a row. Then come `path`, the starts, tokens,
        parents, depths and log-probabilities of the rows, and the expected counts. fp32 numbers are stored as bits.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    nonfinite = ~(torch.linalg.vector_norm(hidden, dim=-1, dtype=wide) < torch.inf)
    owner = rows.requests.clamp(min=0).long()
    none = torch.zeros(len(counts), dtype=torch.int64, device=counts.device)
    depths = none.scatter_reduce(0, owner, rows.depths.long(), "amax")
    poisoned = none.scatter_reduce(0, owner, (nonfinite & (rows.requests >= 0)).long(), "amax")
    tokens = torch.where(nonfinite[path], -1, tokens)
    answers = torch.cat([torch.stack([counts.long(), depths, poisoned], dim=1), tokens], dim=1)
    fields = rows.starts, rows.tokens, rows.parents, rows.depths, _bits(rows.log_probs), _bits(expected)
    return torch.cat([answers.flatten(), path.flatten(), *(part.long() for part in fields)])


def _bits(values: Tensor) -> Tensor:
    return values.flatten().view(torch.int32)
