"""Which matrices of a target are quantized and in which format, read from its configuration."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import UnsupportedModel
from ..kernels.formats import BLOCK, DENSE, FP8_BLOCK, FP8_CHANNEL, MXFP4, Format

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# supported values of the keys that fix the arithmetic; a checkpoint may leave out all but the first two
FORM = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
FORM |= {"fmt": "e4m3", "scale_fmt": "float"}
EIGHT = {"num_bits": 8, "type": "float", "symmetric": True}
GROUP = {"weights": {**EIGHT, "strategy": "channel", "dynamic": False}}
GROUP |= {"input_activations": {**EIGHT, "strategy": "token", "dynamic": True}}
NO_EXPERTS = r"(?!.*\.experts\.).*"  # in MXFP4 only experts are quantized
# in a model that also reads images the language model is a module of its own; in patterns a dot may be escaped
LANGUAGE_MODEL = r"(model\\?\.)language_model\\?\."


def _unlike_fp8_dynamic(stated: Mapping[str, Any]) -> str:
    """Returns the first key that differs from llm-compressor's scheme FP8_DYNAMIC, with its value; empty if none does.

    The scheme of the KV cache does not count: the engine chooses its own.
    """
    groups = list((stated.get("config_groups") or {}).values())
    if len(groups) != 1:
        return f"{len(groups)} config_groups"
    found: dict[str, Any] = {"format": stated.get("format"), "targets": groups[0].get("targets")}
    expected: dict[str, Any] = {"format": "float-quantized", "targets": ["Linear"]}
    for part, form in GROUP.items():
        given = groups[0].get(part) or {}
        found |= {f"{part}.{key}": given.get(key) for key in form}
        expected |= {f"{part}.{key}": value for key, value in form.items()}
    return next((f"{key} {value!r}" for key, value in found.items() if value != expected[key]), "")


@dataclass(frozen=True, slots=True)
class QuantizedModules:
    """The modules of a target that are quantized, all in one format."""

    target: str  # its name
    kept: tuple[str, ...] | None  # patterns of modules that are not quantized; None: no module is quantized
    format: Format = FP8_BLOCK

    @classmethod
    def of(cls, config: "PreTrainedConfig") -> "QuantizedModules":
        """Read `quantization_config`. Raises UnsupportedModel for one that the engine does not compute."""
        name, asked = config.name_or_path or config.model_type, getattr(config, "quantization_config", None)
        if not asked:
            return cls(name, None)
        stated: dict[str, Any] = asked if isinstance(asked, dict) else asked.to_dict()
        if stated.get("quant_method") == "compressed-tensors":
            if not stated.get("config_groups"):
                return cls(name, None)  # only the KV cache is to be quantized
            if other := _unlike_fp8_dynamic(stated):
                raise UnsupportedModel(
                    f"target {name}: weights of compressed-tensors with {other} are not served by this engine (it "
                    f"takes FP8 by channels and tokens), but vLLM may (dflash-serve --engine vllm)"
                )
            ignored = stated.get("ignore") or ()
            patterns = (key[3:] if key.startswith("re:") else re.escape(key) for key in ignored)
            return cls(name, tuple(re.sub(LANGUAGE_MODEL, r"\1", key) for key in patterns), format=FP8_CHANNEL)
        if stated.get("quant_method") == "mxfp4" and config.model_type == "gpt_oss":
            return cls(name, (NO_EXPERTS,), format=MXFP4)
        for key, value in FORM.items():
            found = stated.get(key, None if key in ("quant_method", "weight_block_size") else value)
            found = list(found) if isinstance(found, list | tuple) else found
            if found != value:
                raise UnsupportedModel(
                    f"target {name}: quantized weights with {key} {found!r} are not served by this engine (it takes "
                    f"{value!r}, or FP8 by channels and tokens), but vLLM may (dflash-serve --engine vllm)"
                )
        kept = stated.get("modules_to_not_convert") or stated.get("ignored_layers") or ()
        return cls(name, tuple(re.sub(LANGUAGE_MODEL, r"\1", key) for key in kept))

    def __contains__(self, module: str) -> bool:
        """By transformers' rule: a pattern that a module's name begins with, up to a dot, or ends with, keeps it."""
        if self.kept is None:
            return False
        return not any(re.match(rf"(?:{key})(?:(?<=\.)|(?=\.|$))", module) or module.endswith(key) for key in self.kept)

    def format_of(self, modules: Mapping[str, tuple[int, int]]) -> Format:
        """The format of modules, given with the shapes [N, K] of their weights.

        Raises:
            UnsupportedModel: only some are quantized, or a side is not a multiple of what the format needs.
        """
        held = [module for module in modules if module in self]
        if not held:
            return DENSE
        if other := next((module for module in modules if module not in self), None):
            raise UnsupportedModel(
                f"target {self.target}: {held[0]!r} is in fp8 and {other!r} is not; this engine needs both or neither"
            )
        for module, shape in modules.items():  # in MXFP4 all are multiples: checkpoints store groups of columns
            if self.format != MXFP4 and any(side % BLOCK for side in shape):
                raise UnsupportedModel(
                    f"target {self.target}: '{module}.weight' of {shape} is in fp8, but not a multiple of {BLOCK} on "
                    "both sides, which this engine needs"
                )
        return self.format
