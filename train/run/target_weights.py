"""Sizes of a target's weights, counted from its configuration without storage."""

import math
from collections import Counter
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from dflash_toolkit.config import UserError
from dflash_toolkit.models.dflash.shape import EXPERTS
from dflash_toolkit.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Weights:
    """Sizes of a target."""

    embedding: int  # with the head, if it is separate
    dense: int  # layers without routed experts
    experts: int
    used: float  # share of the experts that one token activates
    fp8: bool
    mxfp4: bool
    layers: int
    kv_bytes: int  # per token
    state_bytes: int  # per request, in recurrent layers

    @classmethod
    def of_target(cls, target: PreTrainedConfig) -> "Weights":
        """Counts the parameters of a model that has no storage."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(target, dtype=torch.bfloat16)
        ends = {
            id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None
        }
        sizes: Counter[str] = Counter()
        for name, parameter in model.named_parameters():
            kind = "experts" if ".experts." in name else "embedding" if id(parameter) in ends else "dense"
            sizes[kind] += parameter.numel()
        declared = target.to_dict().get("quantization_config", {})
        method = declared.get("quant_method", "")
        method = str(getattr(method, "value", method))  # a member of an enum, if transformers has loaded the target
        count = next((value for name in EXPERTS if (value := getattr(target, name, None))), 1)
        names = "num_experts_per_tok", "top_k_experts"
        used = next((value for name in names if (value := getattr(target, name, None))), 1) / count
        kinds = list(getattr(target, "layer_types", None) or ["full_attention"] * target.num_hidden_layers)
        recurrent = kinds.count("linear_attention")
        state = 0
        if recurrent:
            sizes_of_state = ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
            state = 4 * recurrent * math.prod(getattr(target, name, 0) for name in sizes_of_state)
        keys = sum(each.shape[0] for name, each in model.named_parameters() if name.endswith("k_proj.weight"))
        if not keys:  # fused with queries and values
            heads = getattr(target, "num_key_value_heads", None) or target.num_attention_heads
            keys = len(kinds) * target.hidden_size // target.num_attention_heads * heads
        kv_bytes = 2 * 2 * keys
        fp8 = method in ("fp8", "compressed-tensors", "fbgemm_fp8") and declared.get("format") != "pack-quantized"
        return cls(
            sizes["embedding"],
            sizes["dense"],
            sizes["experts"],
            used,
            fp8,
            method == "mxfp4",
            len(kinds),
            kv_bytes,
            state,
        )

    @property
    def nbytes(self) -> float:
        """Bytes of all weights."""
        return 2 * self.embedding + self._layers(1.0)

    def _layers(self, share: float) -> float:
        wide = 1.0 if self.fp8 else 2.0
        return wide * self.dense + share * self.experts * (0.53 if self.mxfp4 else wide)

    def read(self, requests: int, context: float) -> float:
        """Returns the bytes that a plain step of `requests` reads and writes, with `context` tokens each."""
        woken = 1 - (1 - self.used) ** requests if self.experts else 0.0
        own = requests * (self.kv_bytes * context + 2 * self.state_bytes)
        return self.embedding + self._layers(woken) + own  # half of embedding and head: the head alone

    @property
    def active(self) -> float:
        """Parameters of the layers that one token activates."""
        return self.dense + self.used * self.experts


def computes(target: PreTrainedConfig) -> bool:
    """Returns whether our engine supports the target."""
    try:
        ModelSpec.of_target(target)
    except UserError:
        return False
    return True
