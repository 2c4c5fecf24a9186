"""The kernels of an engine are compiled ahead, for a GPU that this machine lacks."""

import json
import logging
import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from transformers import Qwen3Config

pytest.importorskip("triton")

from dflash_toolkit.kernels import features
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.spec import ModelSpec
from dflash_toolkit.runtime import precompile as precompiling
from dflash_toolkit.runtime.options import EngineOptions

CUDA = torch.device("cuda", 0)
COMPILE_ALL = """
import json, pickle, sys, torch
from triton import knobs
from triton.runtime.jit import JITFunction
from dflash_toolkit.runtime.precompile import launch_on_meta, meta_runner, passes_of

spec, config, dtype, options, card = pickle.load(sys.stdin.buffer)
launch_on_meta(card)
run, hits = JITFunction.run, []
JITFunction.run = lambda kernel, *args, warmup, **more: run(kernel, *args, warmup=True, **more)
knobs.compilation.listener = lambda *, src, cache_hit, **_: hits.append((src.name, cache_hit))
with torch.inference_mode():
    for each in passes_of(meta_runner(spec, config, dtype, options), config, options):
        each()
print(json.dumps(hits))
"""


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Any, ...]:
    """A tiny engine on an RTX 3090, and two processors. Its few kernels compile in seconds."""
    monkeypatch.setitem(features._features, CUDA, features.KNOWN["sm_86"])
    monkeypatch.setattr(precompiling, "place_of", lambda device: "a GPU")
    monkeypatch.setattr(precompiling.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(precompiling, "MOST_PROCESSES", 2)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = Qwen3Config(
        hidden_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        intermediate_size=512, vocab_size=1024, max_position_embeddings=512,
    )  # fmt: skip
    spec, shape = ModelSpec.of_target(config), drafter_shape(config, layers=1, taps=1, block_size=2)
    options = EngineOptions(
        max_num_seqs=1, max_model_len=32, draft_tree=0, max_num_batched_tokens=64, draft_dtype="full"
    )
    return spec, shape, torch.bfloat16, options.fitted(spec, shape, CUDA), CUDA


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_finds_all_its_kernels_compiled(job: tuple[Any, ...], caplog: pytest.LogCaptureFixture) -> None:
    precompiling.precompile(*job)
    assert not caplog.records
    command = [sys.executable, "-c", COMPILE_ALL]
    given = pickle.dumps((*job[:-1], features.KNOWN["sm_86"]))
    hits = json.loads(subprocess.run(command, input=given, capture_output=True, check=True).stdout)
    assert len(hits) > 10 and [name for name, hit in hits if not hit] == []
    assert precompiling.start(*job) is None, "they are not compiled again"


def test_other_options_are_compiled_again(job: tuple[Any, ...]) -> None:
    first = precompiling.start(*job)
    assert first is not None and precompiling.start(*job) == first, "the same process"
    spec, shape, dtype, options, device = job
    other = precompiling.start(spec, shape, dtype, replace(options, max_num_seqs=2), device)
    assert other is not None and other != first
    for done in (first, other):
        precompiling._end(precompiling._running.pop(done))


def test_the_process_ends_with_its_input(job: tuple[Any, ...]) -> None:
    done = precompiling.start(*job)
    assert done is not None
    process = precompiling._running.pop(done)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL and not done.exists()


def test_a_failure_is_one_line(job: tuple[Any, ...], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        precompiling.precompile(*job[:2], "nonsense", *job[3:])  # type: ignore[arg-type]
    (record,) = caplog.records
    assert "compiling them ahead failed" in record.message and "TypeError: " in record.message
    assert "\n" not in record.message


def test_nothing_is_compiled_ahead_on_a_cpu(job: tuple[Any, ...]) -> None:
    assert precompiling.start(*job[:-1], torch.device("cpu")) is None
