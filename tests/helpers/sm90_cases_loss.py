"""The losses of the rows of a head with Qwen3's vocabulary."""

from sm90 import Case

from dflash_toolkit.kernels.triton import row_loss, row_top

POINTERS = {
    "logits_p": "*bf16", "labels_p": "*i64", "target_p": "*bf16", "at_p": "*i64", "cross_entropy_p": "*fp32",
    "rank_p": "*i32", "kl_p": "*fp32", "acceptance_p": "*fp32",
}  # fmt: skip
SIZES = dict.fromkeys(("V", "stride", "stride_target"), "i32")
WEIGHTS = dict.fromkeys(("w_ce", "w_kl", "w_tv", "w_lk", "w_hybrid", "eta", "least", "inverse_t"), "fp32")


def case(distribution: bool, tempered: bool) -> Case:
    constexprs = {
        "BLOCK": row_loss.BLOCK_TWO if distribution else row_loss.BLOCK, "GRADIENT": True,
        "DISTRIBUTION": distribution, "TEMPERED": tempered,
    }  # fmt: skip
    return Case(row_loss._row_loss_kernel, POINTERS | SIZES | WEIGHTS, constexprs, num_warps=8, ragged=("V",))


CASES = {
    "cross-entropy": case(False, False),
    "distributions": case(True, False),
    "distributions at a temperature": case(True, True),
    "largest": Case(
        row_top._row_top_kernel,
        {"logits_p": "*bf16", "values_p": "*fp32", "columns_p": "*i64", "V": "i32", "stride": "i32"},
        {"COUNT": 16, "C_BLOCK": 16, "LANES": row_top.LANES, "PIECES": 128},
        num_warps=4,
        ragged=("V",),
    ),
}
