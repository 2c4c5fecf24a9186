"""The losses of the rows of a head with Qwen3's vocabulary."""

from typing import Any

from sm90 import Case, case

from dflash_toolkit.kernels.triton import row_loss, row_top


def loss_case(distribution: bool, tempered: bool) -> Case:
    how: dict[str, Any] = {"GRADIENT": True, "DISTRIBUTION": distribution, "TEMPERED": tempered}
    block = row_loss.BLOCK_TWO if distribution else row_loss.BLOCK
    return case(row_loss._row_loss_kernel, 8, odd="V", BLOCK=block, **how)


CASES = {
    "cross-entropy": loss_case(False, False),
    "distributions": loss_case(True, False),
    "distributions at a temperature": loss_case(True, True),
    "largest": case(row_top._row_top_kernel, odd="V", COUNT=16, C_BLOCK=16, LANES=row_top.LANES, PIECES=128),
}
