"""Loads exported drafters with vLLM's own code, on a CPU and without its compiled parts.

    PYTHONPATH=SITE python scripts/peers/vllm_load.py OUT PAIR...

SITE holds the package (`make test-peers` fills it). A PAIR is a folder with a target's config.json in `target` and
a drafter in `drafter`. vLLM's engine arguments read both; its registry finds the drafter's class, which loads the
weights. Only the target's width, depth and vocabulary reach the drafter, so any architecture with those works.
Writes OUT/PAIR.safetensors: the drafter's parameters under vLLM's names, and as `rows` its output for the first
three tokens of an embedding that counts up modulo 97. Prints a JSON list with the findings of each pair.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def load(pair: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    speculative = {"method": "dflash", "model": str(pair / "drafter"), "num_speculative_tokens": 15}
    config = EngineArgs(
        model=str(pair / "target"), skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16",
        speculative_config=speculative,
    ).create_engine_config()  # fmt: skip
    drafter = config.speculative_config.draft_model_config
    kind, _ = ModelRegistry.resolve_model_cls(drafter.hf_config.architectures, drafter)
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        model = kind(vllm_config=config)
        torch.set_default_dtype(before)
        loaded = load_file(pair / "drafter" / "model.safetensors")
        model.load_weights(loaded.items())
        table = model.model.embed_tokens.weight  # the target's, once they share it
        table.copy_(torch.arange(table.numel()).view_as(table) % 97)
        rows = model.embed_input_ids(torch.arange(3))
    attention = [layer.self_attn for layer in model.model.layers]
    found = {
        "class": kind.__name__,
        "captured": get_eagle3_aux_layers_from_config(config.speculative_config),
        "causal": model.get_draft_attn_causal(),
        "windows": [each.sliding_window for each in attention],
        "rotary": [[each.rotary_emb.rotary_dim, each.rotary_emb.base] for each in attention],
        "mask_token_id": model.model.mask_token_id,
        "eps": model.model.norm.variance_epsilon,
    }
    if hasattr(model.model, "candidate_selector"):
        found["selector_top_k"] = model.model.candidate_selector.top_k
        found["logits"] = [model.candidate_logits_processor.scale, model.candidate_logits_processor.soft_cap]
        convolution = model.model.layers[0].mlp_conv
        found["convolution"] = [convolution.taps, convolution.group_size, convolution.block_size]
    parameters = {name: parameter.contiguous() for name, parameter in model.named_parameters()}
    return found, parameters | {"rows": rows.contiguous()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("pairs", type=Path, nargs="+")
    args = parser.parse_args()
    out, sys.stdout = sys.stdout, sys.stderr  # for its logs
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # as on a GPU: the other one refuses DFlash 2
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()  # else it looks for a device
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()  # another process would look for one again
    results = []
    with torch.no_grad():
        for pair in args.pairs:
            found, tensors = load(pair)
            save_file(tensors, args.out / f"{pair.name}.safetensors")
            results.append(found)
    json.dump(results, out, default=str)


if __name__ == "__main__":
    main()
