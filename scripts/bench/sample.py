"""Time how a token is drawn from logits [M, V]: the definition, which sorts, and the kernel, which does not.

    python scripts/bench/sample.py --rows 1 16 128 256 --output sample.json
    python scripts/bench/sample.py --rows 16 128 --drafted 16 --output drafted.json

Both run in a CUDA graph, as in a step. The logits are normal with a standard deviation of their own for every row,
from flat to peaked; `candidates` says how many tokens stay in the median row. With `--drafted` every row judges a draft
that was sampled from so many of its best tokens.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dflash_toolkit.benchmark import setting
from dflash_toolkit.files import write_json
from dflash_toolkit.kernels import gpu, reference
from dflash_toolkit.kernels.reference import filtered_probabilities
from dflash_toolkit.runtime.timing import median_seconds

FILTERS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.95": {"top_p": 0.95},
    "all": {"top_k": 50, "top_p": 0.95, "min_p": 0.01},
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def make_logits(rows: int, vocab: int, dtype: torch.dtype, least: float, greatest: float) -> Tensor:
    """Logits [rows, vocab] whose rows have standard deviations from `least` to `greatest`."""
    dice = torch.Generator("cuda").manual_seed(0)
    spread = torch.linspace(least, greatest, rows, device="cuda")[:, None]
    return (spread * torch.randn(rows, vocab, device="cuda", generator=dice)).to(dtype)


def call(
    ops: ModuleType, logits: Tensor, temperature: float, filters: dict[str, Any], drafted: int
) -> Callable[[], Tensor]:
    """Sampling with the same parameters in every row."""
    rows, vocab = logits.shape
    dice = torch.Generator("cuda").manual_seed(1)

    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    given = (
        column(temperature),
        column(filters.get("top_p", 1.0)),
        column(filters.get("top_k", vocab), torch.int64),
        column(filters.get("min_p", 0.0)),
        torch.rand(rows, dtype=torch.float64, device="cuda", generator=dice),
    )
    if not drafted:
        return lambda: ops.sample(logits, *given)
    best, candidates = logits.float().topk(drafted)
    q = (best / temperature).softmax(-1)
    draft = candidates.gather(1, q.multinomial(1, generator=dice))[:, 0]
    acceptance = torch.rand(rows, dtype=torch.float64, device="cuda", generator=dice)
    return lambda: ops.rejection_sample(logits, *given, draft, candidates, q, acceptance)


def microseconds(once: Callable[[], Tensor], repeats: int) -> float:
    """The median of five runs of `repeats` calls in one CUDA graph."""
    once()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            once()
    return 1e6 * median_seconds(graph.replay, torch.device("cuda"), 5) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128, 256])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--spread", type=float, nargs=2, default=[2.0, 4.0], help="of the logits, least and greatest")
    parser.add_argument(
        "--drafted", type=int, default=0, metavar="C", help="tokens a draft is sampled from; 0: none is"
    )
    parser.add_argument("--repeats", type=int, default=10, help="calls in a graph")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {
        **setting("bench/sample.py"),
        "drafted": args.drafted,
        "rows": [],
    }
    print(f"{'rows':>5} {'filters':<12} {'candidates':>10} {'definition':>13} {'kernel':>11} {'ratio':>7} {'equal':>7}")
    for rows in args.rows:
        logits = make_logits(rows, args.vocab, DTYPES[args.dtype], *args.spread)
        for name, filters in FILTERS.items():
            middle = logits[rows // 2]
            kept = filtered_probabilities(middle, temperature=args.temperature, **filters).count_nonzero().item()
            calls = [call(ops, logits, args.temperature, filters, args.drafted) for ops in (reference, gpu)]
            equal = (calls[0]() == calls[1]()).float().mean().item()
            definition_us, kernel_us = (microseconds(once, args.repeats) for once in calls)
            row = {"m": rows, "vocab": args.vocab, "filters": name, "candidates": kept, "equal": equal}
            result["rows"].append(row | {"definition_us": definition_us, "kernel_us": kernel_us})
            print(
                f"{rows:>5} {name:<12} {kept:>10} {definition_us:>10.0f} us {kernel_us:>8.0f} us "
                f"{definition_us / kernel_us:>7.1f} {equal:>7.3f}",
                flush=True,
            )
    if args.output:
        write_json(args.output, result)


if __name__ == "__main__":
    main()
