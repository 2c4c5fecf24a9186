"""The other kernels of a Qwen3-8B step, as they run on an H200."""

from sm90 import Case

from dflash_toolkit.kernels.triton import accept, attention, mask, norm, rope, sample

SIZES = (
    "S",
    "N",
    "G",
    "H",
    "HALF",
    "GROUP",
    "TILES",
    "SPLITS",
    "LAYERS",
    "width",
    "slots",
    "positions",
    "paired",
    "TURNS",
    "columns",
)
INTS = dict.fromkeys(SIZES, "i32")
SHARED = {"HEAD": 128, "ROWS": 64, "SHORT": 128, "SHORT_SPLITS": 16, "LONG": 1024, "PDL": True}
ODD = ("S", "G", "GROUP", "TILES", "SPLITS", "LAYERS", "width")


ROWS = ("lengths_p", "counts_p")  # int32, of every request


def ints(kernel: object) -> dict[str, str]:
    return {name: kind for name, kind in INTS.items() if name in kernel.arg_names}


def attention_case(
    whole: bool, causal: bool, counted: bool = False, ragged: bool = False, window: int = 0, head: int = 128
) -> Case:
    kernel = attention._attention_kernel
    constexprs = SHARED | {
        "HEAD": head, "KEYS": 64, "PAGE": 64, "WHOLE": whole, "RAGGED": ragged,
        "TREE": ragged and not causal, "COUNTED": counted, "CAUSAL": causal, "WINDOW": window, "EVEN_H": True,
    }  # fmt: skip
    pointers = dict.fromkeys(("q_p", "cache_p", "out_p"), "*bf16") | dict.fromkeys(ROWS, "*i32")
    pointers |= {"pages_p": "*i32"} | dict.fromkeys(("m_p", "l_p", "acc_p"), "*fp32")
    pointers |= {"starts_p": "*i32", "depths_p": "*i32", "ancestors_p": "*i64", "scale": "fp32"}
    warps, odd = attention.warps_for(head), tuple(n for n in ODD if n in kernel.arg_names)
    return Case(kernel, pointers | ints(kernel), constexprs, warps, 3, odd)


def sample_case(logits: str, ragged: tuple[str, ...] = (), candidates: int = 0) -> Case:
    pointers = {
        "logits_p": logits, "temperature_p": "*fp32", "top_p_p": "*fp32", "top_k_p": "*i64", "min_p_p": "*fp32",
        "uniform_p": "*fp64", "values_p": "*fp32", "ids_p": "*i32", "out_p": "*i64", "V": "i32", "C": "i32",
    }  # fmt: skip
    judged = {"draft_p": "*i64", "acceptance_p": "*fp64", "drafted_p": "*i64", "q_p": "*fp32"}
    sizes = {name: getattr(sample, name) for name in ("BLOCK", "TILE", "PIVOTS", "GROUPS")}
    constexprs = sizes | {"ROOM": sample.CANDIDATES, "TILES": 64, "C_BLOCK": candidates, "PDL": True}
    if candidates:
        return Case(sample._sample_kernel, pointers | judged, constexprs, sample.WARPS, ragged=ragged)
    return Case(sample._sample_kernel, pointers, constexprs | dict.fromkeys(judged), sample.WARPS, ragged=ragged)


def rope_write_case(
    partials: str, parts: int, heads: int, early: bool, counted: bool = False, hybrid: bool = False,
    placed: bool = False,
) -> Case:  # fmt: skip
    """`hybrid`: heads of 256 with gates, the first quarter rotates, after norms in fp32."""
    kernel = rope._rope_write_kernel
    pointers = {"part_p": partials} | dict.fromkeys(("bias_p", "qw_p", "kw_p", "q_p"), "*bf16") | rope_pointers
    pointers["slots_p"] = "*i32"
    if hybrid:
        pointers |= dict.fromkeys(("qw_p", "kw_p"), "*fp32")
    constexprs = {
        "PARTS": parts, "HEADS": heads, "BLOCK": 128 if hybrid else 64, "PAGE": 64, "PARTIAL": hybrid, "GATED": hybrid,
        "BIAS": not hybrid, "NORM": True, "COUNTED": counted, "PLACED": placed, "EARLY": early, "PDL": True,
    }  # fmt: skip
    return Case(kernel, pointers | ints(kernel), constexprs, 1, ragged=("S", "G", "width"))


merge = attention._merge_kernel
states = dict.fromkeys(("m_p", "l_p", "acc_p"), "*fp32")


def merge_case(counted: bool, paths: int = 0) -> Case:
    pointers = states | {"out_p": "*bf16"} | dict.fromkeys(ROWS, "*i32") | ints(merge)
    constexprs = SHARED | {"MERGE_SPLITS": 16, "COUNTED": counted, "CAUSAL": not paths, "PATHS": paths}
    return Case(
        merge, pointers | {"depths_p": "*i32"}, constexprs, 1, ragged=("S", "G", "GROUP", "TILES", "SPLITS", "paired")
    )


rope_pointers = {"rope_p": "*fp32", "pages_p": "*i32", "cache_p": "*bf16", "eps": "fp32"} | dict.fromkeys(ROWS, "*i32")
CASES = {
    "attention split free": attention_case(whole=False, causal=False),
    "attention whole free": attention_case(whole=True, causal=False),
    "attention of a padded prefill": attention_case(True, True, counted=True),
    "attention of a short padded prefill": attention_case(False, True, counted=True),
    "attention of chains": attention_case(True, True, ragged=True),
    "attention of a few chains": attention_case(False, True, ragged=True),
    "attention of trees": attention_case(True, False, ragged=True),
    "attention of trees, a window": attention_case(True, False, ragged=True, window=2048),
    "attention split, heads of 256": attention_case(whole=False, causal=True, head=256),
    "attention whole, heads of 256": attention_case(whole=True, causal=True, head=256),
    "attention free, heads of 256": attention_case(whole=False, causal=False, head=256),
    "attention of a padded prefill, heads of 256": attention_case(True, True, counted=True, head=256),
    "attention of chains, heads of 256": attention_case(True, True, ragged=True, head=256),
    "attention of a few chains, heads of 256": attention_case(False, True, ragged=True, head=256),
    "attention of trees, heads of 256": attention_case(True, False, ragged=True, head=256),
    "merge": merge_case(counted=False),
    "merge of a tree": merge_case(counted=False, paths=64),
    "merge of a padded prefill": merge_case(counted=True),
    **{
        f"add_rms_norm of {parts} parts": Case(
            norm._add_rms_norm_kernel,
            {
                "x_p": "*bf16", "part_p": "*fp32", "w_p": "*bf16", "sum_p": "*bf16", "h_p": "*bf16", "tap_p": "*bf16",
                "data_p": "*fp8e4nv", "scale_p": "*fp32", "M": "i32", "D": "i32", "eps": "fp32", "stride_tap": "i32",
            },
            {
                "PARTS": parts, "BLOCK": width, "ADD": True, "TAP": True, "QUANTIZE": parts == 9, "GROUP": 128,
                "FP8_MAX": 448.0, "LEAST": 1e-12, "PDL": True,
            },
            8,
            ragged=("M",),
        )
        for parts, width in ((4, 4096), (9, 8192))
    },
    "rope_write in a step": rope_write_case("*fp32", 4, 2, early=True),
    "rope_write in a step of many": rope_write_case("*fp32", 4, 2, early=False),
    "rope_write of trees": rope_write_case("*fp32", 4, 2, early=False, placed=True),
    "rope_write of a hybrid target": rope_write_case("*fp32", 4, 2, early=False, hybrid=True),
    "gates of a hybrid target": Case(
        rope._gate_heads_kernel,
        {"x_p": "*bf16", "part_p": "*fp32", "out_p": "*bf16"} | ints(rope._gate_heads_kernel),
        {"PARTS": 4, "BLOCK": 256, "PDL": True},
        1,
    ),
    "rope_write in a prefill": rope_write_case("*bf16", 1, 8, early=False, counted=True),
    "context_write": Case(
        rope._context_write_kernel,
        {"kv_p": "*bf16", "kw_p": "*bf16", "counts_p": "*i32"} | rope_pointers | ints(rope._context_write_kernel),
        {"HEADS": 8, "BLOCK": 64, "PAGE": 64, "PDL": True},
        1,
        ragged=("S", "G", "LAYERS", "width"),
    ),
    "accept": Case(
        accept._accept_kernel,
        {
            "draft_p": "*i64", "choice_p": "*i64", "active_p": "*i1", "lengths_p": "*i32", "last_p": "*i64",
            "forced_p": "*i32", "counts_p": "*i32", "tokens_p": "*i64", "S": "i32", "stride_draft": "i32",
        },
        {"BLOCK": 16, "FORCED": False, "PDL": True},
        1,
        ragged=("S", "stride_draft"),
    ),
    "mask_logits_": Case(
        mask._mask_kernel,
        {"logits_p": "*bf16", "masks_p": "*i32", "at_p": "*i32", "V": "i32", "WORDS": "i32"},
        {"BLOCK": mask.BLOCK, "PDL": True},
        4,
        ragged=("V", "WORDS"),
    ),
    "sample of an odd vocabulary": sample_case("*bf16", ("logits_p", "V")),
    "sampled drafts": sample_case("*fp32", candidates=16),
}  # fmt: skip
