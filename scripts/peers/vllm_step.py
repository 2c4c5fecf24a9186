"""Measures vLLM with random weights of a named shape, plain and with DFlash drafts; the counterpart of `bench/step.py`.

    python scripts/peers/vllm_step.py --shape qwen3-8b --batch 1 8 32 --k 0 15 7 --accept 0.865 --output peer.json

Run it on the same GPU. As there, milliseconds per step and tokens per second are the difference between long and
short answers, each engine accepts every position with the given conditional probability, prompts are random and no
prefix is cached. Every k has its own engine in its own process, and the file is written after every row. Needs an
environment with vllm (0.33, or 0.26 for dense shapes) and this project. Mixtures of experts and gated delta nets
(`--shape qwen3.8-27b-fp8`) run vLLM's Triton kernels, so no other package is needed. Rows choose their own experts,
as in our benchmark (`vllm_routing.py`); the result has this under "routing".
vLLM captures steps of 1, 2, 3, 4, 6, 8, 12 ... requests, up to the largest batch. Several of these programs may start
at the same time on one GPU: with `--together` each waits until all are ready, and they are timed in turns.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dflash_toolkit.command_line import run_command
from dflash_toolkit.config import UserError
from dflash_toolkit.evaluation.report.markdown import render_table
from dflash_toolkit.evaluation.report.table import Table
from dflash_toolkit.files import write_json
from dflash_toolkit.models.dflash.checkpoint import config_json
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.train.responses.vllm_backend import import_vllm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.measure import add_together, setting, turn
from scripts.shapes import named_shape

UNQUANTIZED = ("mlp.gate", "mlp.shared_expert_gate", "linear_attn.in_proj_a", "linear_attn.in_proj_b")  # as published
ROUTING = "own_experts"  # defined in vllm_routing.py
ACCEPTED, DRAFTS = "vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_drafts"


class Run(NamedTuple):
    """A batch of equal requests."""

    seconds: float
    tokens: int
    steps: float  # per request
    accepted: float  # drafted tokens per request that vLLM counts as accepted


class Work(NamedTuple):
    """The work of one engine."""

    options: dict[str, Any]  # arguments of vllm.LLM
    vocabulary: int
    batches: Sequence[int]
    prompt: int
    short: int
    long: int
    repeats: int
    first_token: Sequence[int]  # tokens of single prompts
    together: Sequence[str] | None  # see `turn`
    name: str  # the engine's name in the result
    result: dict[str, Any]  # the result so far
    output: Path


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", default="qwen3-8b")
    add("--batch", type=int, nargs="+", default=[1, 8, 32])
    add("--k", type=int, nargs="+", default=[0, 15, 7], help="tokens drafted per step; 0 decodes without drafts")
    add("--accept", type=float, default=0.865, help="conditional acceptance probability of every position")
    add("--prompt", type=int, default=512)
    add("--short", type=int, default=64)
    add("--long", type=int, default=384)
    add("--repeats", type=int, default=3)
    add("--max-model-len", type=int, default=8192)
    add("--gpu-memory-utilization", type=float, default=0.5)
    add("--kv-cache-gib", type=float, help="GiB of the cache, instead of --gpu-memory-utilization")
    add("--first-token", type=int, nargs="+", default=[], metavar="TOKENS", help="also time prompts of so many tokens")
    add_together(parser)
    add("--options", type=json.loads, default={}, help="more arguments of vllm.LLM, a JSON object")
    add("--no-compile", action="store_true", help="CUDA graphs without torch.compile: faster start, slower decoding")
    add("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    if not 0.0 < args.accept < 1.0:
        parser.error(f"--accept is {args.accept}; it must be between 0 and 1")
    if min(args.k) < 0 or not 0 < args.short < args.long:
        parser.error("--k must be >= 0, and --short less than --long")
    for name, least in (("batch", min(args.batch)), ("prompt", args.prompt), ("repeats", args.repeats)):
        if least < 1:
            parser.error(f"--{name} is {least}; it must be >= 1")
    if max(args.first_token, default=0) >= args.max_model_len:
        parser.error(f"--first-token is {max(args.first_token)}; raise --max-model-len")
    if args.prompt + args.long > args.max_model_len:
        tokens = f"--prompt and --long are {args.prompt + args.long} tokens"
        parser.error(f"{tokens}; vllm is started for {args.max_model_len}")
    return args


def write_shapes(folder: Path, shape: str, k: int) -> tuple[Path, Path]:
    """Directories with the configurations of the target and, for k > 0, of a drafter of blocks of k + 1.

    vLLM makes up the weights.
    """
    config = named_shape(shape)
    target, drafter = folder / "target", folder / "drafter"
    target.mkdir()
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    stated = config.to_dict() | {"architectures": [architecture], "dtype": "bfloat16"}
    if (quantized := stated.get("quantization_config")) and quantized["quant_method"] == "fp8":
        kept = [f"model.layers.{layer}.{name}" for layer in range(config.num_hidden_layers) for name in UNQUANTIZED]
        stated["quantization_config"] = {**quantized, "modules_to_not_convert": ["lm_head", *kept]}
    if "linear_attention" in (stated.get("layer_types") or ()):
        stated["mamba_ssm_dtype"] = "float32"  # as published; without it vLLM keeps states in bf16
    write_json(target / "config.json", stated)
    if k:
        drafter.mkdir()
        write_json(drafter / "config.json", config_json(drafter_shape(config, block_size=k + 1)))
    return target, drafter


def options_of(args: argparse.Namespace, folder: Path, k: int) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM."""
    target, drafter = write_shapes(folder, args.shape, k)
    options: dict[str, Any] = {
        "model": str(target), "dtype": "bfloat16", "load_format": "dummy", "skip_tokenizer_init": True, "seed": 0,
        "max_model_len": min(args.max_model_len, named_shape(args.shape).max_position_embeddings),
        "max_num_seqs": max(args.batch),
        "max_num_batched_tokens": 16384, "gpu_memory_utilization": args.gpu_memory_utilization,
        "enable_prefix_caching": False, "disable_log_stats": False, "generation_config": "vllm",
    }  # fmt: skip
    if args.no_compile:
        options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    config = named_shape(args.shape)
    if getattr(config, "num_experts", None):
        options |= {"moe_backend": "triton", "worker_extension_cls": "vllm_routing.Worker"}
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        options["additional_config"] = {"gdn_prefill_backend": "triton"}  # else Hopper wants flashinfer
    if k:
        options["speculative_config"] = {
            "method": "dflash", "model": str(drafter), "num_speculative_tokens": k,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [args.accept ** (i + 1) for i in range(k)],
        }  # fmt: skip
    return options


def for_batches(options: dict[str, Any], args: argparse.Namespace, k: int) -> dict[str, Any]:
    """Returns the arguments with graphs for these batches and those that they shrink to, and a cache of that size."""
    sizes = {n for i in range(16) for n in (2**i, 3 * 2**i) if n <= max(args.batch)} | {*args.batch}
    graphs = {"cudagraph_capture_sizes": sorted(size * (k + 1) for size in sizes)}
    options = options | {"compilation_config": options.get("compilation_config", {}) | graphs}
    if args.kv_cache_gib:
        options |= {"kv_cache_memory_bytes": int(args.kv_cache_gib * 2**30), "gpu_memory_utilization": 0.1}
    return options | args.options


def measure(work: Work) -> dict[str, Any]:
    """Start an engine, time every batch, write the result after each of them and return it.

    Raises UserError: vllm refuses the models or the machine.
    """
    if "worker_extension_cls" in work.options:
        os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = ROUTING
        sys.path.insert(0, str(Path(__file__).parent))  # for the processes that this one starts, too
    vllm = import_vllm()
    began = time.perf_counter()
    try:
        llm = vllm.LLM(**work.options)
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(f"vllm cannot start: {' '.join(str(error).split())}") from error
    found: dict[str, Any] = {"start_s": round(time.perf_counter() - began, 1), "rows": []}
    work.result["versions"]["vllm"] = vllm.__version__
    work.result["engines"][work.name] = found
    drafts = "speculative_config" in work.options
    dice = random.Random(0)

    def counters() -> tuple[float, float]:
        values = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in (DRAFTS, ACCEPTED)}
        return values.get(DRAFTS, 0), values.get(ACCEPTED, 0)

    def run(batch: int, tokens: int) -> Run:
        prompts = [[dice.randrange(1000, work.vocabulary - 1000) for _ in range(work.prompt)] for _ in range(batch)]
        params = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        before = counters()
        answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        steps, accepted = ((b - a) / batch for a, b in zip(before, counters(), strict=True))
        written = sum(len(answer.outputs[0].token_ids) for answer in answers)
        return Run(decoding_s(answers), written, steps if drafts else written / batch - 1, accepted)

    def first_token_ms(prompt: int) -> float:
        seconds = []
        for _ in range(1 + work.repeats):
            ids = [dice.randrange(1000, work.vocabulary - 1000) for _ in range(prompt)]
            params = vllm.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
            began = time.perf_counter()
            llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
            seconds.append(time.perf_counter() - began)
        return 1e3 * statistics.median(seconds[1:])

    own_turn = contextlib.ExitStack()
    try:
        own_turn.enter_context(turn(work.together))
        for batch in work.batches:
            for tokens in (work.short, work.long):
                run(batch, tokens)  # compiles what is missing
            short, long = ([run(batch, tokens) for _ in range(work.repeats)] for tokens in (work.short, work.long))
            found["rows"].append({"batch": batch, "prompt": work.prompt} | figures(batch, short, long))
            print(found["rows"][-1], file=sys.stderr, flush=True)
            write_json(work.output, work.result)  # kept even if the next row fails
        for prompt in work.first_token:
            found.setdefault("first_token_ms", {})[str(prompt)] = first_token_ms(prompt)
            print(work.name, found["first_token_ms"], file=sys.stderr, flush=True)
            write_json(work.output, work.result)
    finally:
        llm.llm_engine.engine_core.shutdown()  # a process that this one would wait for
        own_turn.close()
    return work.result


def decoding_s(answers: Sequence[Any]) -> float:
    """From where all of them have a token to the last one: prefills take turns to be slow and fast.

    Args:
        answers: vLLM's `RequestOutput`, with the times that its engine kept.
    """
    times = [answer.metrics for answer in answers]
    return float(max(t.last_token_ts for t in times) - max(t.first_token_ts for t in times))


def figures(batch: int, short: Sequence[Run], long: Sequence[Run]) -> dict[str, Any]:
    """As `bench/step.py` has them: the long answers less the short ones, prefills left out.

    Of equal runs the fastest counts: what vLLM still compiles on the way only adds to a run.
    """
    seconds = min(r.seconds for r in long) - min(r.seconds for r in short)
    steps, tokens = (
        statistics.mean(r[field] for r in long) - statistics.mean(r[field] for r in short)
        for field in (Run._fields.index("steps"), Run._fields.index("tokens"))
    )
    every = [r.seconds for r in long]
    return {
        "ms_per_step": 1e3 * seconds / steps,
        "tokens_per_second": tokens / seconds,
        "tokens_per_step": tokens / steps / batch,
        "spread": (max(every) - min(every)) / statistics.median(every),
        "tau_by_counters": 1 + sum(r.accepted for r in long) / sum(r.steps for r in long),
        "short_s": [round(r.seconds, 4) for r in short],
        "long_s": [round(r.seconds, 4) for r in long],
    }


def table(engines: dict[str, dict[str, Any]]) -> str:
    rows = [
        (
            name,
            str(row["batch"]),
            *(f"{row[key]:.2f}" for key in ("ms_per_step", "tokens_per_second", "tokens_per_step")),
        )
        for name, engine in engines.items()
        for row in engine["rows"]
    ]
    return render_table(Table("", ("Drafts", "Batch", "ms a step", "Tokens/s", "Tokens a step"), tuple(rows)))


def run(args: argparse.Namespace) -> None:
    if not args.output.absolute().parent.is_dir():
        raise UserError(f"--output {args.output}: no such directory")
    import_vllm()
    named_shape(args.shape)
    result = setting("peers/vllm_step.py")
    result |= {
        key: getattr(args, key)
        for key in ("shape", "accept", "prompt", "short", "long", "repeats", "no_compile", "options")
    }
    if getattr(named_shape(args.shape), "num_experts", None):
        result["routing"] = "every row of every layer chooses by random logits of its own, through vllm's top-k kernel"
    result["engines"] = {}
    for k in args.k:
        with tempfile.TemporaryDirectory() as folder:
            vocabulary, lengths = named_shape(args.shape).vocab_size, (args.prompt, args.short, args.long)
            work = Work(
                for_batches(options_of(args, Path(folder), k), args, k), vocabulary, args.batch, *lengths, args.repeats,
                args.first_token, args.together, f"k{k}" if k else "plain", result, args.output,
            )  # fmt: skip
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                result = pool.submit(measure, work).result()
    print(f"\n{table(result['engines'])}\n\n{args.output}")


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Exit codes: 0 done, 2 a mistake (one line)."""
    args = parse(argv)
    return run_command(lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
