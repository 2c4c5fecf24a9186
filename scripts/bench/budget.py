"""Replay recorded draft blocks under the chooser of rows, beside one block length for all and the chooser of lengths.

    python scripts/bench/budget.py trace.pt --times ~/.cache/dflash-toolkit/times-0123456789abcdef.json

The trace is a list of greedy answers: `set`, `prompt` (tokens of it), `tokens`, and for every anchor of the answer the
drafter's best tokens `ids` and their log-probabilities `lp`, both [anchors, S - 1, k], slots taken to be independent.
Steps cost what an engine with `draft_tree` measured and kept; requests follow one another in the batch at random. For
the best common block length, in hindsight, there are tokens a second, for the others gains over it. The calibration
begins with the drafter's own probabilities and is fitted on the way.
"""

import argparse
import heapq
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dflash_toolkit.benchmark import setting, without_folders
from dflash_toolkit.calibration import Calibration
from dflash_toolkit.files import write_json
from dflash_toolkit.runtime.budget import BudgetChooser, Promise, completed, row_buckets
from dflash_toolkit.runtime.draft_length import BlockChooser
from dflash_toolkit.runtime.feedback import CalibrationFeed, judged
from dflash_toolkit.runtime.request import RollingAcceptance, Trust
from dflash_toolkit.runtime.timing import Times

NODES = 63


class Answer:
    """One greedy answer and what was drafted at each of its anchors."""

    def __init__(self, recorded: dict[str, Any]) -> None:
        tokens, prompt = recorded["tokens"].numpy(), recorded["prompt"]
        ids, self.log_probs = recorded["ids"].numpy(), recorded["lp"].double().numpy()
        anchors, slots, _ = ids.shape
        at = prompt + 1 + np.arange(anchors)[:, None] + np.arange(slots)
        label = np.where(at < len(tokens), tokens[np.minimum(at, len(tokens) - 1)], -1)
        self.right = ids == label[:, :, None]  # [A, S - 1, k]
        self.chain = self.right[:, :, 0].cumprod(1).sum(1)  # [A], drafts that are accepted of a whole chain


@dataclass(slots=True)
class Place:
    """A request, at one of an answer's anchors."""

    answer: Answer
    anchor: int
    acceptance: RollingAcceptance
    trust: Trust = field(default_factory=Trust)
    blocks_in_flight: Sequence[int] = ()  # results are read at once here, but what they promise is


def grown(values: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Depth, parent's place, log-probability of the path, and whether all of it is right, of the likeliest nodes."""
    heap, found = [(-values[0, 0], 0, 0, 0, True)], list[tuple[float, ...]]()
    while heap and len(found) < NODES:
        cost, slot, rank, parent, alive = heapq.heappop(heap)
        hit = bool(alive and right[slot, rank])
        found.append((slot + 1, parent, -cost, hit))
        if rank + 1 < values.shape[1]:
            sibling = cost + values[slot, rank] - values[slot, rank + 1]
            heapq.heappush(heap, (sibling, slot, rank + 1, parent, alive))
        if slot + 1 < len(values):
            heapq.heappush(heap, (cost - values[slot + 1, 0], slot + 1, 0, len(found), hit))
    return np.array(found)


def calibrated(log_probs: np.ndarray, calibration: Calibration) -> np.ndarray:
    """Of [S - 1, k], largest first in every slot as they are."""
    p = np.clip(np.exp(log_probs), 1e-6, 1 - 1e-6)
    return -np.logaddexp(0, -(calibration.slope * np.log(p / (1 - p)) + np.array(calibration.bias)[:, None]))


class Replay:
    """A batch of requests that is never empty. Results are read a step late.

    Args:
        blocks: lengths to choose from; 1 is plain decoding.
    """

    def __init__(
        self, answers: Sequence[Answer], requests: int, blocks: Sequence[int], times: Times, seed: int
    ) -> None:
        self._dice, self._answers = random.Random(seed), answers
        self._drafted = [block for block in blocks if block > 1]
        self._times, self._expected = times, RollingAcceptance(weight=3, decay=0.99)
        self.batch = [self._next() for _ in range(requests)]
        for place in self.batch:
            place.anchor = self._dice.randrange(len(place.answer.chain))

    def _next(self) -> Place:
        return Place(self._dice.choice(self._answers), 0, RollingAcceptance(self._expected))

    def blocks(self, choose: Callable[[Sequence[Any]], int], steps: int) -> float:
        """Tokens a second where every step has one block length."""
        tokens = seconds = 0.0
        for _ in range(steps):
            block = choose(self.batch)
            taken = [min(int(place.answer.chain[place.anchor]), block - 1) for place in self.batch]
            for place, count in zip(self.batch, taken, strict=True):
                if block > 1:
                    place.acceptance.observe(block - 1, count)
                    self._expected.observe(block - 1, count)
            tokens, seconds = tokens + self._commit(taken), seconds + self._times[len(self.batch), block]
        return tokens / seconds

    def rows(
        self, choose: BudgetChooser, lengths: Callable[[Sequence[Any]], int], feed: CalibrationFeed, steps: int
    ) -> float:
        """Tokens a second where rows are chosen, too, and the length of blocks where there are no trees."""
        tokens, seconds, unread = 0.0, 0.0, list[Callable[[], None]]()
        for _ in range(steps):
            shape = choose(len(self.batch), awaited=bool(unread))
            late, unread = unread, []
            if shape.rows:
                taken, depths, read = self._verified(choose, feed, shape.block, shape.rows)
                unread.append(read)
                time = self._times[len(self.batch), shape.rows, shape.block]
            else:
                block = lengths(self.batch)
                taken = [min(int(place.answer.chain[place.anchor]), block - 1) for place in self.batch]
                depths, time = [block - 1] * len(self.batch), self._times[len(self.batch), block]
            for place, depth, count in zip(self.batch, depths, taken, strict=True):
                if depth:
                    place.acceptance.observe(depth, count)
                    self._expected.observe(depth, count)
            for read in late:
                read()
            tokens, seconds = tokens + self._commit(taken), seconds + time
        return tokens / seconds

    def _verified(
        self, choose: BudgetChooser, feed: CalibrationFeed, block: int, rows: int
    ) -> tuple[list[int], list[int], Callable[[], None]]:
        """Of each request's tree the accepted drafts and the depth, and what reads the result."""
        calibration, batch = feed.calibration, len(self.batch)
        values = [calibrated(p.answer.log_probs[p.anchor, : block - 1], short(calibration, block)) for p in self.batch]
        trusts, discounts = [place.trust for place in self.batch], [place.trust.log_discount for place in self.batch]
        for value, discount in zip(values, discounts, strict=True):
            value[0] += discount
        trees = [grown(v, p.answer.right[p.anchor]) for v, p in zip(values, self.batch, strict=True)]
        chains = np.sum([np.exp(np.cumsum(v[:, 0])) for v in values], axis=0)
        depths, paths = (np.concatenate([tree[:, i] for tree in trees]) for i in (0, 2))
        accepted = list[list[float]]()
        for size in [size for size in self._drafted if size <= block]:
            best = np.exp(np.sort(paths[depths < size])[::-1]).cumsum()
            ends = [min(each - batch, len(best)) - 1 for each in row_buckets(batch)]
            accepted.append([float(chains[: size - 1].sum()), *best[ends].tolist()])
        promise = Promise(batch, batch, accepted)
        least = np.sort(paths)[::-1][min(rows - batch, len(paths)) - 1]
        cut = [tree[: int((tree[:, 2] >= least).sum())] for tree in trees]  # equal ones may be some more
        taken = [int(tree[:, 3].sum()) for tree in cut]
        starts = np.cumsum([0, *(1 + len(tree) for tree in cut)])
        anchor = np.zeros((1, 4))
        parts = [np.concatenate([anchor, tree]) for tree in cut]
        every, first = np.concatenate(parts), np.repeat(starts[:-1], np.diff(starts))
        path = np.repeat(starts[:-1, None], block, axis=1)
        for b, tree in enumerate(cut):
            right = starts[b] + 1 + np.flatnonzero(tree[:, 3])
            path[b, 1 : 1 + len(right)] = right
        log_probs = every[:, 2].astype(np.float32)
        parents = (first + every[:, 1]).astype(np.int64)
        depths, counts = every[:, 0].astype(np.int64), 1 + np.array(taken)
        step = judged(starts, parents, depths, log_probs, path, counts, calibration, np.array(discounts))

        def read() -> None:
            for trust, promised, count in zip(trusts, step.promised, step.taken, strict=True):
                trust.observe(float(promised), int(count))
            choose.observe(promise)
            feed.observe(step)

        return taken, [int(tree[:, 0].max(initial=0)) for tree in cut], read

    def _commit(self, taken: Sequence[int]) -> int:
        for row, (place, count) in enumerate(zip(self.batch, taken, strict=True)):
            place.anchor += count + 1
            if place.anchor >= len(place.answer.chain):
                self.batch[row] = self._next()
        return sum(taken) + len(taken)


def short(calibration: Calibration, block: int) -> Calibration:
    """Of the slots of a shorter block."""
    return Calibration(calibration.slope, calibration.bias[: block - 1])


def compared(
    answers: Sequence[Answer], requests: int, blocks: Sequence[int], times: Times, steps: int, seeds: int
) -> dict[str, Any]:
    """What a batch of so many decodes a second, on average."""

    def replays(run: Callable[[Replay], float]) -> float:
        return sum(run(Replay(answers, requests, blocks, times, seed)) for seed in range(seeds)) / seeds

    def chosen(replay: Replay) -> float:
        choosers = BudgetChooser(blocks, times, lambda n: n), BlockChooser(blocks, times, lambda n: n)
        return replay.rows(*choosers, CalibrationFeed(Calibration.cold(answers[0].log_probs.shape[1])), steps)

    def in_blocks(block: int) -> float:
        return replays(lambda replay: replay.blocks(lambda _: block, steps))

    common = {block: in_blocks(block) for block in blocks}
    best = max(common, key=common.__getitem__)
    lengths = replays(lambda replay: replay.blocks(BlockChooser(blocks, times, lambda n: n), steps))
    rows = replays(chosen)
    gains = SimpleNamespace(lengths=lengths / common[best] - 1, rows=rows / common[best] - 1)
    return {"requests": requests, "block": best, "tokens_per_second": common[best], **vars(gains)}


def read_times(path: Path) -> Times:
    """Seconds of steps as they are kept, trees that were not measured added."""
    times: Times = {tuple(shape): s for *shape, s in json.loads(path.read_text())["seconds"]}
    batches = sorted({shape[0] for shape in times})
    drafted = sorted({shape[-1] for shape in times if len(shape) == 3})
    return completed(times, batches, drafted) if drafted else times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--times", type=Path, required=True, help="times-....json of an engine with draft trees")
    parser.add_argument("--sets", nargs="*", default=[], help="of the trace; all by default")
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1, help="batches to average over, each begins anew")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    recorded = torch.load(args.trace)
    answers = [
        Answer(each) for each in recorded if len(each["ids"]) > 20 and (not args.sets or each["set"] in args.sets)
    ]
    times, found = read_times(args.times), []
    for requests in args.requests:
        blocks = sorted(shape[1] for shape in times if len(shape) == 2 and shape[0] == requests)
        if not blocks:
            parser.error(f"{args.times} has no steps of {requests} requests")
        found.append(compared(answers, requests, blocks, times, args.steps, args.seeds))
        best = "{requests:3d} requests: block {block:2d} {tokens_per_second:6.0f} tok/s"
        print(f"{best}  lengths {{lengths:+6.1%}}  rows {{rows:+6.1%}}".format(**found[-1]), flush=True)
    if args.output:
        words = [without_folders(word) for word in sys.argv[1:]]
        write_json(args.output, setting("bench/budget.py", words) | {"batches": found})


if __name__ == "__main__":
    main()
