"""Time what a draft tree costs a step: its attention, its head, its growth, the walk with what that moves, the telling.

    python scripts/bench/tree.py --shape qwen3-8b --output tree.json

Each in a CUDA graph; microseconds a call, of attention a layer, whose caches are different ones. Beside them is what a
chain of as many rows takes: the attention of a block, the head's argmax, the walk along a chain. Chains of own length
have their own attention, and beside it what they take as trees. Trees are grown from drafts of which the best token is
right --right of the time, and fill the rows. What trees promise and what a step tells is also computed by the
definitions, whose operations are a kernel each (`_reference_us`); promises are of whole trees.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_toolkit.benchmark import captured, setting
from dflash_toolkit.files import write_json
from dflash_toolkit.kernels import gpu, reference
from dflash_toolkit.kernels.mix import PLAIN
from dflash_toolkit.kernels.tree import MOST_NODES, TreeRows, Trees
from dflash_toolkit.kernels.weight import RowScaledFp8
from dflash_toolkit.models.spec import AttentionSpec, ModelSpec
from dflash_toolkit.runtime.budget import row_buckets
from dflash_toolkit.runtime.shapes import named_shape
from dflash_toolkit.runtime.timing import median_seconds

PAGE, BLOCK, COUNT, WIDTH, RANK = (
    64,
    16,
    16,
    8,
    256,
)  # tokens of a page and a draft block, candidates, children, selector
PROMISED = (2, 4, 8, BLOCK)  # blocks
LAYERS, CALLS, REPEATS = 8, 8, 20
DEVICE = torch.device("cuda")


def us_of(work: Callable[[], object], calls: int = CALLS) -> float:
    """Microseconds of one of the `calls` that `work` is made of."""
    return 1e6 * median_seconds(captured(work).replay, DEVICE, REPEATS) / calls


def again(work: Callable[..., object], *args: Any) -> Callable[[], object]:
    return lambda: [work(*args) for _ in range(CALLS)]


def drafts(batch: int, right: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of candidates, their log-sum-exp, and tokens, of slots behind the first of blocks."""
    decay = torch.arange(COUNT, device=DEVICE) * math.log(1 - right)  # geometric
    unary = (decay + torch.randn(batch, BLOCK, COUNT, device=DEVICE)).sort(dim=-1, descending=True).values
    candidates = torch.randint(0, 50_000, (batch, BLOCK, COUNT), device=DEVICE)
    return unary[:, 1:], unary.logsumexp(-1)[:, 1:], candidates[:, 1:]


def built(
    batch: int, rows: int, lengths: Tensor, table: Tensor, right: float
) -> tuple[Trees, TreeRows, dict[str, float]]:
    """Trees that fill the rows, and what building them took."""
    unary, lse, candidates = drafts(batch, right)
    calibration = torch.zeros(BLOCK, dtype=torch.float64, device=DEVICE)
    calibration[0] = 1.0
    limits = torch.full((batch,), BLOCK - 1, dtype=torch.int32, device=DEVICE)
    nodes, last = min(MOST_NODES, max(1, rows - batch)), torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    books = [torch.randn(50_000, RANK, device=DEVICE).bfloat16() for _ in range(2)]
    pairs = (torch.randn(batch, BLOCK, RANK, device=DEVICE).bfloat16()[:, 1:], *books, last)
    of_slots, of_pairs = (
        (unary, lse, candidates, calibration, WIDTH),
        (unary, lse, candidates, calibration, WIDTH, pairs),
    )
    values, ranks = gpu.draft_children(*of_slots)
    grown = (values, ranks, candidates, limits, nodes)
    trees = gpu.grow_trees(*grown)
    cut = (trees, last, lengths, table, PAGE, rows)
    found = {"children_us": us_of(again(gpu.draft_children, *of_slots))}
    found["pairs_children_us"] = us_of(again(gpu.draft_children, *of_pairs))
    found["grow_us"] = us_of(again(gpu.grow_trees, *grown))
    found["cut_us"] = us_of(again(gpu.cut_trees, *cut))
    whole = gpu.grow_trees(*grown[:-1], MOST_NODES)
    promise = (whole, values, ranks, limits, PROMISED, row_buckets(batch))
    found["promise_us"] = us_of(again(gpu.promise_trees, *promise))
    found["promise_reference_us"] = us_of(again(reference.promise_trees, *promise))
    return trees, gpu.cut_trees(*cut), found


def chains_of(batch: int, rows: int, lengths: Tensor, table: Tensor, right: float) -> tuple[Trees, TreeRows]:
    """Chains of own length for as many rows as they fill."""
    unary, lse, candidates = drafts(batch, right)
    calibration = torch.zeros(BLOCK, dtype=torch.float64, device=DEVICE)
    calibration[0] = 1.0
    limits = torch.full((batch,), BLOCK - 1, dtype=torch.int32, device=DEVICE)
    children = gpu.draft_children(unary, lse, candidates, calibration, 1)
    trees = gpu.grow_trees(*children, candidates, limits, BLOCK - 1)
    last = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    return trees, gpu.cut_trees(trees, last, lengths, table, PAGE, rows)


def measure(
    mixer: AttentionSpec, hidden_size: int, batch: int, rows: int, context: int, limit: int, right: float
) -> dict[str, Any]:
    """Of one shape of a step."""
    pages = -(-(context + MOST_NODES + 1) // PAGE)
    table = torch.zeros(batch, max(pages, -(-limit // PAGE)), device=DEVICE, dtype=torch.int32)
    table[:, :pages] = torch.randperm(batch * pages, device=DEVICE, dtype=torch.int32).view(batch, pages)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
    trees, tree_rows, found = built(batch, rows, lengths, table, right)
    cache = torch.randn(LAYERS, 2, batch * pages * PAGE, mixer.num_kv_heads, mixer.head_dim, device=DEVICE).bfloat16()
    q = torch.randn(rows, mixer.num_heads, mixer.head_dim, device=DEVICE).bfloat16()
    where = (lengths, table, PAGE)
    found["attention_us"] = us_of(
        lambda: [gpu.tree_attention(q, part, *where, tree_rows, trees.paths) for part in cache], LAYERS
    )
    chains, chain_rows = chains_of(batch, rows, lengths, table, right)
    found["chain_attention_us"] = us_of(
        lambda: [gpu.chain_attention(q, part, *where, chain_rows, BLOCK) for part in cache], LAYERS
    )
    found["chain_attention_as_trees_us"] = us_of(
        lambda: [gpu.tree_attention(q, part, *where, chain_rows, chains.paths) for part in cache], LAYERS
    )
    block = rows // batch
    found["block_attention_us"] = us_of(
        lambda: [gpu.block_attention(q[: batch * block], part, *where, causal=True) for part in cache], LAYERS
    )
    used, choice = int(tree_rows.starts[-1]), [-1] * rows  # which goes from first child to first child
    for row in range(used - 1, -1, -1):
        if int(tree_rows.depths[row]):
            choice[int(tree_rows.parents[row])] = int(tree_rows.tokens[row])
    active = torch.ones(batch, dtype=torch.bool, device=DEVICE)
    walk = (
        tree_rows,
        torch.tensor(choice, device=DEVICE),
        active,
        lengths.clone(),
        torch.zeros_like(lengths).long(),
        BLOCK,
    )
    counts, tokens, path = gpu.accept_trees(*walk)
    found["accept_us"] = us_of(again(gpu.accept_trees, *walk))
    found["move_layer_us"] = us_of(again(gpu.move_rows_, cache, tree_rows, path, counts, *where)) / LAYERS
    hidden = torch.randn(rows, hidden_size, device=DEVICE).bfloat16()
    promise = torch.zeros(len(PROMISED), 1 + len(row_buckets(batch)), device=DEVICE)
    told = (tree_rows, hidden, tokens, counts, path, promise)
    found["tell_us"] = us_of(again(gpu.tell_trees, *told))
    found["tell_reference_us"] = us_of(again(reference.tell_trees, *told))
    return {
        "batch": batch, "rows": rows, "context": context, "limit": limit, "used_rows": used,
        "chain_rows": int(chain_rows.starts[-1]),
        "deepest": int(tree_rows.depths.max()), "walked": float(counts.float().mean()), **found,
    }  # fmt: skip


def head_times(rows: int, head: Tensor, fp8_head: RowScaledFp8) -> dict[str, float]:
    """The draft's head on so many rows, in microseconds."""
    x = torch.randn(rows, head.shape[1], device=DEVICE).bfloat16()
    found: dict[str, float] = {"rows": rows}
    for name, weight in (("", head), ("fp8_", fp8_head)):
        found[f"{name}argmax_us"] = us_of(again(gpu.linear_argmax, x, weight))
        found[f"{name}top_us"] = us_of(again(gpu.linear_top, x, weight, COUNT))
        found[f"{name}top_lse_us"] = us_of(again(gpu.linear_top_lse, x, weight, COUNT, PLAIN))
    return found


def table_of(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0])
    cells = [[f"{row[name]:.1f}" if isinstance(row[name], float) else str(row[name]) for name in names] for row in rows]
    return "\n".join(" | ".join(line) for line in [names, *cells])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--context", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--limit", type=int, default=8192, help="tokens that a request may grow to")
    parser.add_argument("--right", type=float, default=0.6)
    parser.add_argument(
        "--top-columns", type=int, nargs="*", default=[], help="columns of a part of the head, also tried"
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    spec = ModelSpec.of_target(named_shape(args.shape))
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    steps = list[dict[str, Any]]()
    for batch in args.batch:
        for context in args.context:
            for rows in (rows for rows in args.rows if rows > batch and rows <= batch * (MOST_NODES + 1)):
                steps.append(measure(mixer, spec.hidden_size, batch, rows, context, args.limit, args.right))
    print(table_of(steps), flush=True)
    head = torch.randn(spec.vocab_size, spec.hidden_size, device=DEVICE).bfloat16()
    fp8_head = RowScaledFp8.of(head)
    heads = [head_times(rows, head, fp8_head) for rows in (16, 128, 256, 512)]
    for columns in args.top_columns:  # read at every call
        gpu.TOP_COLUMNS = columns
        heads += [head_times(rows, head, fp8_head) | {"columns": columns} for rows in (256, 512)]
    for row in heads:
        print(row)
    if args.output:
        write_json(
            args.output,
            {**setting("bench/tree.py"), "shape": args.shape, "right": args.right, "steps": steps, "heads": heads},
        )


if __name__ == "__main__":
    main()
