"""Measures the gated delta rule of one layer, for prompts and for decoding steps.

    python scripts/bench/delta_nets.py --output delta_nets.json

Prompts: `chunk_rule` next to flash-linear-attention, if it is installed, on the same prepared inputs. `error` is the
relative error of the outputs and states of 200 rows against float64. Steps: the rule of a block of 8, which replays
four rows of the last one; `bytes` are those of the states, each read and written once, and `of a copy` is the share of
the speed of `Tensor.copy_` on as many bytes. Times are microseconds on the device, the median of 20 graphs.
"""

import argparse
import importlib
import itertools
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_toolkit.files import write_json
from dflash_toolkit.kernels import fla
from dflash_toolkit.kernels.delta import DeltaMemory
from dflash_toolkit.kernels.triton import delta, delta_chunk
from dflash_toolkit.models.spec import GatedDeltaNetSpec, ModelSpec
from dflash_toolkit.runtime.timing import median_seconds

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.measure import setting
from scripts.shapes import named_shape

SHAPES = ("qwen3.8-27b", "qwen3.6-35b-a3b")
PROMPTS = ((1, 2048), (1, 8192), (4, 512), (4, 2048), (16, 512))  # prompts, tokens of each
BATCHES = (1, 8, 32, 128)
BLOCK, STAY = 8, 4
STATES = 400 * 2**20  # bytes of states that a graph goes over, more than any cache holds
REPEATS = 20


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def integers(*values: int) -> Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def microseconds(work: Callable[[], object], times: int) -> float:
    work()  # compiles and tunes
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            work()
    return 1e6 * median_seconds(graph.replay, torch.device("cuda"), REPEATS) / times


def inputs(net: GatedDeltaNetSpec, batch: int, rows: int) -> tuple[Tensor, ...]:
    """Arguments of `chunk_rule` for the second chunks of prompts."""
    q, k = (torch.nn.functional.normalize(random(batch, rows, net.num_k_heads, net.k_head_dim), dim=-1) for _ in "qk")
    gates = torch.rand(2, batch, rows, net.num_heads, device="cuda")
    gates[0] *= -1.0
    state = torch.randn(batch, net.num_heads, net.k_head_dim, net.head_dim, device="cuda")
    where = integers(*range(batch)), integers(*[64] * batch), integers(*[rows] * batch)
    return q, k, random(batch, rows, net.num_heads, net.head_dim), gates, state, *where


def exact(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, state: Tensor) -> Tensor:
    """Outputs and states in float64, row by row, flat."""
    q, k = (x.double().repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    state, found = state.double(), list[Tensor]()
    decay, beta = gates[0].double().exp()[..., None], gates[1].double()[..., None]
    for i in range(q.shape[1]):
        state = state * decay[:, i, ..., None]
        update = (v[:, i].double() - (state * k[:, i, ..., None]).sum(2)) * beta[:, i]
        state = state + k[:, i, ..., None] * update[:, :, None]
        found.append((state * q[:, i, ..., None]).sum(2) / q.shape[-1] ** 0.5)
    return torch.cat([torch.stack(found, dim=1).flatten(), state.flatten()])


def rules() -> dict[str, Callable[..., Tensor]]:
    found = {"ours": delta_chunk.chunk_rule}
    return found | ({"fla": fla.chunk_rule} if fla.delta_rule() is not None else {})


def errors(net: GatedDeltaNetSpec) -> dict[str, float]:
    *parts, state, slots, starts, counts = inputs(net, 2, 200)
    expected, found = exact(*parts, state), dict[str, float]()
    for name, rule in rules().items():
        after = state.clone()
        both = torch.cat([rule(*parts, after, slots, starts, counts).flatten().double(), after.flatten().double()])
        found[f"{name} error"] = ((both - expected).norm() / expected.norm()).item()
    return found


def prompt(net: GatedDeltaNetSpec, batch: int, rows: int) -> dict[str, Any]:
    args = inputs(net, batch, rows)
    q, k, v, gates, state, *_ = args
    found = {"ours us": microseconds(partial(delta_chunk.chunk_rule, *args), 10)}
    if (rule := fla.delta_rule()) is not None:  # without the copies of states that `fla.chunk_rule` needs
        theirs = partial(rule, q, k, v, g=gates[0], beta=gates[1], initial_state=state, output_final_state=True)
        found["fla us"] = microseconds(theirs, 10)
    return found


def step(net: GatedDeltaNetSpec, batch: int) -> dict[str, Any]:
    """The rule of one layer, each time with the states of another."""
    widths, device = (net.k_head_dim, net.head_dim), torch.device("cuda")
    size = 4 * batch * net.num_heads * widths[0] * widths[1]
    layers = max(2, -(-STATES // size))
    memory = DeltaMemory.empty(
        layers * batch, BLOCK, net.taps, net.channels, net.num_heads, widths, torch.bfloat16, device
    )
    memory.state.normal_()
    memories, turn = memory.of_layers(layers), itertools.count()
    mixed, gates = random(batch, 2 * BLOCK, net.channels), torch.rand(batch, 2 * BLOCK, 2, net.num_heads, device=device)
    where = integers(*range(batch)), integers(*[STAY] * batch), integers(*[BLOCK] * batch)

    def rule() -> Tensor:
        return delta.delta_rule(mixed, gates, memories[next(turn) % layers], *where)

    other = torch.empty_like(memories[0].state)
    found = {"us": microseconds(rule, layers), "bytes": 2 * size}
    copy = microseconds(lambda: other.copy_(memories[next(turn) % layers].state), layers)
    return found | {"copy us": copy, "of a copy": copy / found["us"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    result: dict[str, Any] = {**setting("bench/delta_nets.py"), "rows": []}
    if len(rules()) > 1:
        result["versions"]["fla"] = importlib.import_module("fla").__version__
    with torch.inference_mode():
        for shape in args.shapes:
            net = ModelSpec.of_target(named_shape(shape)).delta_nets[0]
            cases: list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = [
                ({"use": "error"}, partial(errors, net))
            ]
            cases += [({"use": "prompt", "prompts": b, "tokens": n}, partial(prompt, net, b, n)) for b, n in PROMPTS]
            cases += [({"use": "step", "requests": b}, partial(step, net, b)) for b in BATCHES]
            for case, work in cases:
                row = {"shape": shape} | case | work()
                result["rows"].append(row)
                print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
                if args.output:
                    write_json(args.output, result)


if __name__ == "__main__":
    main()
