"""The benchmark prompt sets for drafters, by their common names, and their places on the hub.

`--prompts gsm8k` reads the set from the hub, `--prompts gsm8k=FILE` a copy; both use the benchmark's prompt template.
Datasets and splits are those of z-lab's client and of vLLM's benchmarks.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A set on the hub."""

    place: str  # DATASET[:SUBSET]; empty if there is no dataset to stream
    split: str = "test"
    elsewhere: str = ""  # the source of a file of it, if it cannot be streamed


# most rows of the hub's SPEED-Bench only refer to their prompts, and begin with this text instead
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
SPEED_BENCH = "made by prepare_data.py of examples/specdec_bench in github.com/NVIDIA/Model-Optimizer"
BENCHMARKS = {
    "gsm8k": Benchmark("openai/gsm8k:main"),
    "math500": Benchmark("HuggingFaceH4/MATH-500"),
    "humaneval": Benchmark("openai/openai_humaneval"),
    "mbpp": Benchmark("google-research-datasets/mbpp:sanitized"),
    "mt_bench": Benchmark("HuggingFaceH4/mt_bench_prompts", "train"),
    "alpaca": Benchmark("tatsu-lab/alpaca", "train"),
    "aime25": Benchmark("MathArena/aime_2025", "train"),
    "livecodebench": Benchmark("", elsewhere="test.jsonl of livecodebench/code_generation_lite on the hub"),
    "spec_bench": Benchmark("", elsewhere="data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench"),
    "speed_bench": Benchmark("", elsewhere=SPEED_BENCH),
    **{f"speed_bench_{length}": Benchmark("", elsewhere=SPEED_BENCH) for length in ("1k", "2k", "8k", "16k", "32k")},
}
