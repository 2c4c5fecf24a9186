"""Reads from a target's configuration which of its matrices are quantized, and in which format."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import UnsupportedModel
from ..kernels.formats import BLOCK, DENSE, FP8_BLOCK, FP8_CHANNEL, MXFP4, Format, Int4
from ..kernels.formats.int4 import quarter_of

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
LANGUAGE_MODEL = r"(model\\?\.)language_model\\?\.|language_model\\?\.(?=model)"


GROUPS = (32, 64, 128, -1, None)  # columns of a group in INT4; the last two are all
# llm-compressor's schemes: key -> supported values. The scheme of the KV cache does not count
FP8_SCHEME = {
    "format": ("float-quantized",), "targets": (["Linear"],),
    **{f"{part}.{key}": (value,) for part in GROUP for key, value in EIGHT.items()},
    "weights.dynamic": (False,), "weights.strategy": ("channel", "tensor"),
    "input_activations.strategy": ("token", "tensor"), "input_activations.dynamic": (True, False),
}  # fmt: skip
INT4_SCHEME = {
    "format": ("pack-quantized",), "targets": (["Linear"],), "input_activations": (None,), "weights.num_bits": (4,),
    "weights.type": ("int",), "weights.dynamic": (False, None), "weights.strategy": ("group", "channel"),
    "weights.group_size": GROUPS,
}  # fmt: skip
# supported values of AWQ and GPTQ; the keys that a checkpoint leaves out have the first one
AWQ = {"bits": (4,), "version": ("gemm", "GEMM"), "group_size": GROUPS}
GPTQ = {"bits": (4,), "checkpoint_format": ("gptq", "gptq_v2"), "group_size": GROUPS, "lm_head": (False, None)}
MODELOPT = {"quant_algo": ("FP8",)}


def _unlike(stated: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]]) -> str:
    """Returns the first key with an unsupported value, and the value; empty if there is none."""
    found = {key: stated.get(key, values[0]) for key, values in supported.items()}
    return next((f"{key} {value!r}" for key, value in found.items() if value not in supported[key]), "")


Found = tuple[Format, str, Iterable[str]]  # the format, `_unlike`, and names of modules that are not quantized


def _compressed_tensors(stated: Mapping[str, Any]) -> Found:
    groups, ignored = list((stated.get("config_groups") or {}).values()), stated.get("ignore") or ()
    if len(groups) != 1:
        return DENSE, f"{len(groups)} config_groups", ignored
    stored, group = stated.get("format"), groups[0]
    keys: dict[str, Any] = {"format": stored, "targets": group.get("targets")}
    for part in GROUP:
        keys |= {f"{part}.{key}": value for key, value in (group.get(part) or {}).items()}
    if stored != "pack-quantized":
        return FP8_CHANNEL, _unlike(dict.fromkeys(FP8_SCHEME) | keys, FP8_SCHEME), ignored
    size = keys.get("weights.group_size") if keys.get("weights.strategy") == "group" else None
    keys |= {"input_activations": group.get("input_activations"), "weights.group_size": size}
    form = Int4(group=_columns(size), zeros=not keys.get("weights.symmetric", True), stored=stored)
    return form, _unlike(dict.fromkeys(INT4_SCHEME) | keys, INT4_SCHEME), ignored


def _awq(stated: Mapping[str, Any]) -> Found:
    form = Int4(group=_columns(stated.get("group_size", 128)), stored="awq")
    kept = stated.get("modules_to_not_convert") or ()  # AutoAWQ looks for them anywhere in a name
    return form, _unlike(stated, AWQ), [rf"re:(?:.*\.)?{re.escape(key)}" for key in kept]


def _gptq(stated: Mapping[str, Any]) -> Found:
    form = Int4(group=_columns(stated.get("group_size", 128)), stored=stated.get("checkpoint_format", "gptq"))
    rules = stated.get("dynamic") or ()
    other = [f"dynamic {rule!r}" for rule in rules if not rule.startswith("-:")]
    return form, _unlike(stated, GPTQ) or "".join(other[:1]), [f"re:{rule[2:]}" for rule in rules]


def _modelopt(stated: Mapping[str, Any]) -> Found:
    return FP8_CHANNEL, _unlike(stated, MODELOPT), stated.get("ignore") or stated.get("exclude_modules") or ()


FORMS = {"compressed-tensors": _compressed_tensors, "awq": _awq, "gptq": _gptq, "modelopt": _modelopt}


def _columns(size: Any) -> int:
    return size if isinstance(size, int) and size > 0 else 0


def _pattern(name: str) -> str:
    """Returns a list's name of a module as a regular expression: `re:`, or one with `*` for any text."""
    return name[3:] if name.startswith("re:") else re.escape(name).replace(r"\*", ".*")


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
        method = stated.get("quant_method")
        if method == "compressed-tensors" and not stated.get("config_groups"):
            return cls(name, None)  # only the KV cache is to be quantized
        if method in FORMS:
            form, other, ignored = FORMS[method](stated)
            if other:
                raise UnsupportedModel(
                    f"target {name}: weights of {method} with {other} are not served by this engine, but vLLM may "
                    f"(dflash-serve --engine vllm)"
                )
            kept = tuple(re.sub(LANGUAGE_MODEL, r"\1", _pattern(key)) for key in ignored)
            return cls(name, (*kept, "lm_head"), format=form)
        if stated.get("quant_method") == "mxfp4" and config.model_type == "gpt_oss":
            return cls(name, (NO_EXPERTS,), format=MXFP4)
        for key, value in FORM.items():
            found = stated.get(key, None if key in ("quant_method", "weight_block_size") else value)
            found = list(found) if isinstance(found, list | tuple) else found
            if found != value:
                raise UnsupportedModel(
                    f"target {name}: quantized weights with {key} {found!r} are not served by this engine (it takes "
                    f"{value!r}, FP8 by channels or INT4), but vLLM may (dflash-serve --engine vllm)"
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
                f"target {self.target}: {held[0]!r} is quantized and {other!r} is not; "
                f"this engine needs both or neither"
            )
        for module, shape in modules.items():
            if needed := _unfit(self.format, *shape):
                raise UnsupportedModel(
                    f"target {self.target}: '{module}.weight' of {shape} is quantized, but {needed}, which this engine "
                    f"needs; vLLM may serve it (dflash-serve --engine vllm)"
                )
        return self.format


def _unfit(form: Format, n: int, k: int) -> str:
    """Returns what a matrix [N, K] lacks for its format, or an empty string."""
    if form == MXFP4:  # checkpoints store groups of columns
        return ""
    if isinstance(form, Int4):
        group = form.group or k
        fits = n % 8 == 0 and k % group == 0 and quarter_of(k, group)
        return "" if fits else "has no whole groups and blocks of 64 columns, and of 8 rows"
    return f"not a multiple of {BLOCK} on both sides" if n % BLOCK or k % BLOCK else ""


def dequantized_format(config: "PreTrainedConfig") -> Format | None:
    """Returns the format of a target that is dequantized for transformers' modules; None if they read it themselves."""
    asked = getattr(config, "quantization_config", None)
    stated = asked if isinstance(asked, dict) else {}
    if stated.get("quant_method") not in ("awq", "gptq", "modelopt") and stated.get("format") != "pack-quantized":
        return None
    try:
        return QuantizedModules.of(config).format
    except UnsupportedModel:  # perhaps a package reads it
        return None
