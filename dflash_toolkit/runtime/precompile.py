"""Compiles the kernels of an engine with all processors, before its first pass needs them.

On a new machine an engine needs some two hundred kernels, and one process compiles them for a minute. `precompile`
starts another process (`precompile_process.py`), which runs the passes of the engine on the device "meta". Their
launches only record what they would launch. Its processes compile that into Triton's cache, where the engine finds it.
"""

import contextlib
import json
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..kernels.features import Features, emulated, features_of
from ..models.dflash.config import DrafterConfig
from ..models.dflash.network import Drafter
from ..models.spec import ModelSpec
from .options import EngineOptions
from .plan import captured_parts, runner_arguments
from .precompile_process import framed
from .prefill_job import PrefillJob, ScoredTokens
from .programs.prefill import PREFILL_SIZES
from .prompts import chunk_size
from .runner import StepRunner
from .sampler import Mode
from .timing import digest_of, place_of
from .weights import DrafterWeights, TargetWeights

META = torch.device("meta")
LAYERS = 8  # layers of the target: at least one of each kind, with and without a tap
SAMPLED_ROWS = 2  # requests; sampling launches the same kernels for larger batches
MOST_PROCESSES = 32
LONGEST_S = 300.0
SHARES = 4  # shares of the passes, for each process
log = logging.getLogger(__name__)
_running: dict[Path, "subprocess.Popen[bytes]"] = {}  # by the file that it writes when all kernels are compiled


class Specialisation(NamedTuple):
    """A kernel for arguments of certain types, as Triton compiles it."""

    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]


def start(
    spec: ModelSpec, config: DrafterConfig | None, dtype: torch.dtype, options: EngineOptions, device: torch.device
) -> Path | None:
    """Starts to compile the kernels of an engine. Returns None if they are compiled, or if it would not help.

    Args:
        options: from `fit`.
    """
    processes = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    if device.type != "cuda" or processes < 2 or emulated() is not None:
        return None
    from triton import knobs

    job = spec, config, dtype, replace(options, retune=False, synthetic=None), features_of(device)
    done = Path(knobs.cache.dir) / f"dflash-{digest_of([place_of(device), torch.__version__, str(job)])}"
    if done.exists() or done in _running:
        return done if done in _running else None
    process = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.precompile_process", str(processes), str(done)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    _running[done] = process
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended; `precompile` reports why
        process.stdin.write(framed(pickle.dumps(job)))
        process.stdin.flush()
    return done


def precompile(
    spec: ModelSpec, config: DrafterConfig | None, dtype: torch.dtype, options: EngineOptions, device: torch.device
) -> None:
    """Waits until the kernels of an engine are compiled; starts to compile them first if necessary.

    Args:
        options: from `fit`.
    """
    if (done := start(spec, config, dtype, options, device)) is None:
        return
    log.info("compiling kernels; later starts find them in Triton's cache")
    process = _running.pop(done)
    for other in _running.values():  # for other options, before the memory was known
        _end(other)
    _running.clear()
    try:
        code, reason = process.wait(LONGEST_S), ""
    except subprocess.TimeoutExpired:
        code, reason = 1, f"it took more than {LONGEST_S:.0f} s"
    finally:
        said = _end(process)
    if code:
        reason = reason or (said.splitlines() or [f"exit code {code}"])[-1]
        log.warning("steps compile their kernels, as compiling them ahead failed: %s", reason)


def _end(process: "subprocess.Popen[bytes]") -> str:
    """Kills a process with those that it has started, if it runs. Returns what it wrote to stderr."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()[1].decode(errors="replace").strip()


# ---- in the process --------------------------------------------------------------------------------------------------


class Driver:
    """A driver with the properties of a GPU that Triton's launcher reads before it compiles."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = 10 * capability[0] + capability[1]

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # each target has specialisations of its own

    def get_current_stream(self, device: int) -> int:
        return 0


class Unlaunched:
    """A kernel that is never launched."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        pass

    def run(self, *_: object) -> None:
        pass


def launch_on_meta(card: Features) -> None:
    """Makes tensors on the device "meta" launch the kernels of a GPU with these features. Not reversible."""
    from triton.runtime import driver

    from ..kernels import features, launch
    from ..kernels.hopper import conv_layer, layer

    features._features.update({META: card, torch.device("cpu"): card})
    launch.multiprocessors.cache_clear()
    driver.set_active(Driver(card.capability))
    for module in (layer, conv_layer):
        vars(module)["_barriers"] = lambda _: torch.empty(layer.BARRIERS, dtype=torch.int32, device=META)


def meta_runner(
    spec: ModelSpec, config: DrafterConfig | None, dtype: torch.dtype, options: EngineOptions
) -> StepRunner:
    """Returns the runner of an engine with fewer layers, on the device "meta"."""
    from ..kernels.gpu import Gpu

    taps = len(config.target_layer_ids) if config else 0
    target = TargetWeights.empty(replace(spec, layers=spec.layers[: max(LAYERS, taps + 1)]), META, dtype)
    drafter = None
    if config is not None:
        with META:
            module = Drafter(replace(config, target_layer_ids=tuple(range(taps)))).to(dtype)
        drafter = DrafterWeights.of_module(module)
        if options.draft_dtype == "fp8":
            drafter = drafter.quantized(target.head)
    arguments = runner_arguments(options, config)
    # on a GPU a request has room for the block of one more step
    arguments["max_context"] += arguments["max_block"]
    return StepRunner(target, drafter, Gpu(), num_pages=2, **arguments)


def passes_of(
    runner: StepRunner, config: DrafterConfig | None, options: EngineOptions
) -> Iterator[Callable[[], object]]:
    """Yields the passes that an engine captures and those that it measures; together they launch its kernels."""
    prefills = runner.prefills
    for size in (size for size in PREFILL_SIZES if size <= runner.reach):
        yield partial(prefills.padded, size)
    for shape in prefills.batch_shapes:
        yield partial(prefills.run_empty_batch, *shape)
    chunk = min(chunk_size(options.max_num_batched_tokens or 0), runner.pages_per_request * runner.page_size)
    job = PrefillJob([0] * chunk, 0, [1] * -(-chunk // runner.page_size))
    scored = job._replace(scores=ScoredTokens([0] * chunk, 1))
    yield lambda: prefills.unpadded(scored).run()
    for shape in prefills.uncaptured_shapes:
        yield partial(prefills.run_empty, *shape)
    for part in captured_parts(options, config, runner.max_num_seqs, runner.trees.nodes if runner.trees else 0):
        if part.mode == Mode.GREEDY or part.rows <= SAMPLED_ROWS:
            yield partial(runner.run_part, part)


_passes: list[Callable[[], object]] = []  # the processes of the pool inherit them


@torch.inference_mode()
def _record(share: slice) -> dict[str, Specialisation]:
    """Returns the kernels that a share of the passes would launch, without launching them, by a name of each."""
    from triton import knobs

    found: dict[str, Specialisation] = {}

    def record(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        described = json.loads(compile["specialization_data"])
        options = {name: tuple(each) if isinstance(each, list) else each for name, each in described["options"].items()}
        arguments = compile["signature"], compile["constants"], compile["configs"][0]
        found[compile["specialization_data"]] = Specialisation(fn.module, fn.name, *arguments, options)
        fn.jit_function.device_caches[compile["device"]][0][compile["key"]] = Unlaunched()
        return True  # do not compile it

    knobs.runtime.jit_cache_hook = record
    for run in _passes[share]:
        try:
            run()
        except Exception:
            log.debug("a pass cannot run on the device meta", exc_info=True)
    return found


def _compile(each: Specialisation) -> None:
    from triton.runtime import driver

    kernel: Any = getattr(sys.modules[each.module], each.name.rpartition(".")[2])
    _, _, target, *_ = kernel.device_caches[driver.active.get_current_device()]
    try:
        source = kernel.ASTSource(kernel, each.signature, each.constants, each.attributes)
        kernel.compile(source, target=target, options=each.options)
    except Exception:
        log.debug("%s does not compile", each.name, exc_info=True)  # the engine reports it, if it needs this one


def compile_all(job: bytes, processes: int, done: Path) -> None:
    """Compiles the kernels of an engine and creates the file `done`."""
    spec, config, dtype, options, card = pickle.loads(job)
    launch_on_meta(card)
    runner = meta_runner(spec, config, dtype, options)
    _passes.extend(passes_of(runner, config, options))
    count = processes * SHARES
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        recorded = [pool.submit(_record, slice(i, None, count)) for i in range(count)]
        known, compiled = set[str](), []
        for share in as_completed(recorded):
            found = share.result()
            compiled += [pool.submit(_compile, each) for name, each in found.items() if name not in known]
            known.update(found)
        for each in compiled:
            each.result()
    done.parent.mkdir(parents=True, exist_ok=True)
    done.touch()
