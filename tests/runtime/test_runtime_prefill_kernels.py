"""Passes of prompts without a graph need no kernels but those that are compiled at the start."""

import json
import os
import subprocess
import sys

import pytest
from paths import ROOT

pytest.importorskip("triton")

MISSING = """
import json, os, random, sys, torch
from transformers import Qwen3Config
from triton import knobs
from dflash_toolkit.kernels import features
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.spec import ModelSpec
from dflash_toolkit.runtime import precompile
from dflash_toolkit.runtime.options import EngineOptions
from dflash_toolkit.runtime.prefill_job import PrefillJob

real = torch.Tensor.data_ptr
torch.Tensor.data_ptr = lambda t: t.storage_offset() * t.element_size() if t.device.type == "meta" else real(t)
first, second, seed = sys.argv[1:]
card, cuda = features.KNOWN[first if os.fork() else second], torch.device("cuda", 0)
features._features[cuda] = card
config = Qwen3Config(
    hidden_size=1024, num_hidden_layers=3, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    intermediate_size=1024, vocab_size=1024, max_position_embeddings=4096,
)
spec, shape = ModelSpec.of_target(config), drafter_shape(config, layers=1, taps=1)
options = EngineOptions(max_num_seqs=128, max_model_len=4000, draft_tree=0, max_num_batched_tokens=8192)
options = options.fitted(spec, shape, cuda)
found = []

def record(*, fn, compile, **_):
    found.append(fn.name.rpartition(".")[2])
    fn.jit_function.device_caches[compile["device"]][0][compile["key"]] = precompile.Unlaunched()
    return True

precompile.launch_on_meta(card)
knobs.runtime.jit_cache_hook = record
with torch.inference_mode():
    runner = precompile.meta_runner(spec, shape, torch.bfloat16, options)
    prefills = runner.prefills
    for each in prefills.uncaptured_shapes:
        prefills.run_empty(*each)
    known = len(found)
    dice = random.Random(int(seed))
    for _ in range(40):
        count = dice.choice([1, 2, 3, 8, 9, 20, 31, 33, 64, 70, 127])
        jobs = []
        for _ in range(count):
            size, start = dice.randint(1, dice.choice([30, 100, 900, 4000]) // count + 1), dice.choice([0, 64])
            size = max(size, 513) if count == 1 else size
            jobs.append(PrefillJob([0] * size, start, [1] * -(-(start + size + 40) // 64)))
        (prefills.packed(jobs) if count > 1 else prefills.unpadded(jobs[0])).run()
os.write(1, f"{json.dumps([known, found[known:]])}\\n".encode())  # at once: both processes write
if card is features.KNOWN[first]:
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_passes_of_other_lengths_launch_kernels_that_are_compiled() -> None:
    """A kernel that is compiled while requests wait stops all of them for a second."""
    words = [sys.executable, "-c", MISSING, "sm_90", "sm_86", "0"]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=env).stdout
    cards = [json.loads(line) for line in found.splitlines()]
    assert len(cards) == 2 and all(known > 10 and missing == [] for known, missing in cards)
