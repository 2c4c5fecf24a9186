"""Which matrices of a target are in fp8, scaled by blocks, read from its configuration."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import UnsupportedModel
from ..kernels.weight import BLOCK

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# what the engine computes, of the keys that fix the arithmetic; a checkpoint may leave out all but the first two
FORM = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
FORM |= {"fmt": "e4m3", "scale_fmt": "float"}


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """Modules whose weights are e4m3 with `weight_scale_inv` for blocks of 128 by 128, and whose rows are quantized."""

    target: str  # its name
    kept: tuple[str, ...] | None  # patterns of modules that are not; None: all are not

    @classmethod
    def of(cls, config: "PreTrainedConfig") -> "Fp8Blocks":
        """Read `quantization_config`. Raises UnsupportedModel for one that the engine does not compute."""
        name, asked = config.name_or_path or config.model_type, getattr(config, "quantization_config", None)
        if not asked:
            return cls(name, None)
        stated: dict[str, Any] = asked if isinstance(asked, dict) else asked.to_dict()
        for key, value in FORM.items():
            found = stated.get(key, None if key in ("quant_method", "weight_block_size") else value)
            found = list(found) if isinstance(found, list | tuple) else found
            if found != value:
                raise UnsupportedModel(
                    f"target {name}: quantized weights with {key} {found!r} are not served by this engine (it takes "
                    f"{value!r}), but vLLM may (dflash-serve --engine vllm)"
                )
        return cls(name, tuple(stated.get("modules_to_not_convert") or stated.get("ignored_layers") or ()))

    def __contains__(self, module: str) -> bool:
        """By transformers' rule: a pattern that a module's name begins with, up to a dot, or ends with, keeps it."""
        if self.kept is None:
            return False
        return not any(re.match(rf"(?:{key})(?:(?<=\.)|(?=\.|$))", module) or module.endswith(key) for key in self.kept)

    def hold(self, modules: Mapping[str, tuple[int, int]]) -> bool:
        """Whether these, by the shapes [N, K] of their weights, are in fp8.

        Raises:
            UnsupportedModel: some are and some are not, or a side is no multiple of 128.
        """
        held = [module for module in modules if module in self]
        if not held:
            return False
        if other := next((module for module in modules if module not in self), None):
            raise UnsupportedModel(
                f"target {self.target}: {held[0]!r} is in fp8 and {other!r} is not; this engine takes them all alike"
            )
        for module, shape in modules.items():
            if any(side % BLOCK for side in shape):
                raise UnsupportedModel(
                    f"target {self.target}: '{module}.weight' of {shape} is no multiple of its fp8 blocks of {BLOCK}"
                )
        return True
