"""Every kernel compiles for Hopper without a GPU, and keeps its values in registers."""

import json
import os
import re
import subprocess
import sys

import pytest
from paths import ROOT

pytest.importorskip("triton")

from dflash_toolkit.kernels.triton.attention import CUTS, cut_for, shared_bytes

KERNEL = re.compile(r"^def (\w+_kernel)\(", re.MULTILINE)
# those that touch memory before they wait: a norm's weight, and what is older than a pass
BEFORE_THE_WAIT = {
    "_add_rms_norm_kernel", "_conv_add_rms_norm_kernel", "_delta_inputs_kernel", "_delta_rule_kernel",
    "_gated_rms_norm_kernel", "_merge_kernel", "_rope_write_kernel", "hopper_attention_kernel", "hopper_prefix_kernel",
}  # fmt: skip


@pytest.mark.compiles
@pytest.mark.timeout(600)
def test_kernels_compile_for_sm_90_without_spills() -> None:
    # the interpreter, which the other tests run in, replaces the compiler for a whole process
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "tests/helpers/sm90.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    sources = (ROOT / "dflash_toolkit/kernels").rglob("*.py")
    kernels = {name for path in sources for name in KERNEL.findall(path.read_text())}
    assert {report["kernel"] for report in found.values()} == kernels, "every kernel has a case"
    assert {name: report["spills"] for name, report in found.items() if report["spills"]} == {}
    assert [name for name, report in found.items() if report["serialized"]] == []
    # Triton 3.6 fails on the bodies of some of them; a constexpr in the condition skips them
    assert [name for name, report in found.items() if report["never"]] == []
    assert max(report["shared"] for report in found.values()) <= 227 * 1024
    # the end of a launch is that of all before it only if it waits (launch.py), whatever it does before
    assert [name for name, report in found.items() if report["overlaps"] and not report["waits"]] == []
    assert {report["kernel"] for report in found.values() if report["overlaps"] and report["before"]} == BEFORE_THE_WAIT
    # data older than a pass is read before the wait (hopper/attention.py); this is safe if a launch between two passes
    # starts the next one only after its own wait
    starts: dict[str, set[str]] = {"early": set(), "late": set()}
    for report in found.values():
        if report["starts_next"]:
            starts[report["starts_next"]].add(report["kernel"])
    attentions = {"_attention_kernel", "_merge_kernel", "hopper_attention_kernel", "hopper_prefix_kernel"}
    assert starts["early"] == attentions | {"_rope_write_kernel"}
    after = {"layer_kernel", "conv_layer_kernel", "_linear_kernel", "_swiglu_kernel", "_add_rms_norm_kernel"}
    assert after <= starts["late"] - starts["early"]
    rope = {name for name, report in found.items() if report["starts_next"] == "early" and "rope" in name}
    assert rope == {"step: rope_write in a step"}
    attention = {name: report["shared"] for name, report in found.items() if report["kernel"] == "_attention_kernel"}
    widths = {name: 256 if "heads of 256" in name else 128 for name in attention}
    assert [name for name, width in widths.items() if attention[name] > shared_bytes(width, 2, *CUTS[0])] == []


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
