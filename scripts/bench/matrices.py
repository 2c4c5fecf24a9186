"""Measures the matrix products of a dense layer in the format of a shape and in bf16, by the number of rows.

    python scripts/bench/matrices.py --shape qwen3-8b-awq --rows 1 8 16 64 128 256 512 1024 --output matrices.json

Times are microseconds, the median of 5 graphs. A graph multiplies copies of a matrix that do not fit into the L2 cache
together. `share` is the share of the read bandwidth that reading the stored weights once takes.
"""

import argparse
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
from dflash_toolkit.kernels import gpu
from dflash_toolkit.kernels.formats import DENSE, Weight
from dflash_toolkit.models.device import use_device
from dflash_toolkit.models.spec import AttentionSpec, MlpSpec, ModelSpec
from dflash_toolkit.roofline import roofline_of
from dflash_toolkit.runtime.timing import median_seconds

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.measure import captured, setting
from scripts.shapes import named_shape, randomise

COPIED = 256 << 20  # bytes of all copies of a matrix, at least; an L2 cache has up to 126 MB
Operation = Callable[[Tensor, Weight], Any]


def products(model: ModelSpec) -> dict[str, tuple[int, int, Operation]]:
    """Returns N, K and the operation of every product of the first layer. Raises UserError for other layers."""
    layer, d = model.layers[0], model.hidden_size
    if not isinstance(layer.mixer, AttentionSpec) or not isinstance(layer.ffn, MlpSpec):
        raise UserError("--shape: its first layer is not attention with a dense MLP; try qwen3-8b-awq")
    width = layer.ffn.intermediate_size
    return {
        "qkv": (layer.mixer.qkv_rows, d, gpu.linear_split_k),
        "o": (d, layer.mixer.width, gpu.linear_split_k),
        "gate_up": (2 * width, d, gpu.linear_swiglu),
        "down": (d, width, gpu.linear_split_k),
    }


def copies(form: Any, n: int, k: int, device: torch.device) -> list[Weight]:
    """Returns random matrices of a format."""
    found: list[Weight] = []
    while not found or len(found) * found[0].nbytes < COPIED:
        weight = form.empty(
            n, k, new=lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device=device)
        )
        randomise(form.tensors("weight", weight).items(), device, len(found))
        found.append(weight)
    return found


def microseconds(operation: Operation, x: Tensor, weights: list[Weight], device: torch.device) -> float:
    def run() -> None:
        for weight in weights:
            operation(x, weight)

    return 1e6 * median_seconds(captured(run).replay, device, 5) / len(weights)


def bench(args: argparse.Namespace) -> None:
    device, model = use_device("cuda"), ModelSpec.of_target(named_shape(args.shape))
    torch.manual_seed(0)
    read, form = roofline_of(device).read_tb_s, model.layers[0].ffn.weight
    result: dict[str, Any] = {**setting("bench/matrices.py"), "shape": args.shape, "read_tb_s": read, "rows": []}
    for name, (n, k, operation) in products(model).items():
        stored = {"us": copies(form, n, k, device), "bf16_us": copies(DENSE, n, k, device)}
        roofline = stored["us"][0].nbytes / (read * 1e6)
        for rows in args.rows:
            x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
            row = {key: microseconds(operation, x, weights, device) for key, weights in stored.items()}
            row |= {"share": roofline / row["us"], "roofline_us": roofline}
            result["rows"].append({"matrix": name, "rows": rows, **row})
            print(name, rows, json.dumps({key: round(value, 3) for key, value in row.items()}), flush=True)
        del stored
    if args.output:
        write_json(args.output, result)


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Exit codes: 0 done, 2 a mistake (one line)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b-awq")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 64, 128, 256, 512, 1024])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    with torch.inference_mode():
        return run_command(lambda: bench(args))


if __name__ == "__main__":
    raise SystemExit(main())
