"""Time of a training step and of a decoding step of the plain (Hugging Face) path, on random weights of a named shape.

python scripts/bench/hf_path.py [--shape smollm2|qwen3-8b] [--length 512] [--rows 4] [--anchors 64] [--output FILE]

Prints a table and, with --output, writes JSON with device, versions, shapes and command. Speeds do not depend on the
weights' values; acceptance does, so none is reported.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from dflash_toolkit import Drafter, SamplingParams, Target, generate
from dflash_toolkit.benchmark import setting
from dflash_toolkit.files import write_json
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.target import resolve_dtype, use_device
from dflash_toolkit.runtime.shapes import named_shape
from dflash_toolkit.train.config import LossOptions, TrainConfig
from dflash_toolkit.train.features.source import FeatureSource
from dflash_toolkit.train.objective.blocks import sample_blocks
from dflash_toolkit.train.objective.loss import compute_loss, use_flex
from dflash_toolkit.train.optim.optimizers import make_optimizer
from dflash_toolkit.train.responses.rows import Row


def build(name: str, device: torch.device) -> tuple[Target, Drafter]:
    """A random target and a random drafter of the default form (5 layers, 5 taps, block 16)."""
    config = named_shape(name)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=resolve_dtype("auto", device))
    return Target(model, name=f"random {name}"), Drafter.fresh(drafter_shape(config), 0).to(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_training(target: Target, drafter: Drafter, length: int, rows: int, anchors: int, repeats: int) -> dict:
    """Median seconds of target forward and of the drafter's step (forward, backward, AdamW)."""
    options = TrainConfig(target=target.name, loss=LossOptions(anchors=anchors, head_rows=4096))
    flex = use_flex("auto", target.device)
    source = FeatureSource(
        target, drafter.config.target_layer_ids, length, 128 if flex else 1, final=options.loss.distribution
    )
    optimizer = make_optimizer(drafter.train().named_parameters(), options.optim)
    generator = torch.Generator().manual_seed(0)
    batch = [
        Row(i, length // 4, torch.randint(0, drafter.config.vocab_size, (length,), generator=generator).tolist())
        for i in range(rows)
    ]
    features_s, step_s = [], []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        features = source(batch)
        synchronize(target.device)
        features_s.append(time.perf_counter() - started)
        blocks = sample_blocks(features, anchors, 16, drafter.config.mask_token_id, generator)
        started = time.perf_counter()
        compute_loss(drafter, target, features, blocks, options, flex).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(target.device)
        step_s.append(time.perf_counter() - started)
    target_s, draft_s = statistics.median(features_s[2:]), statistics.median(step_s[2:])
    return {
        "rows": rows, "length": length, "anchors": anchors, "target_seconds": round(target_s, 4),
        "drafter_step_seconds": round(draft_s, 4), "sequences_per_second": round(rows / (target_s + draft_s), 2),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if flex else None,
    }  # fmt: skip


def time_decoding(target: Target, drafter: Drafter, prompt: int, tokens: int) -> dict:
    """Milliseconds per step, plain and with the drafter (which, being random, is hardly ever accepted)."""
    served = drafter.to(target.dtype).eval()
    ids = torch.randint(0, 1000, (prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    result: dict = {"prompt": prompt}
    for name, with_drafter in (("plain", None), ("dflash", served)):
        generate(target, with_drafter, ids, SamplingParams(max_tokens=4, ignore_eos=True))
        run = generate(target, with_drafter, ids, SamplingParams(max_tokens=tokens, ignore_eos=True))
        result[f"{name}_ms_per_step"] = round(1e3 * run.decode_s / len(run.steps), 2)
    return result


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("smollm2", "qwen3-8b"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    device = use_device(arguments.device)
    shape = arguments.shape or ("qwen3-8b" if device.type == "cuda" else "smollm2")
    target, drafter = build(shape, device)
    result = {
        "shape": shape,
        **setting("bench/hf_path.py"),
        "dtype": str(target.dtype).removeprefix("torch."),
        "training": time_training(
            target, drafter, arguments.length, arguments.rows, arguments.anchors, arguments.repeats
        ),
        "decoding": time_decoding(target, drafter, 512, 32),
    }  # fmt: skip
    if arguments.output:
        write_json(Path(arguments.output), result)
    print(f"{shape} on {result['gpu']}, {result['dtype']}")
    for part in ("training", "decoding"):
        for key, value in result[part].items():
            print(f"  {part:<10}{key:<24}{value}")


if __name__ == "__main__":
    main()
