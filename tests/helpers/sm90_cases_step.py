"""The other kernels of a Qwen3-8B step, as they run on an H200."""

from typing import Any

from sm90 import Case, case

from dflash_toolkit.kernels.triton import accept, attention, mask, norm, rope, sample

ATTENTION: dict[str, Any] = {"HEAD": 128, "ROWS": 64, "KEYS": 64, "SHORT": 128, "SHORT_SPLITS": 16, "LONG": 1024}


def attention_case(
    whole: bool, causal: bool, counted: bool = False, ragged: bool = False, window: int = 0, head: int = 128
) -> Case:
    how = {"WHOLE": whole, "RAGGED": ragged, "TREE": ragged and not causal, "COUNTED": counted, "CAUSAL": causal}
    constexprs = ATTENTION | {"HEAD": head, "WINDOW": window} | how
    return case(attention._attention_kernel, attention.warps_for(head), odd="G width", **constexprs)


def merge_case(counted: bool, paths: int = 0) -> Case:
    how = {"MERGE_SPLITS": 16, "COUNTED": counted, "CAUSAL": not paths, "PATHS": paths}
    return case(attention._merge_kernel, 1, odd="G", **(ATTENTION | how))


def norm_case(parts: int, width: int) -> Case:
    how = {"ADD": True, "TAP": True, "QUANTIZE": parts == 9}
    return case(norm._add_rms_norm_kernel, 8, PARTS=parts, BLOCK=width, GROUP=128, **how)


def sample_case(logits: str, odd: str = "", candidates: int = 0) -> Case:
    sizes = {name: getattr(sample, name) for name in ("BLOCK", "TILE", "PIVOTS", "GROUPS")}
    without: dict[str, Any] = {} if candidates else dict.fromkeys(("draft_p", "acceptance_p", "drafted_p", "q_p"))
    kinds = {"logits_p": logits, "ids_p": "*i32", "out_p": "*i64", "acceptance_p": "*fp64", "q_p": "*fp32"}
    sizes |= without | {"ROOM": sample.CANDIDATES, "TILES": 64, "C_BLOCK": candidates}
    return case(sample._sample_kernel, sample.WARPS, odd=odd, kinds=kinds, **sizes)


def rope_write_case(
    parts: int, heads: int, early: bool, counted: bool = False, hybrid: bool = False, placed: bool = False
) -> Case:
    """`hybrid`: heads of 256 with gates, the first quarter rotates, after norms in fp32."""
    kinds = {"part_p": "*fp32" if parts > 1 else "*bf16"} | dict.fromkeys(
        ("qw_p", "kw_p"), "*fp32" if hybrid else "*bf16"
    )
    return case(
        rope._rope_write_kernel, 1, odd="G width", kinds=kinds, PARTS=parts, HEADS=heads, BLOCK=128 if hybrid else 64,
        PARTIAL=hybrid, GATED=hybrid, BIAS=not hybrid, NORM=True, COUNTED=counted, PLACED=placed, EARLY=early,
    )  # fmt: skip


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
    "add_rms_norm of 4 parts": norm_case(4, 4096),
    "add_rms_norm of 9 parts": norm_case(9, 8192),
    "rope_write in a step": rope_write_case(4, 2, early=True),
    "rope_write in a step of many": rope_write_case(4, 2, early=False),
    "rope_write of trees": rope_write_case(4, 2, early=False, placed=True),
    "rope_write of a hybrid target": rope_write_case(4, 2, early=False, hybrid=True),
    "rope_write in a prefill": rope_write_case(1, 8, early=False, counted=True),
    "gates of a hybrid target": case(rope._gate_heads_kernel, 1, PARTS=4, BLOCK=256),
    "context_write": case(rope._context_write_kernel, 1, odd="G width", HEADS=8, BLOCK=64),
    "accept": case(accept._accept_kernel, 1, BLOCK=16, FORCED=False),
    "mask_logits_": case(mask._mask_kernel, odd="V", kinds={"at_p": "*i32"}, BLOCK=mask.BLOCK),
    "sample of an odd vocabulary": sample_case("*bf16", "logits_p V"),
    "sampled drafts": sample_case("*fp32", candidates=16),
}
