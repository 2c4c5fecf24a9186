"""Time a target's features over packed rows, of a mixture of experts and of gated delta nets with random weights.

    python scripts/bench/target_features.py --output target_features.json
    python scripts/bench/target_features.py --tiny      # small shapes, on a CPU too

Every shape gets rows of equal documents in one forward up to the highest tapped layer, as the trainer sends them, and
the same documents one by one. Where `flash-linear-attention` is installed, gated delta nets are measured with it and,
in a process of its own, as if it were not. Times are medians.

Packed features are compared with those of the documents by themselves: the distance of a token's features over their
norm, its median and its largest over the tokens. Rounding alone may differ; of a mixture of experts single tokens are
farther, where two experts are as good. `mixed` is the median for a row that is one long document: what it would be if
documents saw one another. `neighbours` is the distance of the last document's first tokens from what they were before
the documents in front of it became others, which changes no bit where every kernel computes rows by themselves.
"""

import argparse
import importlib.metadata
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3_5TextConfig, Qwen3MoeConfig

from dflash_toolkit.benchmark import setting
from dflash_toolkit.files import read_json, write_json
from dflash_toolkit.kernels import fla
from dflash_toolkit.models.dflash.shape import default_target_layer_ids
from dflash_toolkit.models.target import Target, resolve_device
from dflash_toolkit.runtime.shapes import named_shape

ROWS = ((16, 512), (4, 4096))  # documents, tokens of each
SHAPES = ("qwen3-30b-a3b", "qwen3.5-9b")
FIRST = 4  # tokens that a state or a convolution of the document before would change most
TINY_ROWS = ((4, 24), (2, 70))
TINY: dict[str, PreTrainedConfig] = {
    "qwen3-30b-a3b": Qwen3MoeConfig(
        vocab_size=256, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
    ),
    "qwen3.5-9b": Qwen3_5TextConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
}  # fmt: skip


def documents(config: PreTrainedConfig, count: int, tokens: int, seed: int, device: torch.device) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return list(torch.randint(0, config.vocab_size, (count, tokens), generator=g).to(device))


class Bench:
    """A random target and the two ways to its features."""

    def __init__(self, config: PreTrainedConfig, device: torch.device, taps: int, steps: int) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with device:
            self.target = Target(AutoModelForCausalLM.from_config(config, dtype=dtype), name="random")
        self.device, self.config, self.steps = device, config, steps
        self.taps = default_target_layer_ids(config.num_hidden_layers, taps)

    def together(self, texts: Sequence[Tensor]) -> list[Tensor]:
        lengths = [len(text) for text in texts]
        features = self.target.forward(torch.cat([*texts])[None], taps=self.taps, lengths=lengths).features
        assert features is not None
        return list(features[0].split(lengths))

    def one_by_one(self, texts: Sequence[Tensor]) -> list[Tensor]:
        found = (self.target.forward(text[None], taps=self.taps).features for text in texts)
        return [features[0] for features in found if features is not None]

    def seconds(self, way: Callable[[Sequence[Tensor]], object], texts: Sequence[Tensor]) -> float:
        took = []
        for _ in range(self.steps + 2):  # the first ones warm up
            self.synchronize()
            began = time.perf_counter()
            way(texts)
            self.synchronize()
            took.append(time.perf_counter() - began)
        return statistics.median(took[2:])

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def rows(self, count: int, tokens: int) -> dict[str, Any]:
        """What documents of so many tokens cost, and how far their features are from those of each by itself."""
        texts = documents(self.config, count, tokens, 0, self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = self.seconds(self.together, texts)
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        apart = self.seconds(self.one_by_one, texts)
        found, expected = self.together(texts), self.one_by_one(texts)
        others = self.together([*documents(self.config, count - 1, tokens, 1, self.device), texts[-1]])
        changed = distances(others[-1][:FIRST], found[-1][:FIRST]).mean()
        mixed = self.one_by_one([torch.cat(texts)])[0][tokens:]
        far = distances(torch.cat(found), torch.cat(expected))
        mixed_far = distances(mixed, torch.cat(expected[1:]))
        return {
            "documents": count,
            "tokens": tokens,
            "packed_ms": round(1e3 * seconds, 2),
            "packed_tokens_per_second": round(count * tokens / seconds),
            "one_by_one_ms": round(1e3 * apart, 2),
            "one_by_one_tokens_per_second": round(count * tokens / apart),
            "peak_gib": round(peak / 2**30, 2),
            "distance_median": float(far.median()),
            "distance_largest": float(far.max()),
            "distance_mixed": float(mixed_far.median()),
            "neighbours": float(changed),
            "agrees": bool(far.median() < mixed_far.median() and changed < torch.finfo(found[0].dtype).eps),
        }


def distances(found: Tensor, expected: Tensor) -> Tensor:
    """[T], of each token's features, over their norm."""
    found, expected = found.float(), expected.float()
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One shape in this process."""
    device = resolve_device(args.device)
    config, rows = (TINY[name], TINY_ROWS) if args.tiny else (named_shape(name), ROWS)
    bench = Bench(config, device, args.taps, args.steps)
    fast = fla.delta_rule() is not None and device.type == "cuda" and hasattr(config, "linear_num_key_heads")
    return {
        "shape": name,
        "config": {key: value for key, value in config.to_diff_dict().items() if key != "transformers_version"},
        "dtype": str(bench.target.dtype).removeprefix("torch."),
        "experts": config._experts_implementation if hasattr(config, "num_experts_per_tok") else None,
        "flash_linear_attention": importlib.metadata.version("fla-core") if fast else None,
        "taps": list(bench.taps),
        "rows": [bench.rows(*each) for each in rows],
    }


COLUMNS = (
    ("packed ms", "packed_ms", "10.1f"), ("tokens/s", "packed_tokens_per_second", "10"),
    ("one by one", "one_by_one_tokens_per_second", "12"), ("GiB", "peak_gib", "8.1f"),
    ("median", "distance_median", "9.1e"), ("largest", "distance_largest", "9.1e"),
    ("mixed", "distance_mixed", "9.1e"), ("neighbours", "neighbours", "12.1e"),
)  # fmt: skip


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results as lines for a terminal."""
    lines = [f"{'shape':<15}{'fla':<8}{'documents':<10}" + "".join(f"{c:>{f.split('.')[0]}}" for c, _, f in COLUMNS)]
    for result in results:
        for row in result["rows"]:
            size = f"{row['documents']} x {row['tokens']}"
            cells = "".join(f"{row[key]:{form}}" for _, key, form in COLUMNS)
            fla = result["flash_linear_attention"] or "-"
            lines.append(f"{result['shape']:<15}{fla:<8}{size:<10}{cells}{'' if row['agrees'] else '  DIFFERS'}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tiny", action="store_true", help="small layers and short rows of the same kinds")
    parser.add_argument("--taps", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--without-fla", action="store_true", help="as if flash-linear-attention were not installed")
    parser.add_argument("--here", action="store_true", help="in this process, once")
    args = parser.parse_args(argv)
    if args.without_fla:
        sys.modules["fla"] = None  # type: ignore[assignment]  # before transformers looks for it
    results = []

    def add(more: list[dict[str, Any]]) -> None:
        results.extend(more)
        if args.output:  # what was measured stays, should the next run out of time
            write_json(args.output, {**setting("bench/target_features.py", argv), "results": results})

    for name in args.shapes:
        if args.here or resolve_device(args.device).type == "cpu":
            add([measure(name, args)])
            continue
        several = hasattr(named_shape(name), "linear_num_key_heads") and importlib.util.find_spec("fla") is not None
        for more in [[], ["--without-fla"]] if several else [[]]:
            with tempfile.TemporaryDirectory() as folder:
                given = [f"--{key}={getattr(args, key)}" for key in ("taps", "steps", "device")]
                command = [*given, *["--tiny"] * args.tiny, *more, f"--output={folder}/one.json", "--shapes", name]
                subprocess.run([sys.executable, __file__, "--here", *command], stdout=subprocess.DEVNULL)
                if not (Path(folder) / "one.json").exists():
                    return 1  # it has said why
                add(read_json(Path(folder) / "one.json")["results"])
    print(table(results), flush=True)
    return 0 if all(row["agrees"] for result in results for row in result["rows"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
