"""The kernels compile for GPUs that this machine lacks. On sm_90 they keep their values in registers."""

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from paths import ROOT

from dflash_toolkit.kernels.features import KNOWN
from dflash_toolkit.kernels.triton.attention import cut_for, shared_bytes

KERNEL = re.compile(r"^def (\w+_kernel)\(", re.MULTILINE)
LONG = bool(os.environ.get("DFLASH_LONG"))  # compile all specialisations, not only the largest, and for more GPUs
TARGETS = ("sm_86", "sm_89", "sm_90", "sm_100", "sm_120", *("sm_80", "sm_103", "sm_121") * LONG)
Reports = dict[str, dict[str, Any]]  # by name, see tests/helpers/compile_kernels.py
# the most bytes per thread that a kernel loads from and stores to spilled registers, on GPUs other than sm_90
SPILLS = {
    "_argmax_kernel": 256,  # 256 rows in FP8 on sm_100
    "_attention_kernel": 448,  # chains with heads of 256 on sm_120
    "_block_linear_kernel": 64,  # sm_120
    "_cut_kernel": 64,  # sm_120
    "_experts_kernel": 64,  # sm_120
    "_linear_kernel": 64,  # sm_100 and sm_120
    "_many_rows_kernel": 64,  # sm_120
    "_prefix_kernel": 352,  # a cache in FP8 on sm_80
    "_sample_kernel": 256,  # an odd vocabulary on sm_100 and sm_120
    "_tail_kernel": 160,  # heads of 256 on sm_80
    "_top_kernel": 320,  # 128 rows in FP8 on sm_100
}
# those that touch memory before they wait: a norm's weight, and what is older than a pass
BEFORE_THE_WAIT = {
    "_add_rms_norm_kernel", "_conv_add_rms_norm_kernel", "_delta_inputs_kernel", "_delta_rule_kernel",
    "_gated_rms_norm_kernel", "_inject_kernel", "_merge_kernel", "_messages_kernel",
    "_norm_queries_keys_kernel", "_rope_write_kernel", "_tree_rule_kernel", "hopper_attention_kernel",
    "hopper_prefix_kernel",
}  # fmt: skip
# the only ones that start the next kernel before they wait
EARLY = {
    "_attention_kernel", "_merge_kernel", "_rope_write_kernel", "hopper_attention_kernel", "hopper_prefix_kernel",
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[str, Reports]:
    """The reports of the targets that are tested."""
    # the interpreter, which the other tests run in, replaces the compiler for a whole process
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    targets = [target for target in TARGETS if any(call and call.params.get("target") == target for call in calls)]
    command = [sys.executable, str(ROOT / "tests/helpers/compile_kernels.py"), *targets, *["--all"] * LONG]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.compiles
@pytest.mark.timeout(7200 if LONG else 1800)  # with other work on the machine
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_and_fit(target: str, compiled: dict[str, Reports]) -> None:
    found, card = compiled[target], KNOWN[target]
    kernels = set[str]()
    for folder in ("triton", "hopper") if card.hopper else ("triton",):
        for path in (ROOT / "dflash_toolkit/kernels" / folder).glob("*.py"):
            kernels |= set(KERNEL.findall(path.read_text()))
    assert {report["kernel"] for report in found.values()} == kernels, "a pass launches every kernel"
    bounds = {} if target == "sm_90" else SPILLS
    spills = {name: report["spills"] for name, report in found.items()}
    assert {name: n for name, n in spills.items() if n > bounds.get(found[name]["kernel"], 0)} == {}
    assert [name for name, report in found.items() if report["serialized"]] == []
    # Triton 3.6 fails on the bodies of some of them; a constexpr in the condition skips them
    assert [name for name, report in found.items() if report["never"]] == []
    shared = {name: report["shared"] for name, report in found.items()}
    assert {name: n for name, n in shared.items() if n > card.shared_memory} == {}
    for name, report in found.items():
        if report["kernel"] == "_attention_kernel":
            cut = report["arguments"]["HEAD"], 2, report["arguments"]["KEYS"], report["stages"]
            assert report["shared"] <= shared_bytes(*cut), name
    _check_dependent_launches(found, card.dependent_launches, card.hopper)


def _check_dependent_launches(found: Reports, supported: bool, hopper: bool) -> None:
    overlapping = {name: report for name, report in found.items() if report["overlaps"]}
    if not supported:
        assert not [name for name, report in found.items() if report["waits"] or report["overlaps"]]
        return
    # the end of a launch is that of all before it only if it waits (launch.py), whatever it does before
    assert [name for name, report in overlapping.items() if not report["waits"]] == []
    before = {report["kernel"] for report in overlapping.values() if report["before"]}
    # data older than a pass is read before the wait (hopper/attention.py); this is safe if a launch between two passes
    # starts the next one only after its own wait
    starts: dict[str, set[str]] = {"early": set(), "late": set()}
    for report in found.values():
        if report["starts_next"]:
            starts[report["starts_next"]].add(report["kernel"])
    early = {name for name, report in found.items() if report["starts_next"] == "early"}
    rope = [name for name, report in found.items() if report["arguments"].get("EARLY") is False]
    assert not early & set(rope)
    if not hopper:  # only the largest of some kernels have compiled
        assert before <= BEFORE_THE_WAIT and starts["early"] <= EARLY
        return
    assert before == BEFORE_THE_WAIT and starts["early"] == EARLY
    after = {"layer_kernel", "conv_layer_kernel", "_linear_kernel", "_swiglu_kernel", "_add_rms_norm_kernel"}
    assert after <= starts["late"] - starts["early"]


# (head width, bytes per number, keys, stages): shared memory of the kernel in Triton 3.7, the larger of causal and not
# causal; stored because fp32 and wide heads take a minute to compile
COMPILED = {
    (64, 4, 64, 3): 98304, (128, 4, 64, 3): 180480, (128, 4, 64, 2): 114944, (256, 4, 64, 2): 213248,
    (256, 4, 32, 2): 139520, (64, 2, 64, 3): 57344, (128, 2, 64, 3): 114688, (256, 2, 64, 3): 229376,
    (256, 2, 64, 2): 163840, (256, 2, 32, 2): 98304, (512, 2, 16, 1): 98304, (256, 4, 16, 2): 102656,
    (256, 4, 16, 1): 98304, (512, 4, 16, 2): 200960,
}  # fmt: skip
CUTS_OF = {  # itemsize, head width: keys and stages with the shared memory of an RTX 4090, of an A100 and of an H200
    (2, 64): ((64, 2), (64, 3), (64, 3)), (2, 128): ((32, 2), (64, 2), (64, 3)), (4, 64): ((32, 2), (64, 2), (64, 3)),
    (4, 128): ((32, 2), (32, 2), (64, 3)), (2, 256): ((32, 2), (64, 2), (64, 3)), (4, 256): ((16, 1), (32, 2), (64, 2)),
    (2, 512): ((16, 1), (16, 2), (32, 2)),
}  # fmt: skip
CARDS = RTX_4090, A100, H200 = 101376, 166912, 232448


def test_attention_is_cut_so_that_it_fits() -> None:
    for cut, compiled in COMPILED.items():
        assert compiled <= shared_bytes(*cut) <= compiled + 1024
    for (itemsize, width), cuts in CUTS_OF.items():
        assert tuple(cut_for(width, itemsize, shared) for shared in CARDS) == cuts
        for shared, cut in zip(CARDS, cuts, strict=True):
            assert shared_bytes(width, itemsize, *cut) <= shared
    with pytest.raises(ValueError, match=r"193 KiB .* 163"):
        cut_for(512, 4, A100)
