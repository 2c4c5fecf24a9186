"""The Hopper attention kernel for Qwen3-8B (heads of 128, groups of 4) and Qwen2.5-0.5B (heads of 64, groups of 7)."""

from sm90 import Case
from triton.experimental.gluon import language as gl

from dflash_toolkit.kernels.hopper import attention as attention_hopper


def case(head: int, whole: bool, pairs: bool, causal: bool, window: int = 0, counted: bool = False) -> Case:
    box = [attention_hopper.KEYS.value, head]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
    kinds = dict.fromkeys(("m_p", "l_p", "acc_p"), "*fp32") | {"q_p": "*bf16", "out_p": "*bf16"}
    kinds |= {"cache_d": f"tensordesc<bf16{box},{layout!r}>", "scale": "fp32"}
    kinds |= dict.fromkeys(("lengths_p", "counts_p", "pages_p"), "*i32")
    kinds |= dict.fromkeys(("S", "columns", "stride_pages", "slots", "SPLITS"), "i32")
    constexprs = {
        "G": 8 if head == 128 else 2, "GROUP": 4 if head == 128 else 7, "HEAD": head, "PAGE": 64,
        "SHORT": 128, "SHORT_SPLITS": 16, "LONG": 1024, "WHOLE": whole, "PAIRS": pairs,
        "COUNTED": counted, "CAUSAL": causal, "WINDOW": window,
    }  # fmt: skip
    ragged = ("S", "columns", "stride_pages", "SPLITS")
    return Case(attention_hopper.hopper_attention_kernel, kinds, constexprs, 4, ragged=ragged)


WAYS = [  # each with either width, and with either mask; one pass is causal in the two last cases
    (64, "split", False), (64, "in pairs", True), (64, "whole", False),
    (128, "split", True), (128, "in pairs", False), (128, "in pairs", True), (128, "whole", False),
]  # fmt: skip
CASES = {
    f"heads of {head}, {way}, {'causal' if causal else 'free'}": case(head, way == "whole", way == "in pairs", causal)
    for head, way, causal in WAYS
} | {"window": case(128, True, False, True, 2048), "padded": case(128, True, False, True, counted=True)}
