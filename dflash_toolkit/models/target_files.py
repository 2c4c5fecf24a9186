"""Reads a target's files except its weights: configuration, tokenizer, sampling defaults."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import cached_file

from ..checkpoint.reader import check_merged
from ..config import UnsupportedModel, UserError
from ..network import unreachable
from ..templates import choose_template
from .restrictions import restrictions
from .structure import Structure, text_config

MODELOPT_FILE = "hf_quant_config.json"


def one_line(error: Exception) -> str:
    return " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__


def load_config(name: str) -> PreTrainedConfig:
    """Returns the configuration of the target's language model, without weights, see `text_config`.

    Raises:
        UserError: it is missing, cannot be read or is not a causal language model.
    """
    return text_config(whole_config(name))


def whole_config(name: str) -> PreTrainedConfig:
    if not os.path.isdir(name) and (Path(name).is_absolute() or name.startswith(".") or name.count("/") > 1):
        raise UserError(f"target {name}: no such directory")
    check_merged(name)
    try:
        config = AutoConfig.from_pretrained(name)
    except Exception as error:  # transformers checks little of a file's content, so any error may follow
        if not os.path.isdir(name) and unreachable(error):
            raise UserError(
                f"target {name}: no such directory, and the hub cannot be reached; give the directory of a model"
            ) from error
        raise UserError(f"target {name}: cannot read its config.json ({one_line(error)})") from error
    if getattr(config, "quantization_config", None) is None:  # older exports of modelopt have a file of their own
        found = cached_file(
            name,
            MODELOPT_FILE,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if found is not None:
            config.quantization_config = {"quant_method": "modelopt", **_modelopt(Path(found))}
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedModel(
            f"target {name}: architecture {config.model_type!r} is not supported: transformers has no causal language "
            f"model of it"
        )
    return config


def _modelopt(file: Path) -> dict[str, Any]:
    """Returns the quantization of a checkpoint of modelopt. Raises UserError."""
    try:
        return dict(json.loads(file.read_bytes())["quantization"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{file}: cannot be read ({one_line(error)})") from error


def check_architecture(name: str) -> None:
    """Builds the target without memory for weights, from its config.json alone, and finds its parts.

    Raises:
        UserError: the configuration cannot be read, or no model can be built from it.
        UnsupportedModel: see `Structure.of_model`.
    """
    config = whole_config(name)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # as in `whole_config`
        raise UserError(f"target {name}: no model can be made of its config.json ({one_line(error)})") from error
    Structure.of_model(model, name)


def load_tokenizer(name: str, **rendering: Any) -> Any:
    """Returns the target's tokenizer, with a template chosen by `choose_template(**rendering)`. Raises UserError."""
    try:
        found = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # as above; the tokenizers library has no error class for a bad tokenizer.json
        raise UserError(f"target {name}: cannot load its tokenizer ({one_line(error)})") from error
    return choose_template(found, **rendering)


def load_generation_config(name: str | Path) -> GenerationConfig | None:
    """Returns a checkpoint's generation_config.json; None if it has none.

    Raises:
        UserError: it cannot be read, or has a key that is not supported, see `restrictions`.
    """
    local = os.path.isdir(name)
    if local and not (Path(name) / "generation_config.json").exists():
        return None
    try:
        found = GenerationConfig.from_pretrained(name)
    except Exception as error:
        if isinstance(error, OSError) and not local:
            return None  # the Hub's answer for a checkpoint without one
        raise UserError(f"target {name}: cannot read its generation_config.json ({one_line(error)})") from error
    restrictions(str(name), found, 0)
    return found


def warn_of_penalty(name: str) -> None:
    """Warns on stderr if generation_config.json has a repetition penalty: only dflash-serve applies it."""
    penalty = getattr(load_generation_config(name), "repetition_penalty", None)
    if penalty not in (None, 1.0):
        print(
            f"warning: the target's generation_config.json sets repetition_penalty {penalty}, which is not applied "
            f"here; dflash-serve applies it, unless it is given --sampling-defaults openai",
            file=sys.stderr,
        )


RESERVED_WORDS = ("reserved", "unused", "extra", "placeholder", "empty")


def choose_mask_token(tokenizer: Any, embedding_rows: int) -> int:
    """Returns an id that no text produces, for masked slots.

    The first row of the embedding that the tokenizer does not use (Qwen3: 151669); else the last special token
    with a name like `reserved` or `unused` that is not the bos, eos, pad or unk token.

    Raises:
        UserError: there is neither; then `drafter.mask_token_id` is required.
    """
    if len(tokenizer) < embedding_rows:
        return len(tokenizer)
    taken = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    reserved = [
        token
        for text, token in tokenizer.get_added_vocab().items()
        if token not in taken and any(word in text.lower() for word in RESERVED_WORDS)
    ]
    if not reserved:
        raise UserError("the target has no unused embedding row for the mask; give one as drafter.mask_token_id=ID")
    return max(reserved)
