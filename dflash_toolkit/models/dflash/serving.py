"""What vLLM and SGLang are told of a drafter. Without torch: their commands are made before it is imported."""

import json
import shlex


def vllm_options(drafter: str, block_size: int) -> list[str]:
    """Of `vllm serve`, which counts the drafted tokens: all of a block but the anchor."""
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": block_size - 1}
    return ["--speculative-config", json.dumps(speculative)]


def sglang_options(drafter: str, block_size: int) -> list[str]:
    """Of `sglang.launch_server`, which counts the whole block."""
    return [
        *("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", drafter),
        *("--speculative-num-draft-tokens", str(block_size)),
    ]


def serving_commands(target: str, drafter: str, block_size: int) -> str:
    """The exact lines that serve this pair with vLLM and SGLang."""
    vllm = ["vllm", "serve", target, *vllm_options(drafter, block_size)]
    sglang = ["python", "-m", "sglang.launch_server", "--model-path", target, *sglang_options(drafter, block_size)]
    return f"{shlex.join(vllm)}\n{shlex.join(sglang)}"
