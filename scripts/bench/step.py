"""Measures the engine's decoding steps with random weights of a named shape, plain and with a drafter.

    python scripts/bench/step.py --shape qwen3-8b --batch 1 8 32 --accept 0.865 --output step.json

Every row runs real requests through the engine. Milliseconds per step and tokens per second are the difference
between long and short answers, so prefill cancels out; the tail, with only the slowest requests left, does not.
Acceptance is synthetic (a conditional probability per position, or a mean step length); the work is real. For
mixtures of experts every row verifies random tokens, because a random drafter drafts nearly the same tokens
everywhere, and the rows then choose experts independently. Several `--drafter-kind` take turns with the same
target. With `--zero-acceptance N` no draft of N requests per batch is accepted; the result has the time per token
of these and of the others.
"""

import argparse
import contextlib
import gc
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dflash_toolkit.command_line import run_command
from dflash_toolkit.files import write_json
from dflash_toolkit.generation import Generation
from dflash_toolkit.kernels.launch import dependent_launches
from dflash_toolkit.models.device import use_device
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.spec import ModelSpec
from dflash_toolkit.options import DRAFT_DTYPES
from dflash_toolkit.roofline import roofline_of
from dflash_toolkit.runtime import Engine, EngineOptions, SyntheticAcceptance
from dflash_toolkit.runtime.engine import resolve_draft_dtype
from dflash_toolkit.runtime.fit import planner_for
from dflash_toolkit.runtime.request import StepShape
from dflash_toolkit.runtime.step_times import full_batch, launcher, random_tokens
from dflash_toolkit.runtime.weights import (
    AttentionWeights,
    DrafterWeights,
    LayerWeights,
    MlpWeights,
    MoeWeights,
    TargetWeights,
)
from dflash_toolkit.sampling import MAX_LOGPROBS, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.measure import add_together, setting, turn
from scripts.shapes import named_shape, random_drafter, random_target

ACCEPT = 0.865
DRAFTERS: dict[str, dict[str, Any]] = {  # sizes as in all published ones
    "dflash": {}, "dflash2": {"kind": "dflash2"}, "convolution": {"kind": "dflash2", "selector_rank": 0},
    "selector": {"kind": "dflash2", "conv_kernel_size": 0}, "dspine": {"kind": "dspine"},
}  # fmt: skip


class Run(NamedTuple):
    """Times of one batch of requests."""

    seconds: float
    answers: list[Generation]
    full: list[float]  # seconds of every step that all requests took part in
    ends: list[float]  # seconds until each request had its answer


def run(
    engine: Engine, prompt: int, tokens: int, batch: int, seed: int, first: bool = False, logprobs: int | None = None
) -> Run:
    """Decode `batch` requests.

    Args:
        first: they are the first ones of an engine, as far as it knows.
    """
    if first:
        engine.reset_acceptance()
    dice = random.Random(f"{seed} {tokens}")  # no prompt twice, for a prefix cache would know it
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=logprobs)
    prompts = [[dice.randrange(1000, engine.vocabulary - 1000) for _ in range(prompt)] for _ in range(batch)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    requests = [engine.submit(ids, params) for ids in prompts]
    full: list[float] = []
    ends = [0.0] * batch
    before = None
    while not all(request.finished for request in requests):
        engine.step()
        now = time.perf_counter()
        ends = [end or request.finished * (now - began) for end, request in zip(ends, requests, strict=True)]
        if before is not None and len(engine.scheduler.running) == batch:
            full.append(now - before)
        before = now if len(engine.scheduler.running) == batch else None
    torch.cuda.synchronize()
    return Run(time.perf_counter() - began, [request.generation for request in requests], full, ends)


def measure(
    engine: Engine,
    prompt: int,
    batch: int,
    short: int,
    long: int,
    repeats: int,
    first: bool = False,
    zero_acceptance: int = 0,
    logprobs: int | None = None,
) -> dict[str, Any]:
    """Milliseconds a step and tokens a second of `batch` equal requests, of which the first have `zero_acceptance`."""
    # captures graphs, compiles kernels; batches that only the long answers come through too
    for tokens in (short, long):
        run(engine, prompt, tokens, batch, 0, first, logprobs)
    runs = {
        tokens: [run(engine, prompt, tokens, batch, i + 1, first, logprobs) for i in range(repeats)]
        for tokens in (short, long)
    }
    found: dict[int, tuple[float, float, float]] = {}
    for tokens, each in runs.items():
        steps = statistics.mean(len(answer.steps) for one in each for answer in one.answers)
        committed = statistics.mean(sum(len(answer.tokens) for answer in one.answers) for one in each)
        found[tokens] = (statistics.median(one.seconds for one in each), steps, committed)
    every = [one.seconds for one in runs[long]]
    full = [seconds for each in runs.values() for one in each for seconds in one.full]
    seconds, steps, tokens = (b - a for a, b in zip(found[short], found[long], strict=True))

    def ms_per_token(requests: slice) -> float:
        ends = {n: statistics.mean(end for one in each for end in one.ends[requests]) for n, each in runs.items()}
        return 1e3 * (ends[long] - ends[short]) / (long - short)

    row = {
        "ms_per_step": 1e3 * seconds / steps,
        # without the tail, when few requests are left; None if the first one ended before all prompts were read
        "ms_of_a_full_step": 1e3 * statistics.median(full) if full else None,
        "tokens_per_second": tokens / seconds,
        "tokens_per_step": tokens / steps / batch,
        "spread": (max(every) - min(every)) / statistics.median(every),
        # near the end blocks are cut to what still fits, so the middle one says what was chosen
        "median_block": statistics.median(
            step.drafted + 1 for answer in runs[long][-1].answers for step in answer.steps
        ),
    }
    if zero_acceptance:
        row["ms_per_token_zero_acceptance"] = ms_per_token(slice(zero_acceptance))
        row["ms_per_token_others"] = ms_per_token(slice(zero_acceptance, None)) if zero_acceptance < batch else None
    return row


def first_token_ms(engine: Engine, prompt: int, repeats: int) -> float:
    """Returns the median milliseconds from a single request to its first token."""
    return 1e3 * statistics.median([run(engine, prompt, 1, 1, seed).seconds for seed in range(1 + repeats)][1:])


def step_bytes(target: TargetWeights, drafter: DrafterWeights | None, batch: int, block: int) -> int:
    """Returns the bytes that one step must move: the weights, with the expected number of experts of its rows if all
    are equally likely, and recurrent states, which are read and written."""

    def of_ffn(w: MlpWeights | MoeWeights) -> int:
        matrices = w.gate_up.nbytes + w.down.nbytes
        if isinstance(w, MlpWeights):
            return matrices
        likely = 1 - (1 - w.spec.top_k / w.spec.num_experts) ** (batch * block)
        return round(matrices * likely) + w.router.nbytes

    def of_layer(w: LayerWeights) -> int:
        ffn = of_ffn(w.ffn) + (of_ffn(w.experts.experts) if w.experts else 0)
        ffn += w.inputs.gate.nbytes + w.inputs.projection.nbytes if w.inputs else 0
        w_in = (w.mixer.qkv,) if isinstance(w.mixer, AttentionWeights) else (w.mixer.qkvz, w.mixer.ba)
        return ffn + sum(matrix.nbytes for matrix in (*w_in, w.mixer.o))

    def of_layers(layers: Sequence[LayerWeights]) -> int:
        convolutions = (conv for w in layers for conv in (w.mixer_conv, w.ffn_conv) if conv is not None)
        return sum(of_layer(w) for w in layers) + sum(c.base.nbytes + c.projection.nbytes for c in convolutions)

    total = of_layers(target.layers) + target.head.nbytes
    states = sum(net.num_heads * net.k_head_dim * net.head_dim for net in target.spec.delta_nets)
    total += 2 * batch * 4 * states  # in fp32
    if drafter is not None and block > 1:  # an engine that never drafts writes no context
        total += drafter.fc.nbytes + drafter.context_kv.nbytes + of_layers(drafter.layers)
        total += (drafter.head if drafter.head is not None else target.head).nbytes
        total += 0 if drafter.selector is None else drafter.selector.projection.nbytes  # and some rows of its codebooks
    return total


GEMM = ("nvjet", "cutlass", "gemm")  # cuBLAS's kernels, for more rows than ours support
PARTS = {  # parts of a step by names of kernels; norms are in the kernels of the GEMMs
    "delta nets": ("_delta_inputs", "_delta_rule", "_gated_rms_norm", "_gate_heads"),
    "experts": ("_experts_kernel", "_group_rows_kernel"),
    "attention": ("_attention_kernel", "_merge_kernel", "_rope_write"),
    "gemms": ("layer_kernel", "_linear_kernel", *GEMM, "splitK", "_swiglu", "add_rms_norm", "_round_kernel"),
}
END, CONTEXT = "_accept_kernel", "_context_write_kernel"
TOP = "_tile_top_kernel"  # top logits of a part of a head; the part's GEMM is before it
CHOSEN = ("reduce_kernel", "_walk_kernel")  # an argmax, ours and PyTorch's; a selector's walk


def _part(name: str) -> str:
    return next((part for part, keys in PARTS.items() if any(key in name for key in keys)), "rest")


def _head_start(kernels: list[tuple[float, str]], argmax: int, before: int) -> int:
    """Returns the first kernel of the head that ends with that choice, in a step that begins after `before`."""
    names = [name for _, name in kernels]
    parted = (i for i in range(argmax - 1, before, -1) if _part(names[i]) != "rest" and "splitKreduce" not in names[i])
    last = next(parted, before)  # the last kernel of a part: a layer's norm, or the head's own GEMM
    if not any(key in names[last] for key in GEMM):
        return last + 1
    return _head_start(kernels, last, before) if TOP in names[last - 1] else last


def attribute(kernels: list[tuple[float, str]]) -> dict[str, float]:
    """Returns the microseconds of a step by part, from (end in us, name) of kernels in the order of their ends.

    Kernels overlap at their start, so each is charged from the end of the previous one to its own end. A step ends with
    its acceptance and begins with the context's keys and values, part `context`. The kernels after it, up to the first
    of two heads, are `draft`. Kernels before the first acceptance are skipped. A head is everything after the last
    layer, up to a choice: our own kernels, or a GEMM and PyTorch's argmax, or GEMMs of parts of the head and their top
    logits.
    """
    ends = [i for i, (_, name) in enumerate(kernels) if END in name]
    found: dict[str, float] = {}
    for before, end in itertools.pairwise(ends):
        step = range(before + 1, end + 1)
        names = ((i, kernels[i][1]) for i in step)
        chosen = [i for i, name in names if any(key in name for key in CHOSEN) and "splitK" not in name]
        written = next((i for i in step if CONTEXT in kernels[i][1]), before)
        heads = {j for i in chosen for j in range(_head_start(kernels, i, before), i + 1)}
        drafted = chosen[0] if len(chosen) > 1 else before
        for i in step:
            part = _part(kernels[i][1])
            if i in heads:
                part = "head"
            elif i <= written:
                part = "context"
            elif i < drafted:
                part = "draft"
            found[part] = found.get(part, 0.0) + (kernels[i][0] - kernels[i - 1][0]) / (len(ends) - 1)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def breakdown(engine: Engine, rows: int, block: int, steps: int = 6) -> dict[str, float]:
    """Microseconds of a step by part; they add up to the step."""
    step = launcher(engine.runner, rows, StepShape(block))
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return attribute(
        sorted((e.time_range.end, e.name) for e in profile.events() if e.time_range.end > e.time_range.start)
    )


def fill(engine: Engine, rows: int, context: int) -> None:
    """Pretend that every row has a context, a token and recurrent states of its own, for timing."""
    runner = engine.runner
    pages = runner.pages_per_request
    room = engine.runner.verifier.stack.cached[0].shape[2] // runner.page_size - 1
    with torch.inference_mode():
        runner.state.states[:, :rows].copy_(torch.stack([torch.arange(rows) + 1, torch.zeros(rows)]))
        table = 1 + torch.arange(rows * pages, device=runner.device, dtype=torch.int32) % room
        runner.state.page_table[:rows].copy_(table.view(rows, pages))
        runner.state.lengths[:rows] = context
        runner.state.last_token[:rows].random_(engine.vocabulary)


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, SyntheticAcceptance]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--block", type=int, nargs="+", default=[1, 16], help="1 is plain; 0 lets the engine choose")
    parser.add_argument("--prompt", type=int, nargs="+", default=[512])
    acceptance = parser.add_mutually_exclusive_group()
    acceptance.add_argument("--accept", type=float, help=f"conditional probability of every position ({ACCEPT})")
    acceptance.add_argument(
        "--mean-length", type=float, help="mean tokens per step, bonus token included, instead of --accept"
    )
    parser.add_argument(
        "--zero-acceptance", type=int, default=0, metavar="N", help="requests per batch that accept no draft"
    )
    parser.add_argument(
        "--logprobs", type=int, metavar="N", help="every request asks for the log-probabilities of N best tokens"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the synthetic acceptance")
    parser.add_argument("--short", type=int, default=64)
    parser.add_argument("--long", type=int, default=384)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--first-token", type=int, nargs="+", default=[], metavar="TOKENS", help="also time prompts of so many tokens"
    )
    parser.add_argument("--first", action="store_true", help="measure the first requests of an engine only")
    parser.add_argument("--prefix-cache", action="store_true", help="keep prefixes in the cache, as when serving")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument(
        "--read-tb-s", type=float, help="read bandwidth for the MBU (default: of this GPU, dflash_toolkit/roofline.py)"
    )
    parser.add_argument("--no-drafter", action="store_true", help="plain decoding without a drafter in memory")
    parser.add_argument("--drafter-kind", nargs="+", choices=list(DRAFTERS), default=["dflash"])
    parser.add_argument("--drafter-block", type=int, help="longest block of the drafter (default: of its kind)")
    parser.add_argument("--draft-dtype", choices=DRAFT_DTYPES, default="auto")
    parser.add_argument(
        "--no-dependent-launches", action="store_true", help="start each Triton kernel after the previous one has ended"
    )
    parser.add_argument("--breakdown", action="store_true")
    add_together(parser)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    numbers = {"batch": min(args.batch), "prompt": min(args.prompt), "repeats": args.repeats, "short": args.short}
    for name, least in numbers.items():
        if least < 1:
            parser.error(f"--{name} is {least}; it must be >= 1")
    if args.short >= args.long:
        parser.error(f"--short is {args.short}; it must be less than --long")
    if max(args.prompt) + args.long > args.max_model_len:
        parser.error(f"--prompt and --long are {max(args.prompt) + args.long} tokens; raise --max-model-len")
    if max(args.first_token, default=0) >= args.max_model_len:
        parser.error(f"--first-token is {max(args.first_token)}; raise --max-model-len")
    if not 0 <= args.zero_acceptance <= min(args.batch):
        parser.error(
            f"--zero-acceptance is {args.zero_acceptance}; every --batch has {min(args.batch)} requests at least"
        )
    if args.logprobs is not None and not 0 <= args.logprobs <= MAX_LOGPROBS:
        parser.error(f"--logprobs is {args.logprobs}; it must be in 0..{MAX_LOGPROBS}")
    if args.accept is None and args.mean_length is None:
        args.accept = ACCEPT
    try:
        return args, SyntheticAcceptance(rate=args.accept, mean_length=args.mean_length, seed=args.seed)
    except ValueError as error:
        parser.error(str(error))


def measured(
    args: argparse.Namespace, engine: Engine, target: TargetWeights, batch: int, block: int, prompt: int
) -> dict[str, Any]:
    """Returns the times of one batch and of the parts of its steps."""
    counts = (prompt, batch, args.short, args.long, args.repeats)
    row = measure(engine, *counts, args.first, args.zero_acceptance, args.logprobs)
    row |= {"kv_cache_tokens": engine.pool.capacity * engine.options.page_size, "preemptions": engine.stats.preemptions}
    free, total = torch.cuda.mem_get_info()
    row |= {"device_gib": (total - free) / 2**30, "allocated_gib": torch.cuda.max_memory_allocated() / 2**30}
    config = engine.runner.drafter.config if engine.runner.drafter else None
    plan = planner_for(target.spec, config, engine.runner.device, engine.runner.dtype).plan(engine.options)
    planned = plan.certain + row["kv_cache_tokens"] * plan.token + max(plan.step, plan.prefill)
    row |= {"planned_gib": planned / 2**30}  # at most, next to allocated_gib
    if block:
        roofline = 1e3 * step_bytes(target, engine.runner.drafter, batch, block) / (args.read_tb_s * 1e12)
        row |= {"roofline_ms": roofline, "mbu": roofline / row["ms_per_step"]}
    if args.breakdown and block:
        # rows are idle and advance nothing; where there are states they are busy: these are replayed and written then
        with full_batch(engine.runner) if target.spec.recurrent else contextlib.nullcontext():
            fill(engine, batch, prompt)
            row["graph_ms"] = graph_ms(engine, batch, block)
            row["mbu_graph"] = row["roofline_ms"] / row["graph_ms"]
            fill(engine, batch, prompt)
            row["parts_us"] = breakdown(engine, batch, block)
    return row


def show(row: dict[str, Any]) -> None:
    shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items() if k != "parts_us"}
    print(json.dumps(shown), flush=True)
    print("    " + ", ".join(f"{name} {us:.0f} us" for name, us in row.get("parts_us", {}).items()))


def bench(args: argparse.Namespace, synthetic: SyntheticAcceptance) -> None:
    device, dtype = use_device("cuda"), torch.bfloat16
    dependent_launches.on = not args.no_dependent_launches
    args.read_tb_s = args.read_tb_s or roofline_of(device).read_tb_s
    config = named_shape(args.shape)
    began = time.perf_counter()
    target = random_target(ModelSpec.of_target(config), device, dtype)
    drafters: dict[str | None, DrafterWeights | None] = {None: None}
    if not args.no_drafter:
        size = {"block_size": args.drafter_block} if args.drafter_block else {}
        shapes = {kind: drafter_shape(config, **DRAFTERS[kind], **size) for kind in args.drafter_kind}
        drafters = {kind: random_drafter(shape, device, dtype) for kind, shape in shapes.items()}
    torch.cuda.synchronize()
    result: dict[str, Any] = {
        **setting("bench/step.py"),
        "shape": args.shape,
        "accept": args.accept,
        "mean_length": args.mean_length,
        "seed": args.seed,
        "zero_acceptance": args.zero_acceptance,
        "logprobs": args.logprobs,
        "dependent_launches": dependent_launches.on,
        "read_tb_s": args.read_tb_s,
        "draft_dtype": resolve_draft_dtype(args.draft_dtype, device, dtype),
        "weights_s": time.perf_counter() - began,
        "rows": [],
        "first_token_ms": [],
    }
    with turn(args.together):
        time_steps(args, synthetic, target, drafters, result)


def time_steps(
    args: argparse.Namespace,
    synthetic: SyntheticAcceptance,
    target: TargetWeights,
    drafters: dict[str | None, DrafterWeights | None],
    result: dict[str, Any],
) -> None:
    """Times every block and drafter, and writes the result after each row."""
    for block, (kind, drafter) in itertools.product(args.block, drafters.items()):
        began = time.perf_counter()
        options = EngineOptions(
            max_num_seqs=max(args.batch),
            max_model_len=args.max_model_len,
            num_speculative_tokens=block - 1 if block else None,
            draft_tree=0,
            draft_dtype=args.draft_dtype,
            prefix_cache=args.prefix_cache,
            synthetic=synthetic,
        )
        engine = Engine(target, drafter, (), options)
        if args.zero_acceptance:  # the first requests get the first rows, and stay there until they end
            engine.runner.verifier.forced[:, : args.zero_acceptance] = 0
        start_s = time.perf_counter() - began
        with random_tokens(engine.runner) if target.spec.routes else contextlib.nullcontext():
            for batch, prompt in itertools.product(args.batch, args.prompt):
                row = {"drafter_kind": kind, "batch": batch, "block": block, "prompt": prompt, "start_s": start_s}
                result["rows"].append(row | measured(args, engine, target, batch, block, prompt))
                if args.output:  # keeps the rows so far if the next one fails
                    write_json(args.output, result)
                show(result["rows"][-1])
            for prompt in args.first_token:
                ms = first_token_ms(engine, prompt, args.repeats)
                result["first_token_ms"].append({"drafter_kind": kind, "block": block, "prompt": prompt, "ms": ms})
                print(result["first_token_ms"][-1], flush=True)
                if args.output:
                    write_json(args.output, result)
        del engine
        gc.collect()
        torch.cuda.empty_cache()


def graph_ms(engine: Engine, rows: int, block: int) -> float:
    """The captured step alone, back to back."""
    step = launcher(engine.runner, rows, StepShape(block))
    times = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(20):
            step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 20)
    return min(times)


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Exit codes: 0 done, 2 a mistake (one line)."""
    args, synthetic = parse(argv)
    return run_command(lambda: bench(args, synthetic))


if __name__ == "__main__":
    raise SystemExit(main())
