"""A target whose layers run in a vLLM server, for a target that does not fit into the GPUs of training.

This process loads only the embedding and the head. The server is vLLM with the speculative method
`extract_hidden_states` and its ExampleHiddenStatesConnector: it receives token ids, writes a safetensors file to a
folder that both see, and returns its path. While it writes, the server holds a lock on a file next to it.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dflash_toolkit.checkpoint.reader import each_tensor, locate, weight_files
from dflash_toolkit.config import UserError
from dflash_toolkit.models.device import resolve_dtype, use_device
from dflash_toolkit.models.structure import Structure
from dflash_toolkit.models.target import Target, TargetOutput
from dflash_toolkit.models.target_files import load_config, load_tokenizer
from dflash_toolkit.openai_http import TryAgainError, base_url, find_models, request_json

CONNECTIONS = 32  # concurrent requests
TIMEOUT_S = 600.0
RETRIES = 5
PAUSE_S = 1.0  # before the first retry; doubled for each further one


class ServedTarget(Target):
    """The target `name` with hidden states from the server at `url`.

    Args:
        taps: 0-based ids of the layers whose outputs the server writes, in its order; the server counts from 1.

    Raises:
        UserError: no such target, no dense embedding and head, or no such server.
    """

    def __init__(self, name: str, url: str, taps: Sequence[int], device: str = "auto", dtype: str = "auto") -> None:
        config = load_config(name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        _lend(model, name, use_device(device), dtype)
        super().__init__(model, load_tokenizer(name), name)
        self._served, self._url = list(taps), base_url(url)
        (self._model,) = find_models([url], None, TIMEOUT_S)
        self._threads = ThreadPoolExecutor(CONNECTIONS)

    def forward(
        self, ids: Tensor, *, taps: Sequence[int] = (), lengths: Sequence[int] | None = None, **others: Any
    ) -> TargetOutput:
        """Returns features as `Target.forward` does. Later layers are unknown, so `final` is None.

        Raises:
            UserError: the server fails, or its file is missing or has other tokens or layers.
        """
        if others.keys() - {"final"} or len(ids) != 1:
            raise UserError(f"target {self.name}: run.feature_endpoint computes hidden states of whole texts only")
        texts = [text.tolist() for text in ids[0].split(list(lengths or [ids.shape[1]]))]
        hidden = torch.cat(list(self._threads.map(self._states, texts)))  # [T, K, D]
        columns = hidden[:, [self._served.index(tap) for tap in taps]]
        return TargetOutput(columns.flatten(1)[None].to(self.device, self.dtype), None)

    def _states(self, text: list[int]) -> Tensor:
        """Returns the hidden states [n, K, D] of one text from the server."""
        body = {"model": self._model, "prompt": text, "max_tokens": 1, "temperature": 0.0}
        for attempt in range(RETRIES + 1):
            try:
                reply = request_json(f"{self._url}/completions", TIMEOUT_S, body)
                break
            except TryAgainError as error:
                if attempt == RETRIES:
                    raise UserError(f"{self._url}: no hidden states after {RETRIES + 1} attempts ({error})") from error
                time.sleep(max(error.after_s, PAUSE_S * 2**attempt))
        path = (reply.get("kv_transfer_params") or {}).get("hidden_states_path")
        if not isinstance(path, str):
            raise UserError(
                f"{self._url} writes no hidden states: start vLLM with the method extract_hidden_states and its "
                f"ExampleHiddenStatesConnector (docs/scale.md)"
            )
        tensors = _read(path)
        hidden, tokens = tensors.get("hidden_states"), tensors.get("token_ids")
        if hidden is None or tokens is None or tokens.tolist() != text:
            raise UserError(f"{path}: does not hold the hidden states of the text that was sent to {self._url}")
        wanted = (len(text), len(self._served), int(self.config.hidden_size))
        if hidden.shape != wanted:
            raise UserError(
                f"{path}: hidden states of shape {tuple(hidden.shape)}, not {wanted}; give vLLM "
                f"eagle_aux_hidden_state_layer_ids {layer_ids(self._served)}"
            )
        for done in (path, f"{path}.lock"):  # no other process needs them
            with contextlib.suppress(OSError):  # files of another user
                os.remove(done)
        return hidden


def layer_ids(taps: Sequence[int]) -> list[int]:
    """Returns vLLM's numbers of the layers with these 0-based ids."""
    return [tap + 1 for tap in taps]


def _read(path: str) -> dict[str, Tensor]:
    """Returns the tensors of a file of the server, after it is complete. Raises UserError."""
    try:
        with contextlib.suppress(FileNotFoundError), open(f"{path}.lock") as lock:  # locks can be off in the server
            fcntl.flock(lock, fcntl.LOCK_SH)
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}); run.feature_endpoint must write to a folder that this machine sees"
        ) from error


def _lend(model: Any, name: str, device: torch.device, dtype: str) -> None:
    """Loads the embedding and the head of a model without weights. Raises UserError."""
    structure = Structure.of_model(model, name)
    names = {module: path for path, module in model.named_modules()}
    wanted: dict[str, tuple[nn.Module, str]] = {}
    lent: tuple[nn.Module, ...] = (structure.embedding, structure.head)
    for module in lent:
        for part, _ in module.named_parameters(recurse=False):
            wanted[f"{names[module]}.{part}"] = module, part
    found: dict[str, Tensor] = {}

    def take(tensor: str, read: Any) -> None:
        # the language model is a part of a model with images
        own = tensor.replace("language_model.model.", "model.").replace("language_model.", "")
        if own in wanted:
            found[own] = read(tensor)

    each_tensor(f"target {name}", weight_files(locate("target", name)), take)
    kind = resolve_dtype(dtype, device)
    for own, (module, part) in wanted.items():
        if own not in found and module is structure.head and getattr(model.config, "tie_word_embeddings", False):
            found[own] = found[f"{names[structure.embedding]}.{part}"]
        if own not in found:
            raise UserError(f"target {name}: {own!r} is missing from its weights")
        shape = getattr(module, part).shape
        if found[own].shape != shape:
            raise UserError(f"target {name}: tensor {own!r} has shape {tuple(found[own].shape)}, not {tuple(shape)}")
        if part == "weight" and found[own].dtype.itemsize < 2:
            raise UserError(f"target {name}: {own!r} is quantized, but a drafter needs it dense")
        setattr(module, part, nn.Parameter(found[own].to(device, kind), requires_grad=False))
