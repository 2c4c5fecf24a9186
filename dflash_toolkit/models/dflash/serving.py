"""Options of vLLM and SGLang for a drafter. Without torch: their commands are built before it is imported."""

import json
import math
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from packaging.version import Version

from .architecture import of_sizes

# the releases in which the facts below were read; they may not hold for later ones
READ = {"vllm": "0.33.0", "sglang": "0.5.23"}
ADAPTIVE_RELEASE = "0.33.0"  # vLLM's first with adaptive verification for every drafter
# by architecture of a target's config.json: the engines that hand a drafter its hidden states (their class has
# SupportsEagle3 in vLLM, for OLMo and SmolLM3 that of the transformers backend; in SGLang
# set_dflash_layers_to_capture)
SERVED = {
    "LlamaForCausalLM": ("vllm", "sglang"),
    "Llama4ForCausalLM": ("vllm", "sglang"),
    "Llama4ForConditionalGeneration": ("vllm",),
    "MistralForCausalLM": ("vllm", "sglang"),
    "Mistral3ForConditionalGeneration": ("vllm",),
    "Phi3ForCausalLM": ("vllm", "sglang"),
    "Ernie4_5ForCausalLM": ("vllm",),
    "GraniteForCausalLM": ("vllm",),
    "SmolLM3ForCausalLM": ("vllm",),
    "Qwen2ForCausalLM": ("vllm",),
    "Qwen3ForCausalLM": ("vllm", "sglang"),
    "Qwen2MoeForCausalLM": (),
    "Qwen3MoeForCausalLM": ("vllm", "sglang"),
    "Qwen3NextForCausalLM": ("vllm", "sglang"),
    "Qwen3_5ForCausalLM": ("vllm", "sglang"),
    "Qwen3_5ForConditionalGeneration": ("vllm", "sglang"),
    "Qwen3_5MoeForCausalLM": ("vllm", "sglang"),
    "Qwen3_5MoeForConditionalGeneration": ("vllm", "sglang"),
    "GptOssForCausalLM": ("vllm", "sglang"),
    "Gemma2ForCausalLM": (),
    "Gemma3ForCausalLM": (),
    "Gemma3ForConditionalGeneration": (),
    "Gemma4ForCausalLM": ("vllm", "sglang"),
    "Gemma4ForConditionalGeneration": ("vllm", "sglang"),
    "Glm4ForCausalLM": (),
    "Glm4MoeForCausalLM": (),
    "OlmoForCausalLM": ("vllm",),
    "Olmo2ForCausalLM": ("vllm",),
    "Olmo3ForCausalLM": ("vllm",),
}

# drafters that other engines implement and this project does not: architectures in their model registries, projectors
BOTH = ("vllm", "sglang")
ELSEWHERE = {
    "DFlash2BeamDraftModel": BOTH,
    "DFlashLagunaForCausalLM": BOTH,
    "DSparkDraftModel": BOTH,
    "domino": ("sglang",),  # a `projector_type`
    "Gemma4DSparkModel": ("vllm",),
    "K3DSparkModel": ("vllm",),
    "LiLiCorrDraftModel": BOTH,
    "Lfm2DSparkDraftModel": ("sglang",),
    "LingDSparkModel": ("sglang",),
    "MiniMaxDFlash2DraftModel": ("sglang",),
    "MuseGlimmerAssistantModel": BOTH,
    "Qwen3DSparkModel": BOTH,
    "Qwen3XPressModel": ("vllm",),
}


def served_elsewhere(architecture: str) -> str:
    """Returns which engines implement an architecture of drafters, for messages; empty if none is known to."""
    engines = [f"{engine} {READ[engine]}" for engine in ELSEWHERE.get(architecture, ())]
    return f"; start {' or '.join(engines)} directly to serve it" if engines else ""


def block_scale(engine: str, architecture: str, hidden_size: int) -> float:
    """Returns an engine's factor on a plain drafter's rows of a target's embedding table."""
    if engine == "sglang" and architecture.startswith("Gemma"):  # looked up through the target's module, which scales
        return math.sqrt(hidden_size)
    return 1.0


def verifies_adaptively(version: str, architecture: str, capabilities: Collection[str]) -> bool:
    """Whether a release of vLLM can choose how many drafts of each request it verifies, for a target on these GPUs.

    Other releases ignore the key, and on other targets or GPUs the server fails after it has loaded the weights: state
    space layers need equal lengths, and of its attention backends only FlashAttention 3 replays graphs of any length.
    """
    recurrent = architecture.startswith(("Qwen3Next", "Qwen3_5"))
    on_hopper = bool(capabilities) and all(each.startswith("9.") for each in capabilities)
    served = "vllm" in SERVED.get(architecture, ()) and not recurrent
    return Version(version) >= Version(ADAPTIVE_RELEASE) and served and on_hopper


def vllm_options(
    drafter: str, block_size: int, draft_sample_method: str = "greedy", adaptive: bool = False
) -> list[str]:
    """Returns options of `vllm serve`, which counts the drafted tokens: all of a block but the anchor."""
    speculative: dict[str, Any] = {"method": "dflash", "model": drafter, "num_speculative_tokens": block_size - 1}
    if draft_sample_method != "greedy":
        speculative["draft_sample_method"] = draft_sample_method
    if adaptive:
        speculative["enable_adaptive_verification"] = True
    return ["--speculative-config", json.dumps(speculative)]


def sglang_options(
    drafter: str, block_size: int, draft_sample_method: str = "greedy", adaptive: bool = False
) -> list[str]:
    """Returns options of `sglang.launch_server`, which counts the whole block; it has no adaptive verification."""
    return [
        *("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", drafter),
        *("--speculative-num-draft-tokens", str(block_size)),
        *(["--speculative-use-rejection-sampling"] if draft_sample_method == "probabilistic" else []),
    ]


def serving_commands(target: str, drafter: str, sizes: Mapping[str, Any], architecture: str = "") -> str:
    """Returns the command lines that serve this pair with vLLM and SGLang, without engines that draft differently.

    Args:
        sizes: the drafter's `DrafterConfig` as a mapping, or at least the sizes of its block and its parts.
        architecture: the target's, by its config.json.
    """
    block_size, drafting = sizes["block_size"], of_sizes(sizes)
    vllm = ["vllm", "serve", target, *vllm_options(drafter, block_size)]
    sglang = ["python", "-m", "sglang.launch_server", "--model-path", target, *sglang_options(drafter, block_size)]
    lines = {"vllm": shlex.join(vllm), "sglang": shlex.join(sglang)}
    known = " and ".join(f"{engine} {release}" for engine, release in READ.items())
    if not (named := SERVED.get(architecture, tuple(lines))):
        return f"# {known} serve no drafter with {architecture}; dflash-eval --runtime reference does"
    able = [engine for engine in named if engine in drafting.releases and not drafting.part_lacking(engine, sizes)]
    found = [lines[engine] for engine in able if block_scale(engine, architecture, 2) == 1.0]
    without = " without the other part" if drafting.releases else ""
    return "\n".join(found) or f"# {known} serve no {drafting.title} drafter{without}; dflash-serve does"
