"""Time what a DFlash 2 drafter adds to a step and to training: its kernels beside their definitions in plain torch.

    python scripts/bench/dflash2.py --shape qwen3-8b --rows 8 16 64 128 256 --output dflash2.json

Operations of a step run ten times in a CUDA graph; microseconds a call. The head's top is beside its argmax, which a
drafter without a selector needs; the head comes from memory each time, for it is larger than L2. Of training, forward
and backward of one convolution in milliseconds, beside its definition and the definition compiled.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_toolkit.benchmark import captured, setting
from dflash_toolkit.files import write_json
from dflash_toolkit.kernels import gpu, reference
from dflash_toolkit.kernels.convolve import convolve
from dflash_toolkit.kernels.weight import RowScaledFp8
from dflash_toolkit.runtime.shapes import named_shape
from dflash_toolkit.runtime.timing import median_seconds

TAPS, GROUP, RANK, COUNT = 2, 16, 256, 16  # of public drafters
SPLITS = 8  # of the partial sums that the convolution behind a sublayer adds up
EPS = 1e-6
CALLS, REPEATS = 10, 10
DEVICE = torch.device("cuda")


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def us_of(work: Callable[..., Any], *args: Any) -> float:
    def many() -> None:
        for _ in range(CALLS):
            work(*args)

    return 1e6 * median_seconds(captured(many).replay, DEVICE, REPEATS) / CALLS


def step_times(rows: int, block: int, head: Tensor, fp8_head: RowScaledFp8, books: list[Tensor]) -> dict[str, float]:
    """Of all operations on `rows` rows in blocks of `block`."""
    vocab, d = head.shape
    requests = max(1, rows // block)
    x, base, norm = random(rows, d), random(TAPS, d), random(d)
    sums, own = (
        random(4, rows, d, dtype=torch.float32),
        random(SPLITS, rows, 2 * TAPS * d // GROUP, dtype=torch.float32),
    )
    before, behind = own.chunk(2, dim=2)
    state, unary = random(requests, block, RANK)[:, 1:], random(requests, block, COUNT, dtype=torch.float32)[:, 1:]
    tokens = torch.randint(0, vocab, (requests, block, COUNT + 1), device=DEVICE)
    candidates, anchors = tokens[:, 1:, 1:].contiguous(), tokens[:, 0, 0].contiguous()
    found: dict[str, float] = {"argmax_us": us_of(gpu.linear_argmax, x, head)}
    found |= {"fp8_argmax_us": us_of(gpu.linear_argmax, x, fp8_head)}
    found |= {"fp8_top_us": us_of(gpu.linear_top, x, fp8_head, COUNT)}
    for name, ops in (("", gpu), ("definition_", reference)):
        found[f"{name}top_us"] = us_of(ops.linear_top, x, head, COUNT)
        found[f"{name}conv_us"] = us_of(ops.block_conv, x, before, base, block)
        found[f"{name}conv_add_norm_us"] = us_of(ops.conv_add_rms_norm, x, sums, behind, base, block, norm, EPS)
        found[f"{name}walk_us"] = us_of(ops.walk, state, unary, candidates, *books, anchors)
    found["add_norm_us"] = us_of(gpu.add_rms_norm, x, sums, norm, EPS)
    return found


def training_times(sequences: int, slots: int, block: int, d: int) -> dict[str, float]:
    """Of one convolution over [sequences, slots, D], forward and backward."""
    x = random(sequences, slots, d).requires_grad_()
    dynamic = random(sequences, slots, 2, TAPS, d // GROUP).requires_grad_()
    base = random(TAPS, d, dtype=torch.float32).requires_grad_()
    d_out = random(sequences, slots, d)

    def definition(x: Tensor, dynamic: Tensor, base: Tensor, block: int) -> Tensor:
        rows = x.flatten(0, 1), dynamic.flatten(2).flatten(0, 1)
        return reference.block_conv(*rows, base, block).to(x.dtype).view_as(x)

    ways = {"kernel": convolve, "definition": definition, "compiled": torch.compile(definition)}
    found = {}
    for name, way in ways.items():

        def once(way: Callable[..., Tensor] = way) -> None:
            x.grad = dynamic.grad = base.grad = None
            way(x, dynamic[:, :, 0], base, block).backward(d_out)

        found[f"{name}_ms"] = 1e3 * median_seconds(once, DEVICE, REPEATS)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256], help="of a step, in blocks")
    parser.add_argument("--block", type=int, default=8, help="rows of a block")
    parser.add_argument("--sequences", type=int, default=8, help="of a training step, with 512 blocks of 16 each")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    shape = named_shape(args.shape)
    vocab, d = shape.vocab_size, shape.hidden_size
    head = 0.02 * random(vocab, d)
    fp8_head, books = RowScaledFp8.of(head), [random(vocab, RANK), random(vocab, RANK)]
    found: list[dict[str, float]] = []
    for rows in args.rows:
        row = {"rows": rows} | step_times(rows, args.block, head, fp8_head, books)
        found.append(row)
        print(", ".join(f"{name} {value:.1f}" for name, value in row.items()), flush=True)
    del head, fp8_head, books
    training = training_times(args.sequences, 512 * 16, 16, d)
    print(", ".join(f"{name} {value:.2f}" for name, value in training.items()), flush=True)
    if args.output:
        about = {"shape": args.shape, "block": args.block, "sequences": args.sequences}
        write_json(args.output, {**setting("bench/dflash2.py"), **about, "step": found, "training": training})


if __name__ == "__main__":
    main()
