"""The kernels of draft trees for Qwen3-8B; attention to them on Hopper is in sm90_cases_attention.py."""

from typing import Any

from sm90 import Case, case

from dflash_toolkit.kernels.triton import attention, tree_accept, tree_attention, tree_build, tree_results

CUTS = {"SHORT": 128, "SHORT_SPLITS": 16, "LONG": 1024}


def attention_case(kernel: Any, window: int = 0, stages: int = 1, head: int = 128) -> Case:
    warps, odd = attention.warps_for(head), "G width columns stride_pages"
    return case(kernel, warps, stages, odd, HEAD=head, ROWS=64, KEYS=64, WINDOW=window, **CUTS)


def tree_case(kernel: Any, warps: int, out: str = "*i64", **constexprs: Any) -> Case:
    return case(kernel, warps, odd="K C N width columns stride_pages", kinds={"out_p": out}, **constexprs)


def expected_case(batch: int, families: int, warps: int) -> Case:
    rows = (96, 128, 160, 192, 256)
    sizes: dict[str, Any] = {"N": 64, "W": 8, "Q": families, "ROWS": rows, "BUCKETS": len(rows), "N_BLOCK": 64}
    return tree_case(tree_results._expected_accepted_kernel, warps, "*fp32", B_BLOCK=batch, **sizes)


CASES = {
    "context": attention_case(tree_attention._prefix_kernel, stages=3),
    "paths": attention_case(tree_attention._tail_kernel, window=2048),
    "context, heads of 256": attention_case(tree_attention._prefix_kernel, stages=3, head=256),
    "paths, heads of 256": attention_case(tree_attention._tail_kernel, head=256),
    "children of pairs": tree_case(tree_build._children_kernel, 4, W=8, C_BLOCK=16, R_BLOCK=256, PAIRS=True),
    "growth": tree_case(tree_build._grow_kernel, 1, N=64, W=8, Q=1, N_BLOCK=64),
    "acceptance": tree_case(tree_accept._accept_trees_kernel, 1, R_BLOCK=128, P_BLOCK=16, FORCED=False),
    "moved rows": tree_case(tree_accept._move_rows_kernel, 4, P_BLOCK=16, BLOCK=512),
    "cut of 64 requests": tree_case(tree_build._cut_kernel, 16, B_BLOCK=64, N_BLOCK=64, M_BLOCK=256, ROUNDS=13),
    "expected tokens of a request with pairs": expected_case(1, 16, 1),
    "expected tokens of 64 requests": expected_case(64, 1, 8),
    "non-finite rows": tree_case(tree_results._nonfinite_rows_kernel, 8, BLOCK=4096),
    "packed results": tree_case(
        tree_results._pack_results_kernel, 2, R_BLOCK=128, S_BLOCK=16, B_BLOCK=128, M_BLOCK=256, P_BLOCK=32
    ),
}
