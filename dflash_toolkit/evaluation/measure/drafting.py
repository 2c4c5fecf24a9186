"""Finds out whether blocks, chains of adaptive length or draft trees are fastest at each load.

Each is measured as `dflash-serve` runs it, with lengths and rows chosen at run time.
"""

import itertools
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...acceptance import ratio
from ...sampling import SamplingParams
from .decoders import OnStep
from .pairs import Pair
from .sweeps import speedup_interval, spreads, totals, under_load, warm_up

Point = Mapping[str, Any]  # in the form of report.json


@dataclass(frozen=True, slots=True)
class Drafts:
    """A way to draft and its options."""

    kind: str  # blocks, chains, trees
    nodes: int = 0  # --draft-tree
    width: int | None = None  # --draft-tree-width; None: its default

    @property
    def options(self) -> list[str]:
        """Its options of `dflash-serve`."""
        words = ["--draft-tree", str(self.nodes)] if self.nodes else ["--no-draft-tree"]
        return words + (["--draft-tree-width", str(self.width)] if self.width else [])

    @property
    def name(self) -> str:
        return {"blocks": "blocks", "chains": "chains of adaptive length", "trees": f"trees of {self.nodes} nodes"}[
            self.kind
        ]


def candidates(pair: Pair, nodes: Iterable[int]) -> list[Drafts]:
    """Returns blocks, chains and trees of each number of nodes."""
    trees = (Drafts("trees", count) for count in nodes)
    return [Drafts("blocks"), Drafts("chains", pair.block_size - 1, 1), *trees]


def drafting_points(
    pair: Pair,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    concurrency: int,
    nodes: Sequence[int],
    on_step: OnStep | None = None,
) -> list[dict[str, Any]]:
    """Measures every candidate at one load, in the form of the report. Raises UserError if memory is too small.

    Args:
        on_step: called with the growing answers.
    """
    points, blocks, slowness = list[dict[str, Any]](), None, math.nan
    for drafts in candidates(pair, nodes):
        decoder = pair.served(concurrency, drafts.nodes, drafts.width)
        warm_up(decoder, prompts, params, concurrency)
        seconds, timed = under_load(decoder, prompts, params, concurrency, on_step)
        decoder.close()
        answers = [request.generation for request in timed if request.generation]
        figures = totals(timed)
        speed = ratio(figures[:, 0].sum(), seconds)
        blocks, slowness = (figures, speed) if blocks is None else (blocks, slowness)
        over = speed / slowness
        points.append(
            {
                "concurrency": concurrency,
                "drafts": drafts.kind,
                "draft_tree": drafts.nodes,
                "draft_tree_width": drafts.width,
                "requests": len(prompts),
                "tau_pooled": ratio(
                    sum(len(answer.tokens) - 1 for answer in answers), sum(len(answer.steps) for answer in answers)
                ),
                "tokens_per_second": speed,
                "over_blocks": over,
                "over_blocks_ci95": speedup_interval(figures, blocks, over) if drafts.nodes else None,
                **spreads(timed),
            }
        )
    return points


def drafts_of(point: Point) -> Drafts:
    return Drafts(point["drafts"], point["draft_tree"], point["draft_tree_width"])


def fastest(points: Sequence[Point]) -> Point:
    """Returns the fastest point of one load: blocks, unless the whole interval of another is above 1."""
    faster = [p for p in points if p["drafts"] != "blocks" and p["over_blocks_ci95"] and p["over_blocks_ci95"][0] > 1]
    blocks = next(point for point in points if point["drafts"] == "blocks")
    return max(faster, key=lambda point: point["over_blocks"], default=blocks)


def drafting_advice(points: Sequence[Point], serve: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the fastest way to draft at each load, with the command that serves it.

    Args:
        serve: the command without options of drafting.
    """
    found = []
    for concurrency, group in itertools.groupby(points, key=lambda point: point["concurrency"]):
        best = fastest(list(group))
        kept = ("drafts", "draft_tree", "draft_tree_width", "tokens_per_second", "over_blocks", "over_blocks_ci95")
        command = shlex.join([*serve, *drafts_of(best).options])
        found.append({"concurrency": concurrency, **{key: best[key] for key in kept}, "command": command})
    return found


def advice_text(advice: Sequence[Point]) -> str:
    """Writes a sentence for each command, which may be the fastest at several loads."""
    said = []
    for command, group in itertools.groupby(advice, key=lambda point: str(point["command"])):
        points = list(group)
        name = drafts_of(points[0]).name
        loads = _loads([point["concurrency"] for point in points])
        if points[0]["drafts"] == "blocks":
            said.append(f"{loads} no other way is clearly faster than {name}: `{command}`.")
        else:
            gains = " and ".join(dict.fromkeys(f"{each:.2f}x" for each in _ends([p["over_blocks"] for p in points])))
            said.append(f"{loads} {name} are the fastest, {gains} as fast as blocks: `{command}`.")
    return " ".join(said)


def _loads(counts: Sequence[int]) -> str:
    if counts == [1]:
        return "With one request at a time"
    first, last = _ends(counts)
    return f"With {first} requests at a time" if first == last else f"With {first} to {last} requests at a time"


def _ends(values: Sequence[Any]) -> tuple[Any, Any]:
    return min(values), max(values)
