"""Step times of a target and its drafter on every card, by the card's roofline."""

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_toolkit.roofline import Roofline
from dflash_toolkit.runtime.timing import Times
from dflash_toolkit.runtime.trees.budget import row_buckets

KERNEL_S = 4e-6  # least seconds of a kernel; a layer has some six of them


@dataclass(frozen=True)
class Weights:
    """Sizes of a target or a drafter."""

    parameters: float
    layers: int
    bytes_each: int = 2

    def seconds(self, card: Roofline, rows: int) -> float:
        """Returns the seconds of a pass over `rows` rows: reading the weights or multiplying, if slower."""
        tflops = card.fp8_tflops if self.bytes_each == 1 else 0.0
        read = self.parameters * self.bytes_each / (card.read_tb_s * 1e12)
        multiplied = 2 * self.parameters * rows / ((tflops or card.bf16_tflops) * 1e12)
        return max(read, multiplied) + 6 * self.layers * KERNEL_S


PAIRS = {  # a drafter also reads the target's head
    "0.5B": (Weights(0.5e9, 24), Weights(0.2e9, 5)),
    "4B": (Weights(4.0e9, 36), Weights(0.9e9, 5)),
    "8B": (Weights(7.6e9, 36), Weights(1.7e9, 5)),
    "8B in FP8": (Weights(7.6e9, 36, 1), Weights(1.7e9, 5)),
}


def step_times(card: Roofline, pair: str, batches: Sequence[int], blocks: Sequence[int]) -> Times:
    """Returns the seconds of plain steps, of blocks, and of steps over trees."""
    target, drafter = PAIRS[pair]
    times: Times = {}
    for batch in batches:
        for block in blocks:
            drafted = drafter.seconds(card, batch * block) if block > 1 else 0.0
            times[batch, block] = target.seconds(card, batch * block) + drafted
            for rows in row_buckets(batch) if block > 1 else ():
                times[batch, rows, block] = target.seconds(card, rows) + drafted
    return times
