"""Measures the time from process start to the first answer, from a random checkpoint of a named shape on disk.

    python scripts/bench/start.py --shape qwen3-8b --folder /tmp/start --output start.json

Writes the checkpoint once (16 GB for an 8B target in bf16), then starts a new process for each case. The first
compiles every kernel; the second finds them compiled; the third also reads the files from disk, not from the file
cache; the fourth does the same without reading ahead. load_engine reads ahead while it imports torch and
transformers, so `load_s` includes the imports. `capture_s` is the time in which a server captures graphs before it
accepts requests, without those that are captured while steps are measured.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from dflash_toolkit import Drafter, save_drafter
from dflash_toolkit.files import write_json
from dflash_toolkit.models.device import use_device
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.spec import ModelSpec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.measure import setting
from scripts.shapes import named_shape, random_target

SHARD = 4 << 30  # bytes
FIRST = ("nothing compiled", True)
NOT_CACHED = "compiled, files not cached"
OTHERS = [("compiled", True), (NOT_CACHED, True), (NOT_CACHED, False)]
CHILD = """
import json, sys, time
began = time.perf_counter()
from dflash_toolkit import SamplingParams
from dflash_toolkit.runtime import EngineOptions, load, load_engine
from dflash_toolkit.serve.processes import CAPTURE_S
if sys.argv[3] == "not ahead":
    load.read_ahead = lambda *checkpoints: None
options = EngineOptions(draft_tree=0 if sys.argv[4] == "blocks" else None, max_num_seqs=int(sys.argv[5]) or None)
engine, _ = load_engine(sys.argv[1], sys.argv[2], options=options)
loaded = time.perf_counter()
answer, = engine.generate([list(range(100, 164))], SamplingParams(max_tokens=16, ignore_eos=True))
ended = time.perf_counter()
while engine.prepare() and time.perf_counter() < ended + CAPTURE_S:
    pass
captured = time.perf_counter()
print(json.dumps({"load_s": loaded - began, "first_answer_s": ended - loaded, "total_s": ended - began,
                  "capture_s": captured - ended, "graphs": len(engine.runner.graphs.captured),
                  "max_num_seqs": engine.options.max_num_seqs, "tokens": len(answer.tokens)}))
"""


def write_checkpoint(shape: str, folder: Path) -> tuple[Path, Path]:
    """A random target and drafter as Hugging Face directories."""
    config = named_shape(shape)
    target, drafter = folder / "target", folder / "drafter"
    target.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(target)
    words = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}}
    (target / "tokenizer.json").write_text(json.dumps(words))
    PreTrainedTokenizerFast(tokenizer_file=str(target / "tokenizer.json"), unk_token="?").save_pretrained(target)
    weights = random_target(ModelSpec.of_target(config), use_device("auto"), torch.bfloat16)
    shard: dict[str, torch.Tensor] = {}
    files: dict[str, str] = {}

    def flush() -> None:
        name = f"model-{len(set(files.values())):05d}.safetensors"
        files.update(dict.fromkeys(shard, name))
        save_file(shard, target / name)
        shard.clear()

    for name, tensor in weights.parameter_views().items():
        shard[name] = tensor.cpu().contiguous()
        if sum(t.nbytes for t in shard.values()) > SHARD:
            flush()
    flush()
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    save_drafter(Drafter.fresh(drafter_shape(config), 0), drafter)
    return target, drafter


def forget(folder: Path) -> None:
    """Drop the folder's files from the system's file cache."""
    for path in folder.rglob("*.safetensors"):
        with open(path, "rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start(target: Path, drafter: Path, caches: Path, ahead: bool, blocks: bool, requests: int) -> dict[str, Any]:
    """Seconds of a process that keeps what it compiles and measures in `caches`."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(caches / "triton"), "XDG_CACHE_HOME": str(caches)}
    how = "ahead" if ahead else "not ahead", "blocks" if blocks else "as it pays", str(requests)
    command = [sys.executable, "-c", CHILD, str(target), str(drafter), *how]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return {"process_s": time.perf_counter() - began} | json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--folder", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--repeats", type=int, default=1, help="repeats of every start except the first")
    parser.add_argument("--no-draft-tree", action="store_true", help="verify blocks only")
    parser.add_argument("--max-num-seqs", type=int, default=0, help="requests in a batch (default: the engine's)")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    target, drafter = write_checkpoint(args.shape, args.folder)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    size = sum(path.stat().st_size for path in args.folder.rglob("*.safetensors"))
    print(f"{size / 1e9:.1f} GB written in {time.perf_counter() - began:.0f} s", flush=True)
    rows: dict[str, list[dict[str, Any]]] = {}
    caches = Path(tempfile.mkdtemp(dir=args.folder))
    for case, ahead in [FIRST, *OTHERS * args.repeats]:
        if case == NOT_CACHED:
            forget(args.folder)
        name = case if ahead else f"{case}, not read ahead"
        found = start(target, drafter, caches, ahead, args.no_draft_tree, args.max_num_seqs)
        rows.setdefault(name, []).append(found)
        print(name, {k: round(v, 2) for k, v in found.items()}, flush=True)
    if args.output:
        more = ["--no-draft-tree"] * args.no_draft_tree
        more += ["--max-num-seqs", str(args.max_num_seqs)] * bool(args.max_num_seqs)
        result = {
            **setting("bench/start.py", ["--shape", args.shape, "--repeats", str(args.repeats), *more]),
            "checkpoint_gb": size / 1e9,
            "starts": rows,
        }
        write_json(args.output, result)


if __name__ == "__main__":
    main()
