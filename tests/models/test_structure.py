"""The arguments of a target's forward are read from the model, whatever the installed transformers calls it."""

import warnings
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_toolkit import Target
from dflash_toolkit.config import UnsupportedModel

CONFIG = LlamaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
IDS = torch.arange(8)[None]


class Today(LlamaForCausalLM):
    """Calls its cache `cache`, as transformers does from 5.24 on."""

    def forward(self, input_ids: Any, cache: Any = None, logits_to_keep: Any = 0, **others: Any) -> Any:  # type: ignore[override]
        return _forward(self, input_ids, cache, logits_to_keep, others)


class Before(LlamaForCausalLM):
    """Calls it `past_key_values`, as transformers did before."""

    def forward(self, input_ids: Any, past_key_values: Any = None, logits_to_keep: Any = 0, **others: Any) -> Any:  # type: ignore[override]
        return _forward(self, input_ids, past_key_values, logits_to_keep, others)


class WithoutCache(LlamaForCausalLM):
    def forward(self, input_ids: Any, logits_to_keep: Any = 0, **others: Any) -> Any:  # type: ignore[override]
        raise AssertionError


class AllLogits(LlamaForCausalLM):
    def forward(self, input_ids: Any, cache: Any = None, **others: Any) -> Any:  # type: ignore[override]
        raise AssertionError


def _forward(model: Any, ids: Any, cache: Any, keep: Any, others: dict[str, Any]) -> Any:
    name = Target(LlamaForCausalLM(CONFIG)).structure.cache_argument
    return LlamaForCausalLM.forward(model, ids, logits_to_keep=keep, **{name: cache}, **others)


@pytest.mark.parametrize("kind", [LlamaForCausalLM, Today, Before])
def test_a_cache_is_filled_under_either_argument_name(kind: Any) -> None:
    target = Target(kind(CONFIG))
    cache = target.new_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # transformers' warning about the old name
        target.forward(IDS[:, :5], cache=cache)
        cache.flush()
        rest = target.forward(IDS[:, 5:], cache=cache, logits="all").logits
    assert cache.get_seq_length() == 8
    torch.testing.assert_close(rest, target.forward(IDS, logits="all").logits[:, 5:])


@pytest.mark.parametrize(
    ("kind", "part"), [(WithoutCache, "takes a cache of keys and values"), (AllLogits, "logits_to_keep")]
)
def test_a_forward_without_cache_or_chosen_logits_is_refused(kind: Any, part: str) -> None:
    with pytest.raises(UnsupportedModel, match=part):
        Target(kind(CONFIG), name="x/y")
