"""RoPE stretched beyond the context that a model was first trained on: linear, llama3 and YaRN.

transformers' own functions compute the frequencies, for targets and for drafters.
"""

import functools
import math
import sys
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ORIGINAL = "original_max_position_embeddings"
NEEDED = {"linear": ("factor",), "yarn": ("factor", ORIGINAL)}
NEEDED["llama3"] = (*NEEDED["yarn"], "low_freq_factor", "high_freq_factor")
ALLOWED = {"yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")}
# keys of the same group that do not affect the scaling; mrope rotates text in the same way
OTHERS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "finetuned")
MSCALES = ("mscale", "mscale_all_dim")
UNREAD_BY_VLLM = ("attention_factor", *MSCALES)  # 0.26, of a YaRN group; its pull request 48351 is about the first


def full_rope(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns `rope_parameters` of the full-attention layers, for a target with different ones per layer type."""
    groups: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    nested = [group for group in groups.values() if isinstance(group, dict)]
    return dict(groups.get("full_attention") or nested[0]) if nested else groups


def rope_of(config: PreTrainedConfig, kind: str) -> dict[str, Any]:
    """Returns `rope_parameters` of the layers of one of `layer_types`."""
    groups: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return groups[kind] if isinstance(groups.get(kind), dict) else groups


def scaled_frequencies(config: PreTrainedConfig, kind: str = "") -> tuple[tuple[float, ...], float]:
    """Returns radians per position [H / 2], and the factor on cosines and sines, of a config with scaled RoPE."""
    rope = rope_of(config, kind)
    own = {} if rope is config.rope_parameters else {"layer_type": kind}
    with torch.device("cpu"):  # some of these functions allocate on the default device, which may be meta
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, **own)
    return tuple(frequencies.double().tolist()), float(factor)


def temperatures(positions: Tensor, floor: float, scale: float) -> Tensor:
    """Returns the factors fp32 that Llama 4 gives queries at these positions (arXiv 2501.19399)."""
    return torch.log1p(torch.floor((positions.float() + 1.0) / floor)) * scale + 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """A scaling of frequencies, under the names of `rope_parameters`; None is a key that is not given.

    Raises:
        ValueError: a type that is not supported, a key that it needs or does not know, a number out of range.
    """

    rope_type: str  # linear, llama3 or yarn
    factor: float
    original_max_position_embeddings: float | None = None  # llama3, yarn; in tokens
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    attention_factor: float | None = None  # yarn; on cosines and sines, None: from factor and the two mscales
    beta_fast: float | None = None  # yarn; turns within the original context
    beta_slow: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool | None = None  # yarn

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES[1:]:
            raise ValueError(f"rope type {self.rope_type!r} is not supported; known: {', '.join(ROPE_TYPES)}")
        needed, given = NEEDED[self.rope_type], self.parameters
        if missing := next((key for key in needed if key not in given), None):
            raise ValueError(f"rope type {self.rope_type!r} needs {missing!r}")
        for key, value in given.items():
            if key not in ("rope_type", *needed, *ALLOWED.get(self.rope_type, ())):
                raise ValueError(_unknown(self.rope_type, key, value))
            if key == "truncate" and not isinstance(value, bool):
                raise ValueError(f"truncate is {value!r}; it must be true or false")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if key not in ("rope_type", "truncate") and not (number and 0 < value < math.inf):
                raise ValueError(f"{key} is {value!r}; it must be a number > 0")
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if low in given and high in given and given[low] > given[high]:
                raise ValueError(f"{low} is {given[low]}, above {high} {given[high]}")

    @property
    def parameters(self) -> dict[str, Any]:
        """`rope_scaling` of a config.json: the type and the keys that are given."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if type(self.factor) is int and self.factor > 0:  # vLLM's linear rope reads whole numbers as lists
            values["factor"] = float(self.factor)
        return {key: value for key, value in values.items() if value is not None}

    @classmethod
    def read(cls, group: dict[str, Any], outer: dict[str, Any]) -> "RopeScaling | None":
        """Reads `rope_parameters` or `rope_scaling`, and the keys around that group; None for plain RoPE.

        Keys that transformers ignores without effect on a frequency are ignored here too.

        Raises:
            ValueError: as the class.
        """
        if nested := next((key for key, value in group.items() if isinstance(value, dict)), None):
            raise ValueError(f"a rope of its own for {nested!r} is not supported; all layers share one")
        unsaid: Any = None if group.keys() & {"rope_type", "type"} else "default"  # null alone says no type
        kind = next((group[key] for key in ("rope_type", "type") if group.get(key) is not None), unsaid)
        if kind == "default":
            return None
        given = {key: value for key, value in group.items() if key not in OTHERS and value is not None}
        given = {key: value for key, value in given.items() if key not in MSCALES or value != 0}  # 0 means not given
        if kind in ("llama3", "yarn"):  # transformers' precedence
            places = (outer.get(ORIGINAL), given.get(ORIGINAL), outer.get("max_position_embeddings"))
            given[ORIGINAL] = next((value for value in places if value is not None), None)
        elif kind == "linear":
            given.pop(ORIGINAL, None)  # it divides every frequency by the factor, whatever the original context is
        if kind == "yarn" and "truncate" in group and group["truncate"] is None:
            given["truncate"] = False  # transformers reads its null as false, and a missing key as true
        known = {key: value for key, value in given.items() if key in cls.__slots__}
        found = cls(**({"rope_type": kind, "factor": None} | known))
        if unknown := next((key for key in given if key not in known), None):
            raise ValueError(_unknown(kind, unknown, given[unknown]))
        return found

    def vllm_note(self) -> str:
        """One line if vLLM 0.26 scales cosines and sines by another factor; else empty."""
        given = [key for key in UNREAD_BY_VLLM if getattr(self, key) is not None]
        if not given:
            return ""
        read = RopeScaling(**{key: value for key, value in self.parameters.items() if key not in given})
        # the factor depends on neither theta nor the heads; without those keys it is the one that vLLM computes
        ours, theirs = (scaling.frequencies(1e4, 2)[1] for scaling in (self, read))
        if math.isclose(ours, theirs, rel_tol=1e-3):  # equal in bf16
            return ""
        return (
            f"vLLM 0.26 ignores {' and '.join(given)} of a YaRN rope: cosines and sines are scaled by {theirs:g} "
            f"there, by {ours:g} here, so it drafts differently there"
        )

    def __str__(self) -> str:
        return f"{self.rope_type} x {self.factor:g}"

    def frequencies(self, theta: float, head_dim: int) -> tuple[tuple[float, ...], float]:
        """Returns `scaled_frequencies` of heads of this size. Raises ValueError if they cannot be computed."""
        config = Qwen3Config(head_dim=head_dim)
        config.rope_parameters = self.parameters | {"rope_theta": theta}  # set later to avoid needless warnings
        try:
            found, factor = scaled_frequencies(config)
        except ArithmeticError as error:
            raise ValueError(f"theta {theta:g} with {self.parameters} makes no frequencies ({error})") from error
        if not all(map(math.isfinite, (*found, factor))):
            raise ValueError(f"theta {theta:g} with {self.parameters} makes frequencies that are not numbers")
        return found, factor


def _unknown(kind: str, key: str, value: Any) -> str:
    return f"rope type {kind!r} knows no {key!r} (it is {value!r}); remove it if the drafter was trained without it"


def read_rope(rope: dict[str, Any], scaling: dict[str, Any], outer: dict[str, Any]) -> tuple[Any, RopeScaling | None]:
    """Returns theta, None if it is not given, and the scaling that transformers 5 reads from a config.json.

    Args:
        rope: `rope_parameters`.
        scaling: `rope_scaling`, which replaces it, including theta.
        outer: the keys around the two.

    Raises:
        ValueError: as `RopeScaling`; the two groups differ; or theta is in a group that is not read.
    """
    found = RopeScaling.read(scaling or rope, outer)
    names_scaling = rope.keys() - {"rope_theta", "partial_rotary_factor"}
    if scaling and names_scaling and RopeScaling.read(rope, outer) != found:
        raise ValueError("'rope_parameters' and 'rope_scaling' differ; leave out the one that it was not trained with")
    places = ((scaling or rope).get("rope_theta"), outer.get("rope_theta"))
    theta = next((value for value in places if value is not None), None)
    if theta is None and (lost := rope.get("rope_theta")) is not None:
        raise ValueError(f"rope_theta is {lost!r} in 'rope_parameters', which 'rope_scaling' replaces; move it there")
    return theta, found


@functools.cache
def warn_of_vllm(path: str, scaling: RopeScaling | None) -> None:
    """Warns on stderr that vLLM runs the drafter exported to `path` differently; once, since a run exports often."""
    if scaling is not None and (note := scaling.vllm_note()):
        print(f"warning: drafter {path}: {note}", file=sys.stderr)
