"""Finds a model's folder and weight files, and copies their tensors to a model's parameters.

Imports no torch: files are found, and read ahead, while torch is imported.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import constants
from safetensors import SafetensorError, safe_open

from ..config import UnsupportedModel, UserError
from ..network import unreachable

if TYPE_CHECKING:
    from torch import Tensor

    Conversions = Callable[[str], tuple[str, Callable[[Tensor], Tensor]] | None]

# beginnings of names of tensors outside of the text model: of Qwen3.5, which also drafts tokens, Gemma and Llama 4
OTHER_MODULES = (
    "model.visual.", "mtp.", "vision_model.", *(
        f"{whole}{part}." for whole in ("", "model.")
        for part in (
            "vision_tower", "audio_tower", "vision_embedder", "embed_vision", "embed_audio", "multi_modal_projector",
        )
    ),
)  # fmt: skip
CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale")  # last parts of names: scales of a quantized KV cache
MASK_EMBEDDING = "mask_embedding.pt"  # next to a drafter: a learned embedding of the mask token, which vLLM reads
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def locate(what: str, name: str) -> Path:
    """Returns the directory of a model, downloaded if `name` is a Hugging Face id.

    Args:
        what: target or drafter, for messages.

    Raises:
        UserError: there is no such model.
    """
    if os.path.isdir(name):  # unlike Path's, it accepts names of any length
        return Path(name)
    if Path(name).is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise UserError(f"{what} {name}: no such directory")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", MASK_EMBEDDING]))
    except (OSError, ValueError) as error:
        if unreachable(error):
            said = f"{what} {name}: no such directory, and the hub cannot be reached; give the directory of a {what}"
            raise UserError(said) from error
        raise UserError(f"{what} {name}: no such directory, and the hub gave none ({type(error).__name__})") from error


def check_merged(name: str) -> None:
    """Raises UserError if a target has a LoRA adapter: some readers would apply it and others ignore it."""
    if os.path.isdir(name):
        found = (Path(name) / "adapter_config.json").is_file()
    else:
        from transformers.utils import find_adapter_config_file

        try:
            found = find_adapter_config_file(name) is not None
        except Exception:  # no such model, or no network: whatever reads it next reports that
            found = False
    if found:
        raise UserError(
            f"target {name}: it has a LoRA adapter (adapter_config.json), which is not applied; merge it first: "
            f"peft.AutoPeftModelForCausalLM.from_pretrained({name!r}).merge_and_unload().save_pretrained(DIR), save "
            f"the tokenizer to DIR, and give DIR"
        )


def cached_folder(name: str) -> Path | None:
    """Returns a model's directory on this machine; for an id, the main branch in huggingface_hub's cache."""
    if os.path.isdir(name):
        return Path(name)
    # without huggingface_hub's own functions: their imports in a thread could collide with those of transformers
    cached = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    try:
        folder = cached / "snapshots" / (cached / "refs" / "main").read_text()
        return folder if folder.is_dir() else None
    except (OSError, ValueError):
        return None


def weight_files(folder: Path, kinds: Sequence[str] = ("model.safetensors",)) -> list[Path]:
    """Returns the files of a model's tensors, in transformers' order of preference; empty if there are none.

    Other files in the folder, such as adapters or optimizer states, are skipped.

    Args:
        kinds: names of a file with all tensors, one for each acceptable format.

    Raises:
        UserError: a damaged index, or one that names a missing file.
    """
    for whole in kinds:
        if (folder / whole).is_file():
            return [folder / whole]
        if (index := folder / f"{whole}.index.json").is_file():
            try:
                files = sorted(folder / name for name in set(json.loads(index.read_bytes())["weight_map"].values()))
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                raise UserError(f"{index}: not the index of a checkpoint's files; fetch it again") from error
            if missing := [file for file in files if not file.is_file()]:
                raise UserError(f"{missing[0]}: no such file, although {index.name} lists it")
            return files
        if files := sorted(folder.glob(f"*{Path(whole).suffix}")):
            return files
    return []


def tensor_names(files: Sequence[Path]) -> list[str]:
    """Returns the names of all tensors in safetensors files; skips damaged files, which `each_tensor` reports."""
    names: list[str] = []
    for file in files:
        with contextlib.suppress(OSError, SafetensorError), safe_open(file, framework="pt") as tensors:
            names += tensors.keys()
    return names


def each_tensor(what: str, files: Sequence[Path], take: Callable[[str, "Callable[[str], Tensor]"], None]) -> None:
    """Calls `take(name, read)` for every tensor of safetensors files, a thread per file; `read(name)` is the tensor.

    Raises:
        UserError: there are no files, one is damaged, or two hold the same tensor; also the errors of `take`.
    """
    if not files:
        raise UserError(f"{what}: no *.safetensors file in its directory; other formats are not supported")

    first: dict[str, Path] = {}  # the file of every tensor

    def run(file: Path) -> None:
        try:
            with safe_open(file, framework="pt") as tensors:
                stored = tensors.keys()
                for name in stored:
                    if (other := first.setdefault(name, file)) is not file:
                        both = " and ".join(sorted((other.name, file.name)))
                        raise UserError(f"{what}: tensor {name!r} is in both {both}; remove one of the files")
                    take(name, tensors.get_tensor)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{what}: {file.name} is corrupt ({' '.join(str(error).split())})") from error

    with ThreadPoolExecutor(min(8, len(files))) as pool:  # reading and copying overlap
        list(pool.map(run, files))


def load_files(
    what: str,
    views: Mapping[str, "Tensor"],
    files: Sequence[Path],
    conversions: "Conversions | None" = None,
    unused: tuple[str, ...] = (),
) -> None:
    """Copies every tensor of `files` to the parameter view of its name.

    Args:
        conversions: returns for a stored name that of a view, empty to only check the tensor, and what converts the
            tensor for it; None for a tensor that is copied as it is.
        unused: beginnings of the names of tensors to skip.

    Raises:
        UserError: there are none, or a tensor is missing, unknown or misshapen.
    """
    weights = _Weights(what, views, conversions, unused)
    each_tensor(what, files, weights.take)
    weights.check_complete()


def load_weights(what: str, views: Mapping[str, "Tensor"], tensors: Mapping[str, "Tensor"]) -> None:
    """Copies every tensor to the parameter view of its name. Raises UserError as `load_files` does."""
    weights = _Weights(what, views)
    for name in tensors:
        weights.take(name, tensors.__getitem__)
    weights.check_complete()


class _Weights:
    """Parameter views to fill."""

    def __init__(
        self,
        what: str,
        views: Mapping[str, "Tensor"],
        conversions: "Conversions | None" = None,
        unused: tuple[str, ...] = (),
    ) -> None:
        self._unused = OTHER_MODULES + unused
        self._what, self._views, self._conversions = what, views, conversions
        self._left = dict(views)
        self._cache_scales = False  # whether there are any
        self._head: Tensor | None = None  # stored although it is the embedding

    def take(self, stored: str, read: "Callable[[str], Tensor]") -> None:
        name, convert = text_name(stored), None
        if self._conversions is not None and (found := self._conversions(name)) is not None:
            name, convert = found
            if not name:
                convert(read(stored))
                return
        view = self._left.pop(name, None)
        if view is not None:
            tensor = read(stored)
            if convert is not None:
                tensor = convert(tensor.to(view.device))
            if name.endswith(".weight_scale") and tensor.numel() == 1:  # the scale of a whole FP8 matrix
                tensor = tensor.reshape(1, 1).expand(view.shape)
            if view.dim() == 3 and tuple(tensor.shape) in (view.flatten(0, 1).shape, view.flatten(1).shape):
                tensor = tensor.reshape(view.shape)  # its parts are apart in memory
            if tensor.shape != view.shape:
                raise UserError(
                    f"{self._what}: tensor {name!r} has shape {tuple(tensor.shape)}, not {tuple(view.shape)}"
                )
            if tensor.dtype != view.dtype and 1 in (tensor.element_size(), view.element_size()):
                kinds = [str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, view.dtype)]
                more_in_fp8 = tensor.element_size() == 1  # than the engine supports
                raise (UnsupportedModel if more_in_fp8 else UserError)(
                    f"{self._what}: tensor {name!r} is in {kinds[0]}, not in {kinds[1]}, as quantization_config in its "
                    f"config.json would have it"
                )
            view.copy_(tensor)
        elif name == HEAD and EMBEDDING in self._views:
            self._head = read(stored)
        elif name.rpartition(".")[2] in CACHE_SCALES:
            self._cache_scales = True
        elif name.endswith(".input_scale") and f"{name.removesuffix('input_scale')}weight_scale" in self._views:
            pass  # a static scale of the rows of an FP8 GEMM; the engine scales every row by its own largest value
        elif not name.endswith("rotary_emb.inv_freq") and not name.startswith(self._unused):  # in old checkpoints
            raise UserError(
                f"{self._what}: unknown tensor {name!r}; it is not part of the model that its config.json describes"
            )

    def check_complete(self) -> None:
        if self._head is not None and EMBEDDING in self._left:  # some writers keep the head of the two
            head = self._head
            self.take(EMBEDDING, lambda _: head)
        if self._left:
            raise UserError(f"{self._what}: {missing_tensors(self._left)}")
        if self._cache_scales:
            print(
                f"notice: {self._what}: its scales of a quantized KV cache are not used, see --kv-cache-dtype",
                file=sys.stderr,
            )


def text_name(stored: str) -> str:
    """Returns the name that a tensor has in a checkpoint without a vision tower."""
    name = stored.removeprefix("language_model.")  # prefix of Llama 4, and of the first releases of Gemma 3
    return name.replace("model.language_model.", "model.", 1)


def missing_tensors(names: Iterable[str]) -> str:
    """Describes missing tensors."""
    first, *others = sorted(names)
    tied = "; config.json does not tie the head to the embedding (tie_word_embeddings)" if first == HEAD else ""
    return f"{1 + len(others)} tensors are missing from its weights, first {first!r}{tied}"


def stores_own_head(files: Sequence[Path]) -> bool:
    """Whether safetensors files hold a head that differs from the embedding.

    transformers uses such a head even if config.json ties the two.
    """
    found: dict[str, Tensor] = {}
    for file in files:
        with contextlib.suppress(OSError, SafetensorError), safe_open(file, framework="pt") as tensors:
            stored = tensors.keys()
            found |= {
                text_name(name): tensors.get_tensor(name) for name in stored if text_name(name) in (EMBEDDING, HEAD)
            }
    head, embedding = found.get(HEAD), found.get(EMBEDDING)
    if head is None or embedding is None:
        return False
    return head.shape != embedding.shape or not bool((head == embedding).all())
