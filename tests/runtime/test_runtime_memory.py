"""If something does not fit on a GPU, one line says how much memory is missing and which option helps."""

import contextlib
import functools
import gc
import math
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_drafter, make_target
from other_gpus import use_gpu

from dflash_toolkit import Drafter, SamplingParams, Target, UserError
from dflash_toolkit.config import UnsupportedModel
from dflash_toolkit.evaluation.measure import pairs as runtimes
from dflash_toolkit.kernels.features import KNOWN
from dflash_toolkit.models import device as devices
from dflash_toolkit.models import target_files
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.spec import ModelSpec
from dflash_toolkit.preflight import GIB
from dflash_toolkit.runtime import EngineOptions, SyntheticAcceptance, load_engine, memory
from dflash_toolkit.runtime import engine as engine_module
from dflash_toolkit.runtime import load as loading
from dflash_toolkit.runtime.fit import Budget, fit
from dflash_toolkit.runtime.memory import Room, Workspace, check_weights, room_for_cache
from dflash_toolkit.runtime.plan import Planner
from dflash_toolkit.runtime.prefill_job import PrefillLimits
from dflash_toolkit.runtime.programs.context import Part
from dflash_toolkit.runtime.programs.prefill import PREFILL_SIZES
from dflash_toolkit.runtime.request import Request, StepShape
from dflash_toolkit.runtime.runner import StepRunner
from dflash_toolkit.runtime.step_times import launcher
from dflash_toolkit.runtime.weights import DrafterWeights, TargetWeights
from dflash_toolkit.train.responses import backends
from scripts.shapes import named_shape

TOTAL, WEIGHTS, WORKSPACE = 24 * GIB, 18 * GIB, GIB // 2
STEP, CUDA = GIB // 5, torch.device("cuda")
CONFIG = named_shape("qwen3-8b")
PLANNER = Planner(ModelSpec.of_target(CONFIG), drafter_shape(CONFIG), torch.bfloat16, fused=False)
OPTIONS = EngineOptions(max_num_seqs=4, max_model_len=1000, draft_tree=0).fitted(PLANNER.spec, PLANNER.config, CUDA)
GRAPHS = PLANNER.plan(OPTIONS).graphs
PAGE_BYTES = 64 * PLANNER.plan(OPTIONS).token


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 24 GiB with weights of 18 GiB; passes take half a GiB."""
    use_gpu(monkeypatch, (8, 6))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (TOTAL - WEIGHTS, TOTAL))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(memory, "workspace_of", lambda *_: Workspace(STEP, WORKSPACE - STEP, 0))


def raises(error: Exception) -> Callable[..., Any]:
    def function(*_: object, **__: object) -> Any:
        raise error

    return function


full = raises(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has 1 GiB. Including x"))


def refused(said: str) -> pytest.RaisesExc[UserError]:
    return pytest.raises(UserError, match=said)


def runner(room: Room) -> Any:
    target = SimpleNamespace(spec=SimpleNamespace(attention=[SimpleNamespace(head_dim=128)]))
    reach = room.context + 3 * 16
    return SimpleNamespace(device=CUDA, dtype=torch.bfloat16, max_num_seqs=4, reach=reach, target=target, trees=None)


def room_of(options: EngineOptions = OPTIONS, *, shorten: bool = False) -> Room:
    room = room_for_cache(runner, PLANNER, options, shorten=shorten)
    assert room.scratch == STEP
    return room


@pytest.mark.usefixtures("gpu")
def test_kv_cache_gets_the_remaining_share_of_memory() -> None:
    left = 0.95 * TOTAL - WEIGHTS - WORKSPACE - GRAPHS
    assert room_of(replace(OPTIONS, max_model_len=10000)).pages == int(left // PAGE_BYTES)
    assert room_of().pages == 1 + 4 * 4 * (-(-(1000 + 3 * 16) // 64)), "and no more than is of use"


@pytest.mark.usefixtures("gpu")
def test_oversized_request_error_says_what_each_option_frees() -> None:
    left = 0.95 * TOTAL - WEIGHTS - WORKSPACE - GRAPHS
    long = replace(OPTIONS, max_model_len=40000, max_num_batched_tokens=2048)
    missing = (-(-(40000 + 48) // 64) + 1) * PAGE_BYTES - left
    with refused("one request of 40000 tokens; --max-model-len") as caught:
        room_of(long)
    said = str(caught.value)
    assert float(said.split()[3]) == pytest.approx(missing / GIB, abs=0.1)
    assert isinstance(caught.value, UnsupportedModel) and caught.value.gpus == 2, "more GPUs would hold it"
    fits = int(re.findall(r"--max-model-len (\d+)", said)[0])
    assert room_of(replace(long, max_model_len=fits)).context == fits > 16000
    assert said.endswith("an FP8 target needs 6.5 GiB less") and "gpu-memory-utilization" not in said
    with refused(r"--gpu-memory-utilization 0.95 gives 2.4 GiB"):
        room_of(replace(long, gpu_memory_utilization=0.85))
    with refused(r"--draft-tree 0 frees \d\.\d GiB, --max-num-seqs 1 frees \d\.\d GiB"):
        room_of(replace(long, draft_tree=63))


@pytest.mark.usefixtures("gpu")
def test_a_default_context_is_lowered_to_what_was_measured() -> None:
    room = room_of(replace(OPTIONS, max_model_len=40000), shorten=True)
    left = 0.95 * TOTAL - WEIGHTS - WORKSPACE - GRAPHS
    most = int(left // PAGE_BYTES - 1) * 64 - 48
    assert 0.85 * most < room.context <= most and room.context % 1024 == 0
    assert room.pages == int(left // PAGE_BYTES)


@pytest.mark.usefixtures("gpu")
def test_a_cache_of_a_given_size_may_use_all_memory() -> None:
    pages = int((TOTAL - WEIGHTS - WORKSPACE - GRAPHS) // PAGE_BYTES) - 1
    assert room_of(replace(OPTIONS, kv_cache_tokens=64 * pages)).pages == pages + 1
    with refused(rf"1\.6 GiB .*cache of \d+ tokens; --kv-cache-tokens {64 * pages} frees 1\.6 GiB"):
        room_of(replace(OPTIONS, kv_cache_tokens=64 * (pages + 160)))


@pytest.mark.usefixtures("gpu")
def test_a_step_that_does_not_fit_names_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "workspace_of", full)
    with refused(r"step of 4 requests .*Tried to allocate 3.00 GiB.*; lower max_num_seqs, num_spec"):
        room_of()


@pytest.mark.usefixtures("gpu")
def test_a_kernel_that_does_not_fit_the_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("triton.runtime.errors")

    monkeypatch.setattr(memory, "workspace_of", raises(errors.OutOfResources(180480, 166912, "shared memory")))
    with refused(r"heads of 128 in bfloat16 .*shared memory.*use dtype bfloat16, or") as caught:
        room_of()
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(memory, "workspace_of", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        room_of()


@pytest.mark.parametrize(("where", "draft_dtype"), [("copies", "fp8"), ("cache", "fp8"), ("cache", "full")])
def test_an_engine_that_finds_no_memory_names_its_options(where: str, draft_dtype: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(DrafterWeights, "quantized", full if where == "copies" else lambda self, head: self)
    if where == "cache":
        monkeypatch.setattr(engine_module, "StepRunner", full)
    target = make_target()
    with refused(r"Tried to allocate 3.00 GiB.*lower max_num_seqs, max_model_len") as caught:
        load_engine(target, make_drafter(target), options=EngineOptions(max_num_seqs=2, draft_dtype=draft_dtype))
    assert ("set draft_dtype to full" in str(caught.value)) == (draft_dtype == "fp8")


@pytest.mark.usefixtures("gpu")
def test_the_memory_of_a_deleted_engine_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch keeps it until its cache is emptied; the driver does not count it as free."""
    free = [0]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(TOTAL))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free[-1], TOTAL))
    assert Budget.of(OPTIONS, CUDA).free == TOTAL
    del free[1:]
    check_weights("T", PLANNER, CUDA)


@pytest.mark.usefixtures("gpu")
def test_weights_larger_than_the_gpu_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(ModelSpec.of_target(make_target(tied=False).config), None, torch.float32, fused=False)
    needed = planner.target_bytes
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_, free=free: (free, TOTAL))
        if fits:
            check_weights("T", planner, CUDA)
            continue
        with refused(r"target T: its weights take .* of 24.0 GiB free"):
            check_weights("T", planner, CUDA)
    for total, gpus in ((needed, 2), (needed // 2, 4), (needed // 8, 16)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_, total=total: (0, total))
        with pytest.raises(UnsupportedModel) as caught:
            check_weights("T", planner, CUDA)
        assert caught.value.gpus == gpus, "with a quarter of each left to caches"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (11 * GIB, 12 * GIB))
    with refused(r"use a smaller target \(an FP8 target needs 6.5 GiB less\)"):
        check_weights("T", PLANNER, CUDA)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("asked", "said"), [
    (EngineOptions(max_model_len=300, gpu_memory_utilization=1.0), "one request of 300 tokens; "),
    (EngineOptions(gpu_memory_utilization=1.0), "one request of 128 tokens; "),
    (EngineOptions(max_model_len=300, kv_cache_tokens=900), "a cache of 900 tokens; "),
])  # fmt: skip
def test_cache_that_cannot_fit_is_refused_before_loading(
    asked: EngineOptions, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target()
    target.config.max_position_embeddings = max(asked.max_model_len or 0, 128)
    planner = Planner(ModelSpec.of_target(target.config), make_drafter(target).config, torch.float32, fused=False)
    options, plan = fit(asked, planner, 0, CUDA)
    needed = plan.certain + plan.graphs + plan.cache(options)
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_, free=free: (free, TOTAL))
        with contextlib.nullcontext() if fits else refused(rf"GPU memory is \d\.\d GiB short of {said}"):
            check_weights("T", planner, CUDA, asked)


# ---- GPUs that cannot run the kernels ----------------------------------------------------------------------------


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the GPU by one of a capability, with so many KiB of shared memory."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")
    use_gpu(monkeypatch, (9, 0))
    return functools.partial(use_gpu, monkeypatch)


def test_only_a_gpu_before_sm_80_is_refused(card: Callable[..., None]) -> None:
    pytest.importorskip("triton")
    for known in KNOWN.values():
        card(known.capability)
        engine_module.operations(torch.device("cuda"))
    card((7, 5), 64)
    with refused("Some GPU has compute capability 7.5; .* 8.0 or higher for bfloat16 matrix products"):
        engine_module.operations(torch.device("cuda"))


@pytest.mark.parametrize(("width", "dtype", "shared", "way_out"), [
    (128, torch.float32, 227, None),
    (128, torch.float32, 163, None),
    (256, torch.float32, 99, None),
    (512, torch.bfloat16, 99, None),
    (512, torch.float32, 163, "use dtype bfloat16, or serve the target with vLLM or SGLang"),
    (1024, torch.bfloat16, 99, "has 99; serve the target with vLLM or SGLang"),
    (1024, torch.float32, 99, "has 99; serve the target with vLLM or SGLang"),  # for bfloat16 is also refused
])  # fmt: skip
def test_unsupported_heads_are_refused_before_loading(
    width: int, dtype: torch.dtype, shared: int, way_out: str | None, card: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pytest.importorskip("triton")
    card((9, 0), shared)
    target = make_target()
    target.config.head_dim = width
    loaded = []
    monkeypatch.setattr(TargetWeights, "load", lambda *_: loaded.append(1))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (TOTAL, TOTAL))
    monkeypatch.setattr(loading, "locate", lambda what, name: Path(name))
    monkeypatch.setattr(devices, "use_device", lambda _: torch.device("cuda"))
    for name, found in (
        ("load_config", target.config), ("load_generation_config", None), ("load_tokenizer", target.tokenizer),
    ):  # fmt: skip
        monkeypatch.setattr(target_files, name, lambda *_, found=found: found)
    monkeypatch.setattr(engine_module, "operations", lambda _: None)

    said = rf"attention heads of {width} in \w+ need \d+ KiB of shared memory .*{way_out}"
    with refused(said) if way_out else contextlib.nullcontext():
        loading.load_parts("T", dtype=str(dtype).removeprefix("torch."))
    assert bool(loaded) == (way_out is None)


def test_a_drafters_heads_are_checked_before_loading(
    card: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    card((9, 0), 163)
    target, device = make_target(), torch.device("cuda")
    drafter = make_drafter(target, head_dim=1024)
    monkeypatch.setattr(TargetWeights, "load", lambda *_: pytest.fail("the target is loaded"))
    for module in (backends, runtimes, loading, engine_module, devices, target_files):
        for name, found in (("load_config", target.config), ("use_device", device), ("resolve_dtype", torch.bfloat16),
                            ("load_tokenizer", target.tokenizer), ("read_drafter", drafter), ("operations", None),
                            ("read_drafter_config", drafter.config)):  # fmt: skip
            monkeypatch.setattr(module, name, lambda *_, found=found, **_options: found, raising=False)
    said = r"attention heads of 1024 in bfloat16 need \d+ KiB"
    with refused(said):
        loading.load_engine("T", "D")
    with refused(said):
        runtimes.EnginePair.load("T", drafter)
    with refused(said):
        backends.open_decoder("T", runtime="engine", drafter="D", batch=1, context=100)
    monkeypatch.setattr(Target, "load", lambda *_: target)
    backend = backends.open_decoder("T", runtime="auto", drafter="D", batch=1, context=100)
    assert isinstance(backend, backends.BatchedDecoder)
    assert "the engine cannot: attention heads of 1024" in capsys.readouterr().err


@pytest.mark.usefixtures("gpu")
def test_a_drafter_that_finds_no_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_toolkit.models.dflash.checkpoint.load_drafter", full)
    with refused(r"the drafter's weights \(CUDA out of memory. Tried .*\); 6.0 of 24.0 GiB are free"):
        loading.read_drafter("D", make_target().config, torch.device("cuda"), torch.bfloat16)


def test_a_drafter_is_in_memory_once_while_the_target_loads(
    target_dir: Path, drafter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = list[Any]()
    read, load = loading.read_drafter, TargetWeights.load

    def noted(*args: Any) -> Drafter:
        modules.append(weakref.ref(module := read(*args)))
        return module

    def checked(*args: Any) -> TargetWeights:
        gc.collect()
        assert [each() for each in modules] == [None]
        return load(*args)

    monkeypatch.setattr(loading, "read_drafter", noted)
    monkeypatch.setattr(TargetWeights, "load", checked)
    assert loading.load_parts(str(target_dir), str(drafter_dir)).drafter is not None


@pytest.mark.usefixtures("card")
def test_kernels_without_triton_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("dflash_toolkit.kernels.gpu", raising=False)
    monkeypatch.setitem(sys.modules, "dflash_toolkit.kernels.gpu", None)
    with refused(r"pip install 'dflash-toolkit\[gpu\]'"):
        engine_module.operations(torch.device("cuda"))


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (12, 0)])
def test_fp8_drafts_run_on_every_supported_gpu(card: Callable[..., None], capability: tuple[int, int]) -> None:
    card(capability)
    options = EngineOptions(draft_dtype="fp8", max_model_len=100)
    fitted = options.fitted(ModelSpec.of_target(make_target().config), None, torch.device("cuda"))
    assert fitted.draft_dtype == "fp8"


@pytest.mark.parametrize(("more", "named"), [({}, True), ({"draft_tree": 0}, False), ({"draft_tree_width": 1}, False)])
def test_a_small_cache_names_draft_trees_if_they_cause_it(more: Any, named: bool) -> None:
    config = named_shape("qwen3-8b")
    options = EngineOptions(max_model_len=4096, kv_cache_tokens=4096, **more)
    with refused("kv_cache_tokens, .*max_model_len to ") as caught:
        options.fitted(ModelSpec.of_target(config), drafter_shape(config), torch.device("cuda"))
    assert ("or set draft_tree to 0" in str(caught.value)) == named


@pytest.mark.parametrize(
    ("shape", "device", "asked", "nodes"),
    [
        pytest.param("qwen3-8b", "cuda", {}, 63, id="dense"),
        pytest.param("qwen3-8b-fp8", "cuda", {}, 63, id="dense in fp8"),
        pytest.param("qwen3-4b", "cuda", {}, 63, id="a smaller one"),
        pytest.param("qwen2.5-0.5b", "cuda", {}, 0, id="too small"),
        pytest.param("qwen2.5-0.5b", "cuda", {"draft_tree": 32}, 32, id="small, but wanted"),
        pytest.param("qwen3-8b", "cuda", {"draft_tree": 0}, 0, id="not wanted"),
        pytest.param("qwen3-8b", "cuda", {"draft_tree_width": 1}, 15, id="chains"),
        pytest.param("qwen3-8b", "cuda", {"num_speculative_tokens": 7}, 0, id="a fixed length"),
        pytest.param("qwen3-8b", "cuda", {"draft_sample_method": "probabilistic"}, 0, id="sampled drafts"),
        pytest.param("qwen3-8b", "cuda", {"synthetic": SyntheticAcceptance(rate=0.5)}, 0, id="dice"),
        pytest.param("qwen3-8b", "cpu", {}, 0, id="a CPU"),
        pytest.param("qwen3.8-27b", "cuda", {}, 63, id="recurrent layers"),
        pytest.param("qwen3-30b-a3b", "cuda", {}, 0, id="experts"),
    ],
)
def test_trees_are_the_default_where_they_pay(shape: str, device: str, asked: dict[str, Any], nodes: int) -> None:
    config = named_shape(shape)
    spec, drafter = ModelSpec.of_target(config), drafter_shape(config)
    for each in (drafter, replace(drafter, selector_rank=256, selector_top_k=16)):
        assert EngineOptions(**asked).fitted(spec, each, torch.device(device)).draft_tree == nodes
    assert EngineOptions().fitted(spec, None, torch.device(device)).draft_tree == 0, "without a drafter"


@pytest.mark.parametrize(
    ("asked", "capability", "dtype", "found"),
    [
        ("auto", (9, 0), torch.bfloat16, "fp8"),
        ("auto", (9, 0), torch.float16, "full"),
        ("auto", (12, 0), torch.bfloat16, "fp8"),
        ("auto", (8, 9), torch.bfloat16, "fp8"),
        ("auto", (8, 6), torch.bfloat16, "full"),
        ("full", (9, 0), torch.bfloat16, "full"),
        ("fp8", (8, 9), torch.float16, "fp8"),
    ],
)
def test_drafts_are_in_fp8_where_that_is_faster(
    asked: str, capability: tuple[int, int], dtype: torch.dtype, found: str, card: Callable[..., None]
) -> None:
    card(capability)
    assert engine_module.resolve_draft_dtype(asked, torch.device("cuda"), dtype) == found
    assert engine_module.resolve_draft_dtype("auto", torch.device("cpu"), dtype) == "full"


def test_a_failed_capture_leaves_the_batch_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step runs before it is captured; if it counted, the device would be ahead of the host's pages."""
    target = make_target()
    options = EngineOptions(max_num_seqs=2, page_size=16, num_speculative_tokens=7, kv_cache_tokens=600)
    engine = load_engine(target, make_drafter(target), options=options)[0]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    expected = engine.generate([[1, 2, 3]], params)[0].tokens
    runner, failures = engine.runner, 1  # alone it is captured

    def captured(run: Callable[[], Any]) -> tuple[Any, Any]:
        nonlocal failures
        result = run()
        if failures:
            failures -= 1
            raise torch.OutOfMemoryError("no room for the graph")
        return None, result

    def decode(requests: Sequence[Request], shape: StepShape) -> Any:  # as on a GPU
        runner.graph(Part("step", runner.bucket(len(requests)), shape.block))
        return StepRunner.decode(runner, requests, shape)

    monkeypatch.setattr(runner.graphs, "capture", captured)
    monkeypatch.setattr(runner, "decode", decode)
    request = engine.submit([1, 2, 3], params)
    while not request.finished:
        engine.step()
    assert failures == 0 and request.tokens == expected


def test_garbage_does_not_hide_the_memory_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unused engine was collected during the largest step, which then seemed to take less memory."""
    held = peak = 0

    class Block:
        def __init__(self, size: int) -> None:
            nonlocal held, peak
            self.size, self.itself = size, self  # a cycle
            held += size
            peak = max(peak, held)

        def __del__(self) -> None:
            nonlocal held
            held -= self.size

    def takes(size: int) -> Callable[..., None]:
        def run(*_: Any) -> None:
            rubbish = [[] for _ in range(3 * gc.get_threshold()[0])]  # enough for a collection
            rubbish.append([Block(size)])

        return run

    def reset() -> None:
        nonlocal peak
        peak = held

    for name, fake in {
        "synchronize": lambda: None, "empty_cache": lambda: None, "reset_peak_memory_stats": reset,
        "memory_allocated": lambda: held, "max_memory_allocated": lambda: peak,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)

    class Pass:
        """Keeps 20 after its first slice."""

        def __init__(self, *_: Any) -> None:
            self.slices = [takes(20), takes(0)]

        @property
        def done(self) -> bool:
            return not self.slices

        def run(self, seconds: float = math.inf) -> None:
            while self.slices:
                self.slices.pop(0)()
                if not seconds:
                    break

    probe: Any = SimpleNamespace(
        pages_per_request=4, page_size=64, fp8_cache=False, max_num_seqs=1, max_block=16, trees=None
    )
    probe.prefills = SimpleNamespace(batch_shapes=[], unpadded=Pass, packed=Pass)
    probe.prefill_limits, probe.state = PrefillLimits(), SimpleNamespace(recurrent=False)
    monkeypatch.setattr(memory, "run_all_parts", takes(60))
    gc.collect()
    Block(1000)
    assert memory.workspace_of(probe, 512) == Workspace(step=60, prefill=20, held=20)
    probe.prefills.batch_shapes = [(64, 2), (64, 8), (256, 4)]
    probe.prefills.run_empty_batch = lambda size, count: takes(70 if (size, count) == (64, 8) else 50)()
    assert memory.workspace_of(probe, 512) == Workspace(step=70, prefill=20, held=20), "graphs share their memory"
    probe.state.recurrent, probe.copy_states = True, takes(75)
    assert memory.workspace_of(probe, 512).step == 75
    gc.collect()
    assert held == 0


@pytest.mark.gpu
def test_graphs_find_their_scratch_allocated() -> None:
    from gpu_engines import VOCAB, make_engine, pair

    target, drafter = pair()
    engine = make_engine(target, drafter, max_num_seqs=32)
    launcher(engine.runner, 1, StepShape(1))
    captures: Any = engine.runner.graphs.capture
    first = captures._first
    assert first is not None, "the first capture takes the scratch"

    def held() -> int:
        """Bytes of the graphs' pool."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(first.pool()))

    taken, captured = held(), 0
    largest = memory.workspace_of(engine.runner, 512).step
    assert taken >= largest > 32 * 16 * VOCAB * 2
    while engine.prepare():
        captured += 1
    parts = 2 * 6 + 1  # plain, and with a draft: a step, to read, to end, to choose in three modes; to propose
    prefills = len(PREFILL_SIZES) + len(engine.runner.prefills.batch_shapes)
    assert captured == prefills + parts * 7 - 1, "buckets up to 32; one was there"
    assert held() - taken <= 16 << 20, "what is smaller than a MiB, and what graphs return"
