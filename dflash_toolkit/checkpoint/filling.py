"""Tensors of a checkpoint or a module into the places that a model's weights have for them."""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from ..config import UserError

if TYPE_CHECKING:
    from torch import Tensor  # which is not imported yet where files are read ahead

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def tensor_files(folder: Path) -> list[Path]:
    """The files of a checkpoint's weights, looked for in transformers' order. Raises UserError for a bad index."""
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]  # whatever else lies there: adapters, states of an optimiser
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: not the index of a checkpoint's files; fetch it again") from error


def fill_from_files(what: str, places: dict[str, "Tensor"], files: list[Path]) -> None:
    """Copy every tensor of `files` to its place, a thread per file (reading and copying overlap).

    Raises:
        UserError: there are none, or a tensor is missing, unknown or misshapen.
    """
    if not files:
        raise UserError(f"{what}: no *.safetensors there; the runtime reads no other format")
    left, spare = dict(places), {}

    def read(path: Path) -> None:
        with safe_open(path, framework="pt") as tensors:
            stored = tensors.keys()
            for name in stored:
                view = left.pop(name, None)
                if view is not None:
                    _copy(what, name, view, tensors.get_tensor(name))
                elif _expendable(what, name):
                    spare[name] = tensors.get_tensor(name)

    with ThreadPoolExecutor(min(8, len(files))) as pool:
        try:
            list(pool.map(read, files))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{what}: cannot read its weights ({' '.join(str(error).split())})") from error
    _check_none_left(what, left)
    check_tied(what, places, spare)


def fill(what: str, places: dict[str, "Tensor"], state: Mapping[str, "Tensor"]) -> None:
    """Copy every tensor of `state` to its place. Raises UserError as `fill_from_files` does."""
    left, spare = dict(places), {}
    for name, tensor in state.items():
        view = left.pop(name, None)
        if view is not None:
            _copy(what, name, view, tensor)
        elif _expendable(what, name):
            spare[name] = tensor
    _check_none_left(what, left)
    check_tied(what, places, spare)


def check_tied(what: str, places: Mapping[str, "Tensor"], stored: Mapping[str, "Tensor"]) -> None:
    """Refuse a head of its own where the head is to be the embedding: transformers decodes with it.

    Raises:
        UserError: `stored` has such a head.
    """
    head, embedding = stored.get(HEAD), places.get(EMBEDDING)
    if head is None or embedding is None or head is embedding:
        return
    if head.shape != embedding.shape or not bool((head.to(embedding) == embedding).all()):
        raise UserError(
            f"{what}: its config.json ties the head to the embedding, but it stores another {HEAD}; set "
            f"tie_word_embeddings to false in config.json"
        )


def _copy(what: str, name: str, view: "Tensor", tensor: "Tensor") -> None:
    if tensor.shape != view.shape:
        raise UserError(f"{what}: tensor {name!r} has shape {tuple(tensor.shape)}, not {tuple(view.shape)}")
    view.copy_(tensor)


def _expendable(what: str, name: str) -> bool:
    """Whether it is a tensor that may be there without having a place; any other is refused with UserError."""
    # a tied head is often stored all the same; old checkpoints carry rotary buffers
    if name != HEAD and not name.endswith("rotary_emb.inv_freq"):
        raise UserError(f"{what}: tensor {name!r} is not part of the model that its config.json describes")
    return name == HEAD


def _check_none_left(what: str, left: Mapping[str, "Tensor"]) -> None:
    if left:
        raise UserError(f"{what}: {len(left)} tensors are missing from its weights, first {min(left)!r}")
