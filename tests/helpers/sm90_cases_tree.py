"""The kernels of draft trees for Qwen3-8B; attention to them on Hopper is in sm90_cases_attention.py."""

from sm90 import Case

from dflash_toolkit.kernels.triton import attention, tree_accept, tree_attention, tree_build, tree_results

STATES = dict.fromkeys(("m_p", "l_p", "acc_p"), "*fp32") | {"scale": "fp32"}
TREES = dict.fromkeys(("lengths_p", "starts_p", "requests_p", "depths_p", "paths_p", "pages_p"), "*i32")
INTS = dict.fromkeys(
    (
        "G", "H", "GROUP", "TILES", "width", "slots", "SPLITS", "stride_paths", "P", "columns", "stride_pages",
        "K", "C", "R", "B", "N", "M", "stride_unary", "stride_lse", "stride_candidates", "stride_state",
        "numbers", "stride_side", "stride_slot", "blocks", "D", "S", "stride", "sums",
    ), "i32",
)  # fmt: skip
ODD = ("G", "GROUP", "TILES", "width", "SPLITS", "stride_paths", "P", "columns", "stride_pages")
ODD += ("K", "C", "B", "N", "M", "stride_lse", "blocks", "S", "sums")
CUTS = {"SHORT": 128, "SHORT_SPLITS": 16, "LONG": 1024}


def case(
    kernel: object, pointers: dict[str, str], constexprs: dict[str, object], warps: int = 4, stages: int = 3
) -> Case:
    kinds = pointers | {name: kind for name, kind in INTS.items() if name not in constexprs}
    kinds = {name: kind for name, kind in kinds.items() if name in kernel.arg_names}
    given = {name: value for name, value in constexprs.items() if name in kernel.arg_names}
    return Case(kernel, kinds, given, warps, stages, tuple(name for name in ODD if name in kinds))


def attention_case(kernel: object, window: int = 0, stages: int = 1, head: int = 128) -> Case:
    pointers = STATES | TREES | dict.fromkeys(("q_p", "cache_p"), "*bf16")
    sizes = {"HEAD": head, "ROWS": 64, "KEYS": 64, "PAGE": 64, "EVEN_H": True, "PDL": True}
    return case(kernel, pointers, sizes | CUTS | {"WINDOW": window}, attention.warps_for(head), stages)


def build_case(kernel: object, warps: int, **constexprs: object) -> Case:
    pointers = dict.fromkeys(("unary_p", "lse_p", "values_p", "log_probs_p", "row_log_probs_p"), "*fp32")
    pointers |= dict.fromkeys(("candidates_p", "anchors_p", "tokens_p", "last_p", "row_tokens_p"), "*i64")
    pointers |= dict.fromkeys(("state_p", "predecessors_p", "successors_p"), "*bf16") | {"calibration_p": "*fp64"}
    pointers |= dict.fromkeys(("ranks_p", "limits_p", "parents_p", "row_parents_p", "row_depths_p", "slots_p"), "*i32")
    pointers |= {"active_p": "*i1", "cache_p": "*bf16"}
    pointers |= dict.fromkeys(("choice_p", "path_p", "ancestors_p", "row_ancestors_p"), "*i64")
    pointers |= dict.fromkeys(("positions_p", "forced_p", "counts_p", "row_slots_p"), "*i32")
    return case(kernel, TREES | pointers, constexprs | {"PDL": True}, warps)


def tree_case(kernel: object, warps: int, **constexprs: object) -> Case:
    pointers = dict.fromkeys(("log_probs_p", "values_p", "expected_p"), "*fp32") | {"hidden_p": "*bf16"}
    pointers |= dict.fromkeys(("ranks_p", "limits_p", "parents_p", "nonfinite_p", "counts_p"), "*i32")
    pointers |= dict.fromkeys(("row_tokens_p", "tokens_p", "path_p"), "*i64")
    pointers["out_p"] = "*fp32" if kernel is tree_results._expected_accepted_kernel else "*i64"
    return case(kernel, TREES | pointers, constexprs | {"PDL": True}, warps)


def expected_case(batch: int, families: int, warps: int) -> Case:
    rows = (96, 128, 160, 192, 256)
    sizes = {"N": 64, "W": 8, "Q": families, "ROWS": rows, "BUCKETS": len(rows), "B_BLOCK": batch, "N_BLOCK": 64}
    return tree_case(tree_results._expected_accepted_kernel, warps, **sizes)


CASES = {
    "context": attention_case(tree_attention._prefix_kernel, stages=3),
    "paths": attention_case(tree_attention._tail_kernel, window=2048),
    "context, heads of 256": attention_case(tree_attention._prefix_kernel, stages=3, head=256),
    "paths, heads of 256": attention_case(tree_attention._tail_kernel, head=256),
    "children of pairs": build_case(tree_build._children_kernel, 4, W=8, C_BLOCK=16, R_BLOCK=256, PAIRS=True),
    "growth": build_case(tree_build._grow_kernel, 1, N=64, W=8, Q=1, N_BLOCK=64),
    "acceptance": build_case(tree_accept._accept_trees_kernel, 1, R_BLOCK=128, P_BLOCK=16, FORCED=False),
    "moved rows": build_case(tree_accept._move_rows_kernel, 4, P_BLOCK=16, PAGE=64, BLOCK=512),
    "cut of 64 requests": build_case(
        tree_build._cut_kernel, 16, B_BLOCK=64, N_BLOCK=64, M_BLOCK=256, PAGE=64, ROUNDS=13
    ),
    "expected tokens of a request with pairs": expected_case(1, 16, 1),
    "expected tokens of 64 requests": expected_case(64, 1, 8),
    "non-finite rows": tree_case(tree_results._nonfinite_rows_kernel, 8, BLOCK=4096),
    "packed results": tree_case(
        tree_results._pack_results_kernel, 2, R_BLOCK=128, S_BLOCK=16, B_BLOCK=128, M_BLOCK=256, P_BLOCK=32
    ),
}
