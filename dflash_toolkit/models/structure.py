"""Finds the parts of a loaded decoder-only transformers model by its structure, not by its name."""

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ..config import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

CACHE_ARGUMENTS = ("cache", "past_key_values")  # the name in transformers from 5.24 on, and the one before


@dataclass(frozen=True, slots=True)
class Structure:
    """The parts of a causal language model; the outputs of `layers` are its residual stream."""

    embedding: nn.Embedding  # maps token ids, with the model's scale, if any
    layers: nn.ModuleList
    norm: nn.Module  # the final one
    head: nn.Linear
    cache_argument: str  # its name in the model's `forward`

    @classmethod
    def of_model(cls, model: "PreTrainedModel", name: str) -> "Structure":
        """Finds the parts. Raises UnsupportedModel naming the first that is missing."""

        import transformers  # takes seconds, and the runtime needs none of it

        def lacks(part: str) -> UnsupportedModel:
            return UnsupportedModel(
                f"target {name}: architecture {model.config.model_type!r} is not supported with transformers "
                f"{transformers.__version__}: it has no {part}"
            )

        config = text_config(model.config)
        if model.config.is_encoder_decoder:
            raise lacks("separate decoder")
        decoder: Any = model.get_decoder()
        if decoder is model:  # Llama 4 gives its base model another name than the attribute has
            decoder = getattr(model, "model", model)
        children, depth = list(decoder.children()), config.num_hidden_layers
        layers = [part for part in children if isinstance(part, nn.ModuleList) and len(part) == depth]
        if len(layers) != 1:
            raise lacks(f"list of its {depth} decoder layers")
        norms = [part for part in children if _is_norm(part, config.hidden_size)]
        if not norms:
            raise lacks("norm after its last decoder layer")
        embedding: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()
        if embedding is None:
            raise lacks("embedding of its input")
        if head is None:
            raise lacks("LM head")
        arguments = inspect.signature(type(model).forward).parameters
        cache = next((name for name in CACHE_ARGUMENTS if name in arguments), None)
        if cache is None:
            raise lacks("forward that takes a cache of keys and values")
        if "logits_to_keep" not in arguments:
            raise lacks("forward that computes the logits of chosen positions ('logits_to_keep')")
        return cls(embedding, layers[0], norms[-1], head, cache)


def _is_norm(module: nn.Module, size: int) -> bool:
    weight = getattr(module, "weight", None)
    return "norm" in type(module).__name__.lower() and (weight is None or weight.shape == (size,))


def text_config(config: "PreTrainedConfig") -> "PreTrainedConfig":
    """Returns the configuration of the language model: a part of it for a model with images, else all of it.

    It also gets the name, the architecture, the quantization and the end-of-sequence ids of the whole. The head is
    tied if either says so: transformers reads the whole's value, and writers of checkpoints may write only one.
    """
    text: Any = config.get_text_config(decoder=True)
    if text is config:
        return config
    tied = any(getattr(each, "tie_word_embeddings", False) for each in (config, text))
    text.tie_word_embeddings = config.tie_word_embeddings = tied
    text.name_or_path, text.architectures = config.name_or_path, config.architectures
    if getattr(config, "quantization_config", None) is not None:
        text.quantization_config = config.quantization_config
    outer, own = (end_ids(getattr(each, "eos_token_id", None)) for each in (config, text))
    if set(outer) - set(own):
        text.eos_token_id = [*outer, *(token for token in own if token not in outer)]
    return text


def end_ids(eos: Any) -> list[Any]:
    """Returns `eos_token_id` as a list, for any value."""
    return list(eos) if isinstance(eos, list | tuple) else [] if eos is None else [eos]
