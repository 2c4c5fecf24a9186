"""Writes digests of the tokens that the engine decodes greedily, to compare two versions of it.

    python scripts/bench/tokens.py --output before.json                       # in one checkout
    python scripts/bench/tokens.py --output after.json --expect before.json   # in another: exit 1 if tokens differ

320 prompts of 8 to 200 tokens for a random model of each architecture (the first layers of a named shape), at batch
1 and 8: plain, with a random drafter, and with randomly accepted drafts, so that blocks of every length are
committed. With --target, --drafter and --data, the prompts of these sets for a real pair instead: plain, with blocks
and with draft trees.
"""

import argparse
import gc
import hashlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from dflash_toolkit.command_line import run_command
from dflash_toolkit.data.prompts import encode_chat, read_prompt_sets
from dflash_toolkit.files import write_json
from dflash_toolkit.models.device import use_device
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.spec import ModelSpec
from dflash_toolkit.runtime import Engine, EngineOptions, SyntheticAcceptance, load_engine
from dflash_toolkit.sampling import SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.measure import setting
from scripts.shapes import named_shape, random_drafter, random_target

SHAPES = ("qwen3-0.6b", "qwen2.5-0.5b", "smollm2")
MODES = ("plain", "drafts", "dice")
PAIR_MODES = {"plain": {"num_speculative_tokens": 0}, "blocks": {"draft_tree": 0}, "trees": {"draft_tree": 63}}


def digests(shape: str, args: argparse.Namespace) -> dict[str, str]:
    """sha256 of all tokens by `shape/batch/mode`."""
    device = use_device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = named_shape(shape)
    config.num_hidden_layers = args.layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: args.layers]
    target = random_target(ModelSpec.of_target(config), device, dtype)
    drafter = random_drafter(drafter_shape(config, layers=2, taps=2), device, dtype)
    dice = random.Random(shape)
    prompts = [
        [dice.randrange(1000, config.vocab_size - 1000) for _ in range(dice.randrange(8, 200))]
        for _ in range(args.prompts)
    ]
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    found = {}
    for batch in (1, 8):
        for mode in MODES:
            options = EngineOptions(
                max_num_seqs=batch,
                max_model_len=1024,
                kv_cache_tokens=max(8192, batch * 1024),
                num_speculative_tokens=0 if mode == "plain" else 15,
                synthetic=SyntheticAcceptance(rate=0.7, seed=1) if mode == "dice" else None,
            )
            engine = Engine(target, drafter, (), options)
            digest = hashlib.sha256()
            for answer in engine.generate(prompts, params):
                digest.update(json.dumps(answer.tokens).encode())
            found[f"{shape}/{batch}/{mode}"] = digest.hexdigest()[:16]
            del engine
            gc.collect()
    return found


def pair_digests(args: argparse.Namespace) -> dict[str, str]:
    """sha256 of all tokens of a real pair by `mode/batch`."""
    found = {}
    for mode, options in PAIR_MODES.items():
        for batch in (1, 8):
            sizes = EngineOptions(max_num_seqs=batch, max_model_len=args.max_model_len, **options)  # type: ignore[arg-type]
            engine, tokenizer = load_engine(args.target, args.drafter, device=args.device, options=sizes)
            rows = [row for rows in read_prompt_sets(args.data, args.limit).values() for row in rows]
            prompts = [encode_chat(tokenizer, row.messages) for row in rows]
            answers = engine.generate(prompts, SamplingParams(max_tokens=args.tokens))
            text = json.dumps([list(answer.tokens) for answer in answers])
            found[f"{mode}/{batch}"] = hashlib.sha256(text.encode()).hexdigest()[:16]
            del engine
            gc.collect()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=SHAPES)
    parser.add_argument("--target", help="a real target instead of shapes")
    parser.add_argument("--drafter", help="its drafter")
    parser.add_argument("--data", nargs="+", metavar="NAME=SOURCE", default=[], help="prompt sets of a real target")
    parser.add_argument("--limit", type=int, default=64, help="prompts per set")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=320)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--expect", type=Path, help="earlier result to compare with")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    result: dict[str, Any] = {**setting("bench/tokens.py"), "digests": {}}
    if args.target:
        result["digests"] = pair_digests(args)
        write_json(args.output, result)
    for shape in () if args.target else args.shape:
        began = time.perf_counter()
        result["digests"] |= digests(shape, args)
        print(f"{shape}: {time.perf_counter() - began:.0f} s", flush=True)
        write_json(args.output, result)
    if args.expect:
        before = json.loads(args.expect.read_text())["digests"]
        result["compared"] = len(result["digests"])
        result["different"] = sorted(key for key, value in result["digests"].items() if before.get(key) != value)
        write_json(args.output, result)
        print(f"{result['compared']} compared, different: {', '.join(result['different']) or 'none'}")
    return 1 if result.get("different") else 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
