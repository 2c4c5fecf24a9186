"""Divides the GPU's memory between the cache and the graphs, and explains what does not fit."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ..config import UnsupportedModel, UserError
from ..kernels.ops import unsupported_heads
from ..models.spec import ModelSpec
from ..preflight import GIB, size
from ..sampling import MAX_LOGPROBS
from .fit import LEAST_CONTEXT, Budget, advice, fit, free_memory, round_down
from .graphs import no_collection
from .options import EngineOptions
from .plan import Planner
from .prefill_job import PrefillJob, ScoredTokens
from .programs.context import Part
from .prompts import chunk_size
from .runner import StepRunner
from .sampler import Mode
from .step_times import run_all_parts
from .trees.budget import row_buckets

CPU_TOKENS = 16384  # tokens of the cache on a CPU, unless one request needs more


class Room(NamedTuple):
    """The memory of an engine, without the weights."""

    context: int  # maximum tokens of a request
    pages: int  # pages of the cache, the null block included
    scratch: int = 0  # bytes that the largest step takes; graphs have them from the first capture on


class Workspace(NamedTuple):
    """Bytes that the largest passes allocate."""

    step: int
    prefill: int
    held: int  # what a prefill keeps between two of its slices

    @property
    def total(self) -> int:
        """The most bytes in use at a time. The graphs keep the memory of a step, while a pass over prompts runs, or a
        step that is about to be captured between two slices of such a pass."""
        return self.step + max(self.step + self.held, self.prefill)


def room_for_cache(
    runner: Callable[[Room], StepRunner], planner: Planner | None, options: EngineOptions, *, shorten: bool
) -> Room:
    """Returns the pages of the cache, the scratch of the largest step, and the longest request.

    On a GPU the cache gets what is left of `gpu_memory_utilization` after the weights, the graphs and the measured
    needs of a prefill chunk and of the largest step.

    Args:
        runner: makes a step runner with this room.
        planner: of these models; None on a CPU.
        options: from `fit`.
        shorten: whether requests may be limited to fewer tokens than `max_model_len`.

    Raises:
        UserError: a request of `max_model_len` tokens, `kv_cache_tokens`, or the largest step does not fit; the message
            says what is missing and which options help.
    """
    context, page = options.max_model_len or 0, options.page_size
    probe = runner(Room(context, pages=2))
    least = -(-probe.reach // page)
    wanted = None if options.kv_cache_tokens is None else -(-options.kv_cache_tokens // page)
    if planner is None:
        return Room(context, 1 + (wanted or max(least, min(probe.max_num_seqs * least, CPU_TOKENS // page))))
    plan, total = planner.plan(options), torch.cuda.mem_get_info(probe.device)[1]
    bytes_of_page = page * plan.token
    free, scratch = _cache_budget(probe, options, plan.graphs)
    pages = int(free // bytes_of_page) - 1
    if shorten and pages < least:
        fits = round_down(max(pages * page - (probe.reach - context), 0))
        if fits >= LEAST_CONTEXT:
            context, least = fits, pages
    if pages < (wanted or least):
        raise _too_small(planner, options, ((wanted or least) - pages) * bytes_of_page, total)
    # even a prefix cache has little use for more pages
    return Room(context, 1 + (wanted or min(pages, probe.max_num_seqs * least * 4)), scratch)


def _too_small(planner: Planner, options: EngineOptions, missing: float, total: int, held: int = 0) -> UserError:
    """Returns the error for a cache that lacks bytes for `kv_cache_tokens`, or for a request of `max_model_len`.

    Args:
        total: bytes of the GPU.
        held: those in use before anything was loaded.
    """
    ways_out = advice(planner, options, missing, options.memory_share(total), total)
    request = options.kv_cache_tokens is None
    what = f"one request of {options.max_model_len}" if request else f"a cache of {options.kv_cache_tokens}"
    others = f"; other programs and CUDA hold {size(held)}" if held > GIB else ""
    said = f"GPU memory is {size(max(missing, 1 << 20))} short of {what} tokens; {ways_out}{others}"
    return UnsupportedModel(said, gpus=2) if request else UserError(said)


@contextlib.contextmanager
def explain_out_of_memory(options: EngineOptions) -> Iterator[None]:
    """Raises UserError, naming the options that help, if an engine runs out of memory after its weights are loaded."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        copies = (
            "set draft_dtype to full, which keeps no fp8 copy of the head, or " if options.draft_dtype == "fp8" else ""
        )
        raise UserError(
            f"the weights leave too little GPU memory for the engine ({_first_sentence(error)}); {copies}lower "
            f"max_num_seqs, max_model_len or kv_cache_tokens{', or set draft_tree to 0' * bool(options.draft_tree)}"
        ) from error


@contextlib.contextmanager
def for_the_drafter(device: torch.device) -> Iterator[None]:
    """Raises UserError if the drafter's weights do not fit on the GPU."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise UserError(
            f"GPU memory does not hold the drafter's weights ({_first_sentence(error)}); {free / GIB:.1f} of "
            f"{total / GIB:.1f} GiB are free; stop other programs on this GPU, or use a smaller drafter or target"
        ) from error


def _first_sentence(error: torch.OutOfMemoryError) -> str:
    return " ".join(str(error).split()).partition(" Including")[0]


def check_weights(name: str, planner: Planner, device: torch.device, asked: EngineOptions | None = None) -> None:
    """Refuses a target if its weights with the smallest cache need more memory than the GPU has free.

    Args:
        asked: None: only the target's weights are checked.

    Raises:
        UnsupportedModel, UserError: the memory does not suffice.
    """
    free, total = free_memory(device)
    if (needed := planner.target_bytes) > free:
        less = planner.saved_in_fp8()
        smaller = f" (an FP8 target needs {size(less)} less)" if less else ""
        raise UnsupportedModel(
            f"target {name}: its weights take {needed / GIB:.1f} GiB and the GPU has {free / GIB:.1f} of "
            f"{total / GIB:.1f} GiB free, {(needed - free) / GIB:.1f} GiB too few; "
            f"use a smaller target{smaller}, or serve this one on several GPUs with vLLM or SGLang",
            # heads divide by a power of two; a quarter of each GPU is left for caches
            gpus=max(2, int(2 ** math.ceil(math.log2(needed / (0.75 * total))))),
        )
    if asked is not None:
        budget = Budget.of(asked, device).bytes
        options, plan = fit(asked, planner, budget, device)
        # the temporary tensors of a step are measured after loading
        if plan.certain + plan.graphs + plan.cache(options) > budget:
            raise _too_small(planner, options, plan.missing(options, budget), total, total - free)


def check_heads(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Raises UnsupportedModel if the kernels do not support attention heads of this size on this GPU."""
    head_dim = max(mixer.head_dim for mixer in spec.attention)
    if reason := unsupported_heads(device, head_dim, dtype):
        fits = dtype.itemsize > 2 and not unsupported_heads(device, head_dim, torch.bfloat16)
        smaller = "use dtype bfloat16, or " if fits else ""
        raise UnsupportedModel(
            f"attention heads of {head_dim} in {str(dtype).removeprefix('torch.')} need {reason}; "
            f"{smaller}serve the target with vLLM or SGLang"
        )


def _cache_budget(probe: StepRunner, options: EngineOptions, graphs: int) -> tuple[float, int]:
    """Returns the bytes that the cache may take next to these bytes of graphs, and the bytes of the largest step."""
    rows = options.max_num_batched_tokens or 0
    try:
        workspace = workspace_of(probe, chunk_size(rows))
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the weights leave too little GPU memory for a step of {probe.max_num_seqs} requests and a pass of {rows} "
            f"prompt tokens ({_first_sentence(error)}); lower max_num_seqs, num_speculative_tokens or "
            f"max_num_batched_tokens{', or set draft_tree to 0' * bool(options.draft_tree)}"
        ) from error
    except Exception as error:
        if type(error).__name__ != "OutOfResources":  # Triton's, which machines without a GPU may lack
            raise
        heads = max(mixer.head_dim for mixer in probe.target.spec.attention)
        raise UnsupportedModel(
            f"a kernel for heads of {heads} in {str(probe.dtype).removeprefix('torch.')} does not fit this GPU "
            f"({error}); use dtype bfloat16, or serve the target with vLLM or SGLang"
        ) from error
    return Budget.of(options, probe.device).bytes - workspace.total - graphs, workspace.step


def workspace_of(probe: StepRunner, chunk: int) -> Workspace:
    """Runs the largest passes once and measures their memory."""
    chunk = min(chunk, probe.pages_per_request * probe.page_size)

    def peak(run: Callable[[], object]) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with no_collection():
            held = torch.cuda.memory_allocated()
            run()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - held

    # a long chunk reads all pages of its request from an fp8 cache
    pages = probe.pages_per_request if probe.fp8_cache else -(-chunk // probe.page_size)
    job = PrefillJob([0] * chunk, pages * probe.page_size - chunk if probe.fp8_cache else 0, [1] * pages)
    scored = job._replace(scores=ScoredTokens([0] * chunk, MAX_LOGPROBS))
    held = 0

    def largest_prefill() -> None:
        nonlocal held
        jobs, before = [job] * (probe.prefill_limits.packed // chunk), torch.cuda.memory_allocated()
        work = probe.prefills.packed(jobs) if jobs else probe.prefills.unpadded(job)
        while not work.done:
            held = max(held, torch.cuda.memory_allocated() - before)
            work.run(0.0)

    prefill = max(peak(lambda: probe.prefills.unpadded(scored).run()), peak(largest_prefill))
    # a full step holds all logits several times
    step = peak(lambda: run_all_parts(probe, probe.max_num_seqs, probe.max_block, Mode.FULL))
    for chunks in probe.prefills.batch_shapes:  # the keys of short chunks may be split, which takes more
        step = max(step, peak(functools.partial(probe.prefills.run_empty_batch, *chunks)))
    if probe.trees is not None and (rows := row_buckets(probe.max_num_seqs)):
        largest = Part("tree", probe.max_num_seqs, probe.max_block, Mode.FULL, rows[-1])
        step = max(step, peak(lambda: probe.run_part(largest)))
    if probe.state.recurrent:  # compiles it now, and not between two steps
        step = max(step, peak(lambda: probe.copy_states(0, 0, 1)))
    return Workspace(step, prefill, held)
