"""Time the frozen-head loss and what it is made of: the logits' product, the kernel over them, the gradient's product.

    python scripts/bench/loss.py --shape qwen3-8b --rows 7680 --head-rows 256 1024 4096 --output loss.json

Logits exist for `--head-rows` rows at a time. A loss that never wrote them would have to make them a second time for
the gradient, which needs the normaliser of the whole row first: three GEMMs instead of two. `unwritten_ms_at_least`
is what those three take here, with everything else for nothing. Milliseconds of cross-entropy, forward and backward.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_toolkit.benchmark import setting
from dflash_toolkit.files import write_json
from dflash_toolkit.kernels.loss import frozen_head_loss
from dflash_toolkit.kernels.mix import CROSS_ENTROPY, RowTerms
from dflash_toolkit.kernels.triton.row_loss import row_loss_
from dflash_toolkit.runtime.shapes import named_shape
from dflash_toolkit.runtime.timing import median_seconds

REPEATS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--rows", type=int, default=7680, help="supervised slots of a micro step")
    parser.add_argument("--head-rows", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    shape = named_shape(args.shape)
    device = torch.device("cuda")
    hidden = torch.randn(args.rows, shape.hidden_size, device=device, dtype=torch.bfloat16, requires_grad=True)
    head = 0.02 * torch.randn(shape.vocab_size, shape.hidden_size, device=device, dtype=torch.bfloat16)
    labels = torch.randint(0, shape.vocab_size, (args.rows,), device=device)
    d_hidden = torch.empty_like(hidden)

    def ms_of(work: Callable[[], Any]) -> float:
        return 1e3 * median_seconds(work, device, REPEATS)

    found: list[dict[str, float]] = []
    for chunk in args.head_rows:
        parts = [slice(start, min(start + chunk, args.rows)) for start in range(0, args.rows, chunk)]

        def loss(chunk: int = chunk) -> None:
            hidden.grad = None
            frozen_head_loss(hidden, head, labels, chunk).loss.sum().backward()

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        row = {"head_rows": chunk, "loss_ms": ms_of(loss)}
        row["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20

        logits = torch.empty(chunk, shape.vocab_size, device=device, dtype=torch.bfloat16)
        terms = RowTerms.empty(args.rows, False, device)

        def make_logits(parts: list[slice] = parts, logits: Tensor = logits) -> None:
            for rows in parts:
                torch.mm(hidden.detach()[rows], head.T, out=logits[: rows.stop - rows.start])

        def turn(parts: list[slice] = parts, logits: Tensor = logits, terms: RowTerms = terms) -> None:
            for rows in parts:
                row_loss_(logits[: rows.stop - rows.start], labels[rows], terms[rows], CROSS_ENTROPY, True)

        def gradient(parts: list[slice] = parts, logits: Tensor = logits) -> None:
            for rows in parts:
                torch.mm(logits[: rows.stop - rows.start], head, out=d_hidden[rows])

        row |= {"logits_ms": ms_of(make_logits), "kernel_ms": ms_of(turn), "gradient_ms": ms_of(gradient)}
        row["unwritten_ms_at_least"] = 2 * row["logits_ms"] + row["gradient_ms"]
        found.append(row)
        print(", ".join(f"{name} {value:.2f}" for name, value in row.items()), flush=True)
    if args.output:
        about = {"shape": args.shape, "rows": args.rows, "hidden": shape.hidden_size, "vocab": shape.vocab_size}
        write_json(args.output, {**setting("bench/loss.py"), **about, "found": found})


if __name__ == "__main__":
    main()
