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
from ..sampling import MAX_LOGPROBS
from .graphs import no_collection
from .options import EngineOptions
from .prefill_job import PrefillJob, ScoredTokens
from .programs.context import Part
from .prompts import chunk_size
from .runner import StepRunner
from .sampler import Mode
from .step_times import run_all_parts
from .trees.budget import row_buckets
from .weights import TargetWeights

GIB = 1 << 30
CPU_TOKENS = 16384  # tokens of the cache on a CPU, unless one request needs more
GRAPHS_BYTES = 1 * GIB  # memory of the driver, which no allocator reports: about 5 MiB per graph


class Room(NamedTuple):
    """The memory of an engine, without the weights."""

    pages: int  # pages of the cache, the null block included
    scratch: int = 0  # bytes that the largest step takes; graphs have them from the first capture on


class Workspace(NamedTuple):
    """Bytes that the largest passes allocate."""

    step: int
    prefill: int

    @property
    def total(self) -> int:
        """The most bytes in use at a time. The graphs keep the memory of a step, while a chunk of a prompt runs, or a
        step that is about to be captured."""
        return self.step + max(self.step, self.prefill)


def room_for_cache(
    runner: Callable[[Room], StepRunner],
    specs: list[ModelSpec],
    options: EngineOptions,
    context: int,
) -> Room:
    """Returns the pages of the cache, and the scratch of the largest step.

    On a GPU the cache gets what is left of `gpu_memory_utilization` after the weights and the measured needs of a
    prefill chunk and of the largest step.

    Args:
        runner: makes a step runner with this room.
        specs: of the target and, if any, the drafter.

    Raises:
        UserError: a request of `context` tokens, `kv_cache_tokens`, or the largest step does not fit; the message
            says what is missing and which option helps.
    """
    probe = runner(Room(pages=2))
    device, dtype_bytes = probe.device.type, probe.dtype.itemsize
    size = options.page_size
    least = -(-probe.reach // size)
    wanted = None if options.kv_cache_tokens is None else -(-options.kv_cache_tokens // size)
    if device == "cpu":
        return Room(1 + (wanted or max(least, min(probe.max_num_seqs * least, CPU_TOKENS // size))))
    bytes_of_page = size * sum(spec.kv_values_per_token for spec in specs) * dtype_bytes
    # a cache of a given size may use all memory
    share = options.gpu_memory_utilization if wanted is None else 1.0
    free, scratch = _cache_budget(probe, options, share)
    pages = int(free // bytes_of_page) - 1
    if pages < (wanted or least):
        raise _too_small(options, context, ((wanted or least) - pages) * bytes_of_page)
    # even a prefix cache has little use for more pages
    return Room(1 + (wanted or min(pages, probe.max_num_seqs * least * 4)), scratch)


def _too_small(options: EngineOptions, context: int, missing: float) -> UserError:
    """Returns the error for a cache that lacks bytes for `kv_cache_tokens`, or for a request of `context` tokens."""
    rows = "max_num_seqs or prefix_states" if options.prefix_states else "max_num_seqs"
    if options.kv_cache_tokens is None:
        what = f"one request of {context} tokens"
        now = options.gpu_memory_utilization
        way_out = f"lower max_model_len or {rows}, or raise gpu_memory_utilization (now {now})"
    else:
        what, way_out = f"a cache of {options.kv_cache_tokens} tokens", f"lower kv_cache_tokens or {rows}"
    said = f"GPU memory is {missing / GIB:.1f} GiB short of {what}; {way_out}{_without_trees(options)}"
    return UnsupportedModel(said, gpus=2) if options.kv_cache_tokens is None else UserError(said)


def _without_trees(options: EngineOptions) -> str:
    """Returns the end of a message for engines with draft trees."""
    return ", or set draft_tree to 0" if options.draft_tree else ""


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
            f"max_num_seqs, max_model_len or kv_cache_tokens{_without_trees(options)}"
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


def check_weights(
    name: str, specs: list[ModelSpec], device: torch.device, dtype: torch.dtype, options: EngineOptions | None = None
) -> None:
    """Refuses a target if its weights with the smallest cache need more memory than the GPU has free.

    Args:
        specs: of the target and, if any, the drafter.
        options: `fitted`; None: the cache is not checked.

    Raises:
        UnsupportedModel, UserError: the memory does not suffice.
    """
    if device.type != "cuda":
        return
    weights = TargetWeights.empty(specs[0], torch.device("meta"), dtype)
    needed = sum(view.nbytes for view in weights.parameter_views().values())
    free, total = torch.cuda.mem_get_info(device)
    if needed > free:
        raise UnsupportedModel(
            f"target {name}: its weights take {needed / GIB:.1f} GiB and the GPU has {free / GIB:.1f} of "
            f"{total / GIB:.1f} GiB free, {(needed - free) / GIB:.1f} GiB too few; "
            f"use a smaller target, or serve this one on several GPUs with vLLM or SGLang",
            # heads divide by a power of two; a quarter of each GPU is left for caches
            gpus=max(2, int(2 ** math.ceil(math.log2(needed / (0.75 * total))))),
        )
    if options is not None:  # a lower bound: the workspace of a step is measured later
        context = options.max_model_len or 0
        share = options.gpu_memory_utilization if options.kv_cache_tokens is None else 1.0
        cache = (options.kv_cache_tokens or context) * sum(spec.kv_values_per_token for spec in specs) * dtype.itemsize
        if (missing := cache + needed + total - free - share * total) > 0:
            raise _too_small(options, context, missing)


def check_heads(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Raises UnsupportedModel if the kernels do not support attention heads of this size on this GPU."""
    _, head_dim = spec.kv_heads
    if reason := unsupported_heads(device, head_dim, dtype):
        fits = dtype.itemsize > 2 and not unsupported_heads(device, head_dim, torch.bfloat16)
        smaller = "use dtype bfloat16, or " if fits else ""
        raise UnsupportedModel(
            f"attention heads of {head_dim} in {str(dtype).removeprefix('torch.')} need {reason}; "
            f"{smaller}serve the target with vLLM or SGLang"
        )


def _cache_budget(probe: StepRunner, options: EngineOptions, share: float) -> tuple[float, int]:
    """Returns the bytes that the cache may take from this share of the memory, and the bytes of the largest step."""
    cut = chunk_size(options.max_num_batched_tokens or 0)
    try:
        workspace = workspace_of(probe, cut)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the weights leave too little GPU memory for a step of {probe.max_num_seqs} requests and a chunk of {cut} "
            f"tokens ({_first_sentence(error)}); lower max_num_seqs, num_speculative_tokens or max_num_batched_tokens"
            f"{_without_trees(options)}"
        ) from error
    except Exception as error:
        if type(error).__name__ != "OutOfResources":  # Triton's, which machines without a GPU may lack
            raise
        heads = probe.target.spec.kv_heads[1]
        raise UnsupportedModel(
            f"a kernel for heads of {heads} in {str(probe.dtype).removeprefix('torch.')} does not fit this GPU "
            f"({error}); use dtype bfloat16, or serve the target with vLLM or SGLang"
        ) from error
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    taken = total - free
    # steps over trees add as many graphs in two modes, and half as many in a third one
    graphs = GRAPHS_BYTES if probe.trees is None else 5 * GRAPHS_BYTES // 2
    return share * total - taken - workspace.total - graphs, workspace.step


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

    pages = [1] * -(-chunk // probe.page_size)
    job = PrefillJob([0] * chunk, 0, pages, scores=ScoredTokens([0] * chunk, MAX_LOGPROBS))
    prefill = peak(lambda: probe.prefills.launch_unpadded(job))
    # a full step holds all logits several times
    step = peak(lambda: run_all_parts(probe, probe.max_num_seqs, probe.max_block, Mode.FULL))
    for chunks in probe.prefills.batch_shapes:  # the keys of short chunks may be split, which takes more
        step = max(step, peak(functools.partial(probe.prefills.run_empty_batch, *chunks)))
    if probe.trees is not None and (rows := row_buckets(probe.max_num_seqs)):
        largest = Part("tree", probe.max_num_seqs, probe.max_block, Mode.FULL, rows[-1])
        step = max(step, peak(lambda: probe.run_part(largest)))
    return Workspace(step, prefill)
