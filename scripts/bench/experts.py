"""Measures quantized experts of one layer: the kernels that gather rows, and those that stream weights in FP8 blocks.

    python scripts/bench/experts.py --shape qwen3.6-35b-a3b-fp8 --rows 8 64 256 512 1024 --output experts.json

Times are microseconds of all launches of a layer's experts, the median of 5 graphs of ten. `share` is the share of the
read bandwidth that reading the weights of the chosen experts once takes. Rows choose their experts independently
(`--skew 0`), or a few experts are popular and rows of a block of 8 are similar: their logits have terms of the expert
and of the block, normal with this standard deviation and twice it, next to each row's own term with 2.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_toolkit.command_line import run_command
from dflash_toolkit.config import UserError
from dflash_toolkit.files import write_json
from dflash_toolkit.kernels import reference
from dflash_toolkit.kernels.clamped import ClampedExperts
from dflash_toolkit.kernels.formats import DENSE, MXFP4, BlockScaledFp8, Format, Int4, QuantizedRows, Weight, parts
from dflash_toolkit.kernels.hopper.experts import experts_fit, launch_experts
from dflash_toolkit.kernels.triton import experts as gathered
from dflash_toolkit.kernels.triton.fp8_blocks import quantize_groups
from dflash_toolkit.models.device import use_device
from dflash_toolkit.models.spec import ModelSpec, MoeSpec
from dflash_toolkit.roofline import roofline_of
from dflash_toolkit.runtime.timing import median_seconds

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.measure import captured, setting
from scripts.shapes import named_shape, randomise

TIMES = 10  # in a graph
OWN = 2.0  # standard deviation of a row's own part of its logits
BLOCK = 8  # similar rows


def routing(spec: MoeSpec, rows: int, skew: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns weights and experts [rows, top] of random logits."""
    count = spec.num_experts
    logits = OWN * torch.randn(rows, count, device=device) + skew * torch.randn(count, device=device)
    shared = torch.randn(-(-rows // BLOCK), count, device=device).repeat_interleave(BLOCK, 0)[:rows]
    logits += 2 * skew * shared
    shared = torch.zeros(rows, 1 if spec.shared else 0, device=device)
    every = torch.cat([logits, shared], dim=1)[None]
    return reference.top_experts(every, torch.bfloat16, spec.top_k, normalized=True, shared=spec.shared)


def matrices(form: Format, count: int, n: int, k: int, device: torch.device) -> Weight:
    """Returns random matrices [count, N, K]."""
    if form == MXFP4 or isinstance(form, Int4):
        weight = form.empty(count, n, k, new=lambda *shape, dtype: torch.empty(shape, dtype=dtype, device=device))
        randomise(form.tensors("weight", weight).items(), device, 0)
        return weight
    each = [BlockScaledFp8.of(torch.randn(n, k, device=device)) for _ in range(count)]
    return BlockScaledFp8(torch.stack([w.data for w in each]), torch.stack([w.scale for w in each]) / k**0.5)


def microseconds(work: Callable[[], Any], device: torch.device) -> float:
    def several() -> None:
        for _ in range(TIMES):
            work()

    return 1e6 * median_seconds(captured(several).replay, device, 5) / TIMES


def bench(args: argparse.Namespace) -> None:
    device = use_device("cuda")
    torch.manual_seed(0)
    model = ModelSpec.of_target(named_shape(args.shape))
    spec = next((layer.routed for layer in model.layers if layer.routed), None)
    if spec is None or spec.weight == DENSE:
        raise UserError(f"--shape {args.shape} has no quantized experts; try qwen3.6-35b-a3b-fp8")
    count, d, width = spec.num_experts + spec.shared, model.hidden_size, spec.intermediate_size
    gate_up, down = (matrices(spec.weight, count, *shape, device) for shape in ((2 * width, d), (d, width)))
    biases = (torch.zeros(count, n, device=device, dtype=torch.bfloat16) for n in (2 * width, d))
    clamped = ClampedExperts(*biases, *spec.clamp) if spec.clamp else None
    read = roofline_of(device).read_tb_s
    result: dict[str, Any] = {**setting("bench/experts.py"), "shape": args.shape, "read_tb_s": read, "rows": []}
    for skew in args.skew:
        for rows in args.rows:
            x = torch.randn(rows, d, device=device, dtype=torch.bfloat16)
            operand = QuantizedRows(x, *quantize_groups(x)) if spec.weight.groups_rows else x
            chosen = routing(spec, rows, skew, device)
            work = operand, gate_up, down, *chosen
            ways: dict[str, Callable[..., Tensor]] = {
                "gathered": functools.partial(gathered.experts_mlp, clamped=clamped)
            }
            if experts_fit(operand, gate_up, down):
                ways["streamed"] = launch_experts
            touched = len(chosen[1].unique())
            weights = sum(part.nbytes for w in (gate_up, down) for part in parts(w) if part is not None)
            roofline = weights * touched / count / (read * 1e6)
            row = {"rows": rows, "skew": skew, "experts": touched, "roofline_us": roofline}
            for name, way in ways.items():
                row[f"{name}_us"] = us = microseconds(lambda way=way, work=work: way(*work), device)
                row[f"{name}_share"] = roofline / us
            result["rows"].append(row)
            print(json.dumps({key: round(value, 3) for key, value in row.items()}), flush=True)
    if args.output:
        write_json(args.output, result)


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Exit codes: 0 done, 2 a mistake (one line)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.6-35b-a3b-fp8")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 128, 256, 512, 1024])
    parser.add_argument("--skew", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    with torch.inference_mode():
        return run_command(lambda: bench(args))


if __name__ == "__main__":
    raise SystemExit(main())
