"""Lists published drafters by target. Needs neither the network nor torch.

No drafter of this list was run by this project, which has no access to the hub; `source` names what each row rests on.
"""

import re
from dataclasses import dataclass
from pathlib import Path

README = "z-lab's README"
NOTES = "second hand"  # named in public threads; its page was not read

# Parts of a repository's name for the storage of weights or for its converter: not another model.
QUANTIZED = re.compile(
    r"[-_.](fp8|fp8[-_]dynamic|fp8[-_]block|dynamic|nvfp4|mxfp4|mxfp8|awq|gptq|int[48]|[48]bit|w\d+a\d+|bnb|bf16|fp16"
    r"|exl[23]|autoround|quantized|gguf|mlx|unsloth)$"
)


@dataclass(frozen=True, slots=True)
class Published:
    """A drafter that its makers published.

    Attributes:
        target: the model's name without its organisation.
        architecture: of the target's config.json; empty where that is unknown.
        block_size: the anchor and the drafted tokens; None where it is unknown.
        form: z-lab's, or that of the speculators library.
        note: what a user should know first.
    """

    target: str
    drafter: str
    architecture: str
    kind: str = "DFlash"
    block_size: int | None = None
    form: str = "z-lab"
    licence: str | None = None
    source: str = README
    note: str = ""


_QWEN3, _LLAMA, _MOE, _NEXT = "Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"
_HYBRID, _HYBRID_MOE = "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"
_GPT_OSS, _GEMMA = "GptOssForCausalLM", "Gemma4ForConditionalGeneration"
_NO_THINKING = "trained without thinking"

PUBLISHED = (
    Published("Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16", _QWEN3, block_size=16, note=_NO_THINKING),
    Published(
        "Qwen3-4B", "mgoin/Qwen3-4B-speculator.dflash2", _QWEN3, "DFlash 2", 8, form="speculators", source=NOTES
    ),
    Published("Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", _QWEN3, block_size=16, note=_NO_THINKING),
    Published(
        "Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.dflash2", _QWEN3, "DFlash 2", 16, form="speculators", source=NOTES,
        note=f"8 layers, {_NO_THINKING}",
    ),
    Published("Qwen3-8B", "tencent/Qwen3-8B-DSpine-b16", _QWEN3, "DSpine", 16, source=NOTES),
    Published("Qwen3-32B-FP8", "chutesai/Qwen3-32B-FP8-DFLASH", _QWEN3, source=NOTES, note="acceptance length 2.46"),
    Published("Qwen3-Coder-30B-A3B-Instruct", "z-lab/Qwen3-Coder-30B-A3B-DFlash", _MOE),
    Published("Qwen3-Coder-Next", "z-lab/Qwen3-Coder-Next-DFlash", _NEXT),
    Published("Qwen3.5-4B", "z-lab/Qwen3.5-4B-DFlash", _HYBRID),
    Published(
        "Qwen3.5-9B", "z-lab/Qwen3.5-9B-DFlash", _HYBRID, block_size=16,
        note="block by the card of a drafter derived from it",
    ),
    Published("Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash", _HYBRID, block_size=16),
    Published("Qwen3.5-35B-A3B", "z-lab/Qwen3.5-35B-A3B-DFlash", _HYBRID_MOE, block_size=16),
    Published("Qwen3.5-122B-A10B", "z-lab/Qwen3.5-122B-A10B-DFlash", _HYBRID_MOE),
    Published(
        "Qwen3.6-27B", "z-lab/Qwen3.6-27B-DFlash", _HYBRID, block_size=16, licence="MIT by a third-party card",
        note="4 layers of a window of 2048",
    ),
    Published("Qwen3.6-27B", "JetBrains/Qwen3.6-27B-DFlash2", _HYBRID, "DFlash 2", source=NOTES),
    Published("Qwen3.6-35B-A3B", "z-lab/Qwen3.6-35B-A3B-DFlash", _HYBRID_MOE, note="6 layers, 8 taps"),
    Published(
        "Qwen3.8-27B", "z-lab/Qwen3.8-27B-DFlash2", _HYBRID, "DFlash 2", 8, source="its config.json",
        note="layers of a window of 2048",
    ),
    Published("Qwen3.8-27B", "tencent/Qwen3.8-27B-DSpine-b16", _HYBRID, "DSpine", 16, source=NOTES),
    Published("gpt-oss-20b", "z-lab/gpt-oss-20b-DFlash", _GPT_OSS),
    Published("gpt-oss-120b", "z-lab/gpt-oss-120b-DFlash", _GPT_OSS),
    Published("Llama-3.1-8B-Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", _LLAMA),
    Published("gemma-4-26B-A4B-it", "z-lab/gemma-4-26B-A4B-it-DFlash", _GEMMA),
    Published("gemma-4-31B-it", "z-lab/gemma-4-31B-it-DFlash", _GEMMA),
    Published("Muse-Glimmer-30B", "z-lab/Muse-Glimmer-30B-DFlash2", "", "DFlash 2", 16, source="its config.json"),
    Published("Kimi-K2.5", "z-lab/Kimi-K2.5-DFlash", ""),
    Published("MiniMax-M2.5", "z-lab/MiniMax-M2.5-DFlash", ""),
    Published(
        "GLM-5.3", "incoai/GLM-5.3-DFlash2", "", "DFlash 2", licence="non-commercial, no derivatives", source=NOTES
    ),
)  # fmt: skip


def published_for(target: str) -> list[Published]:
    """Returns the published drafters of a target, those in z-lab's form first.

    A target is a Hugging Face id, a folder of that name, or a folder of the hub's cache. A quantized variant has the
    drafters of its model too; a fine-tuned model of another name has none.
    """
    name = _name_of(target)
    found = [each for each in PUBLISHED if each.target.lower() == name]
    plain = _without_suffixes(name)
    found += [each for each in PUBLISHED if each not in found and _without_suffixes(each.target.lower()) == plain]
    return sorted(found, key=lambda each: each.form != "z-lab")


def named_for(target: str) -> str:
    """Returns the names of a target's published drafters, separated by commas; empty where none is known."""
    return ", ".join(each.drafter for each in published_for(target))


def hint_for(target: str) -> str:
    """Returns a clause that an error message about a missing drafter ends with; empty where none is known."""
    names = named_for(target)
    return f" (published for this target: {names})" if names else ""


def _name_of(target: str) -> str:
    parts = Path(target).expanduser().absolute().parts
    for part in parts:  # .cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/0123abcd
        if part.startswith("models--"):
            return part.split("--")[-1].lower()
    return parts[-1].lower()


def _without_suffixes(name: str) -> str:
    while (shorter := QUANTIZED.sub("", name)) != name:
        name = shorter
    return name
