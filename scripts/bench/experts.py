"""Time the experts of a layer: both GEMMs, and every way to cut them into tiles.

    python scripts/bench/experts.py --shape qwen3.6-35b-a3b-fp8 --rows 1 8 32 64 256 --sweep --output experts.json

Rows choose experts as independent draws would. The experts of a few layers take turns in one CUDA graph, so that
weights come from memory and not from L2. Microseconds a layer, and TB/s of the weights that the rows have chosen.
With `--sweep` each GEMM is also cut in all other ways, the rows of an expert gathered or not; the best ones are shown.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_toolkit.benchmark import captured, setting
from dflash_toolkit.config import UserError, run_command
from dflash_toolkit.files import write_json
from dflash_toolkit.kernels.launch import MAX_ROWS, padded
from dflash_toolkit.kernels.triton import experts
from dflash_toolkit.kernels.triton.tile import SHARED_BYTES, Tile
from dflash_toolkit.kernels.weight import BLOCK, BlockScaledFp8, Stacked, cast_fp8, parts
from dflash_toolkit.models.spec import ModelSpec, MoeSpec
from dflash_toolkit.runtime.shapes import named_shape
from dflash_toolkit.runtime.timing import median_seconds

REPEATS, SHOWN, COMPILERS = 20, 3, 8
UNGATHERED = 64  # rows, up to which a sweep tries to gather none
TILES = tuple(  # weight rows, warps, stages
    (rows, warps, stages) for rows, warps in ((64, 4), (64, 8), (128, 4), (128, 8)) for stages in (3, 4, 6, 8)
)


@dataclass(frozen=True)
class Layer:
    """The experts of one, and what its rows are multiplied with."""

    gate_up: Stacked
    down: Stacked


def layer_of(spec: MoeSpec, hidden: int, fp8: bool, device: torch.device) -> Layer:
    """Random weights."""

    def matrices(n: int, k: int) -> Stacked:
        values = torch.randn(spec.experts, n, k, device=device, dtype=torch.bfloat16)
        if not fp8:
            return values.mul_(k**-0.5)
        scale = torch.full((spec.experts, n // BLOCK, k // BLOCK), k**-0.5, device=device)
        return BlockScaledFp8(cast_fp8(values), scale)

    return Layer(matrices(2 * spec.intermediate_size, hidden), matrices(hidden, spec.intermediate_size))


def routing(spec: MoeSpec, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Weights and experts [rows, top]: different ones for every row, and the one that all share."""
    dice = torch.Generator().manual_seed(rows)
    chosen = torch.rand(rows, spec.num_experts, generator=dice).topk(spec.top_k).indices
    if spec.shared:
        chosen = torch.cat([chosen, torch.full((rows, 1), spec.num_experts)], dim=1)
    return torch.full(chosen.shape, 1 / spec.top_k, device=device), chosen.int().to(device)


@dataclass(frozen=True)
class Gemm:
    """One of the two, of some rows."""

    name: str  # of a `Layer`
    x: Tensor
    out: Tensor
    routing: tuple[Tensor, Tensor]
    groups: tuple[Tensor, Tensor]

    def __call__(self, layer: Layer, gathered: bool, tile: Tile, taken: int) -> object:
        """Of a layer, its experts' rows gathered or not, so many at a time."""
        groups, cut = self.groups if gathered else None, (tile, taken)
        matrices, swiglu = getattr(layer, self.name), self.name == "gate_up"
        return experts.multiply(self.x, matrices, *self.routing, groups, self.out, cut, swiglu=swiglu)

    def bytes(self, layer: Layer) -> int:
        """Of the matrices that the rows have chosen."""
        stored = [part for part in parts(getattr(layer, self.name)) if part is not None]
        return sum(part.nbytes for part in stored) // len(stored[0]) * len(self.routing[1].unique())


def cuts(rows: int) -> Iterator[tuple[bool, Tile, int]]:
    """Whether rows are gathered, the tile, and rows at a time."""
    ways = [(True, taken) for taken in (16, 32, 64)] if rows > 16 else []
    ways += [(False, padded(rows))] if rows <= UNGATHERED else []
    for (n, warps, stages), (gathered, taken) in itertools.product(TILES, ways):
        if stages * (n + taken) * BLOCK <= SHARED_BYTES:
            yield gathered, Tile(n, BLOCK, stages, warps), taken


def seconds(run: Callable[[Layer], object], layers: Sequence[Layer]) -> float:
    """Of one layer."""

    def every() -> None:
        for layer in layers:
            run(layer)

    return median_seconds(captured(every).replay, torch.device("cuda"), REPEATS) / len(layers)


def measure(spec: MoeSpec, layers: Sequence[Layer], rows: int, sweep: bool) -> dict[str, Any]:
    """Times of a layer for so many rows."""
    hidden, device = parts(layers[0].down)[0].shape[1], parts(layers[0].down)[0].device
    x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
    weights, chosen = routing(spec, rows, device)
    count, top = spec.experts, chosen.shape[1]
    groups = experts.group_rows(chosen, count)
    active = torch.randn(rows * top, spec.intermediate_size, device=device, dtype=x.dtype)
    wide = torch.float32 if rows <= MAX_ROWS else x.dtype
    gemms = (
        Gemm("gate_up", x, torch.empty_like(active), (weights, chosen), groups),
        Gemm("down", active, x.new_empty(top, rows, hidden, dtype=wide), (weights, chosen), groups),
    )

    def whole(layer: Layer) -> object:
        return experts.experts_mlp(x, layer.gate_up, layer.down, weights, chosen)

    def told(took: float, *read: Gemm) -> dict[str, float]:
        tb_s = sum(gemm.bytes(layers[0]) for gemm in read) / took / 1e12
        return {"us": round(1e6 * took, 2), "tb_s": round(tb_s, 3)}

    found: dict[str, Any] = {
        "rows": rows,
        "experts_asked": len(chosen.unique()),
        "both": told(seconds(whole, layers), *gemms),
        "group": told(seconds(lambda _: experts.group_rows(chosen, count), layers)),
    }
    for gemm in gemms:
        fp8 = isinstance(layers[0].down, BlockScaledFp8)
        now = experts.gathers(rows, fp8), *experts.experts_tile(rows, top, count, gemm.x.shape[1], fp8=fp8)
        found[gemm.name] = told(seconds(partial(ran, gemm, now), layers), gemm)
        ways = [way for way in cuts(rows) if way != now] if sweep else []
        with ThreadPoolExecutor(COMPILERS) as pool:  # compiling takes longer than all else
            list(pool.map(partial(ran, gemm, layer=layers[0]), ways))
        cut = [describe(way) | told(seconds(partial(ran, gemm, way), layers), gemm) for way in ways]
        found[f"{gemm.name}_cuts"] = sorted(cut, key=lambda each: each["us"])
    return found


def ran(gemm: Gemm, way: tuple[bool, Tile, int], layer: Layer) -> object:
    return gemm(layer, *way)


def describe(way: tuple[bool, Tile, int]) -> dict[str, Any]:
    gathered, tile, taken = way
    return {"gathered": gathered, "tile": [tile.block_n, tile.warps, tile.stages], "taken": taken}


def bench(args: argparse.Namespace) -> None:
    config = named_shape(args.shape)
    spec = ModelSpec.of_target(config)
    ffn = next((layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoeSpec)), None)
    if ffn is None:
        raise UserError(f"--shape {args.shape} has no experts; take qwen3.6-35b-a3b-fp8 or qwen3-30b-a3b")
    if not torch.cuda.is_available():
        raise UserError("the experts are timed on a CUDA device, and there is none")
    device, fp8, found = torch.device("cuda"), args.shape.endswith("-fp8"), list[dict[str, Any]]()
    layers = [layer_of(ffn, spec.hidden_size, fp8, device) for _ in range(args.layers)]
    for rows in args.rows:
        row = measure(ffn, layers, rows, args.sweep)
        found.append(row)
        print(", ".join(f"{key} {value}" for key, value in row.items() if not isinstance(value, list)), flush=True)
        for name in ("gate_up", "down"):
            for each in itertools.islice(row.get(f"{name}_cuts", ()), SHOWN):
                print(f"    {name}: {each}", flush=True)
        if args.output:
            write_json(args.output, setting("bench/experts.py") | {"shape": args.shape, "rows": found})


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Exit codes: 0 done, 2 a mistake (one line)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.6-35b-a3b-fp8")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 256])
    parser.add_argument("--layers", type=int, default=4, help="whose experts take turns")
    parser.add_argument("--sweep", action="store_true", help="also cut the GEMMs in all other ways")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    return run_command(lambda: bench(args))


if __name__ == "__main__":
    raise SystemExit(main())
