"""Digests that identify a model: sha256 over every byte of its weights, independent of its location and file layout.

A copy under another name, or split into other files, has the same digest; any other byte of a tensor changes it.
Reading 16 GB takes time, so the digest is kept in the user's cache while the files stay unchanged.
"""

import hashlib
import json
import os
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .checkpoint.reader import cached_folder, weight_files
from .config import UserError
from .progress import Progress

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

READ = 4 << 20  # bytes of one read: hashlib and the read work on it without the GIL
THREADS = 8
BAR_BYTES = 1 << 30  # larger models show a progress bar
MOST_HEADER = 100_000_000  # bytes, as the format allows
SETTLED_S = 2.0  # a file that was just written may be written again with the same modification time
TOKENS_BYTES = 16
FORM = "dflash-toolkit model 1"
KINDS = ("model.safetensors", "pytorch_model.bin")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
# keys of a config.json that do not change the computation: authorship, storage format, and training options
VOLATILE = {
    "_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "output_attentions",
    "output_hidden_states", "return_dict", "_attn_implementation", "_attn_implementation_autoset",
    "attn_implementation", "initializer_range", "attention_dropout", "pad_token_id", "bos_token_id",
    "tie_word_embeddings",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes of a file that are hashed as one: a tensor, or a whole file of another format."""

    name: str
    kind: str  # dtype and shape
    file: Path
    start: int
    size: int  # bytes


def model_digest(name: str | Path) -> str | None:
    """Returns the sha256 of a model: every byte of its weights and scales, and the lasting part of its config.json.

    A name on the Hub means its snapshot in the local cache. None if it has no weights: an endpoint's client needs only
    a configuration and a tokenizer. Tensors count sorted by name, with dtype and shape; names of folders and files and
    the division into files do not count. A head that repeats the embedding byte for byte, as some programs save tied
    heads, counts as not saved.

    Raises:
        UserError: a damaged file, or one that cannot be read.
    """
    folder = cached_folder(str(name))
    if folder is None or not weight_files(folder, KINDS):
        return None
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    return json_digest([FORM, _lasting(config), weights_digest(folder)])


def weights_digest(folder: str | Path) -> str:
    """Returns the sha256 of the tensors of a folder of .safetensors files, else of its .bin files; see `model_digest`.

    Raises:
        UserError: none of these files, a damaged one, or one that cannot be read.
    """
    files = weight_files(Path(folder), KINDS)
    if not files:
        raise UserError(f"{folder}: no *.safetensors and no *.bin file in this directory")
    try:
        before = [_state(file) for file in files]
        kept = _cache_file([FORM, before])
        if kept and (found := _kept(kept)):
            return found
        digest = _hashed([part for file in files for part in _parts(file)])
        settled = time.time() - max(state[2] for state in before) / 1e9 > SETTLED_S
        if kept and settled and before == [_state(file) for file in files]:
            _keep(kept, digest)
        return digest
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be read ({error.strerror or error})") from error


def _lasting(value: Any) -> Any:
    """Returns a configuration without keys that do not change the numbers, and without nulls."""
    if isinstance(value, dict):
        return {k: _lasting(v) for k, v in value.items() if k not in VOLATILE and v is not None}
    return [_lasting(each) for each in value] if isinstance(value, list) else value


def _parts(file: Path) -> list[_Part]:
    """Returns the parts of a file to hash."""
    size = file.stat().st_size
    if file.suffix != ".safetensors":
        return [_Part(f"file of {size} bytes", "bin", file, 0, size)]
    try:
        with open(file, "rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            if length > min(size, MOST_HEADER):
                raise ValueError("its header does not fit")
            header = json.loads(handle.read(length))
        found = []
        for name, about in header.items():
            if name == "__metadata__":
                continue
            start, end = about["data_offsets"]
            if not 0 <= start <= end <= size - 8 - length:
                raise ValueError(f"{name} is outside the file")
            kind = f"{about['dtype']} {[int(n) for n in about['shape']]}"
            found.append(_Part(name, kind, file, 8 + length + start, end - start))
    except (struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: damaged or not a safetensors file ({error})") from error
    return found


def _hashed(parts: Sequence[_Part]) -> str:
    """Returns one digest of all parts, read by several threads, the largest first."""
    total = sum(part.size for part in parts)
    order = sorted(parts, key=lambda part: -part.size)

    def run(advance: Callable[[int], None]) -> list[str]:
        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
            found = []
            for part, digest in zip(order, pool.map(_bytes_digest, order), strict=True):
                found.append(digest)
                advance(part.size)
            return found

    if total < BAR_BYTES:
        digests = run(lambda size: None)
    else:
        with Progress("weights' digest", round(total / 1e6), unit="MB") as bar:
            digests = run(lambda size: bar.advance(size / 1e6))
    # two files of another format are distinguished by content: their names do not count
    lines = sorted((part.name, part.kind, digest) for part, digest in zip(order, digests, strict=True))
    embedding = {line[1:] for line in lines if line[0].endswith(EMBEDDINGS)}
    kept = [line for line in lines if not (line[0].endswith("lm_head.weight") and line[1:] in embedding)]
    return json_digest(kept)


def _bytes_digest(part: _Part) -> str:
    digest, left = hashlib.sha256(), part.size
    buffer = memoryview(bytearray(min(READ, max(left, 1))))
    with open(part.file, "rb", buffering=0) as handle:
        handle.seek(part.start)
        while left:
            count = handle.readinto(buffer[: min(left, len(buffer))])
            if not count:
                raise UserError(f"{part.file}: ends before {part.name} does; was it copied whole?")
            digest.update(buffer[:count])
            left -= count
    return digest.hexdigest()


# ---- the user's cache ----------------------------------------------------------------------------------------


def _state(file: Path) -> tuple[str, int, int, int]:
    """Returns path, bytes, time of the last change in ns, and inode, after resolving links."""
    path = file.resolve()
    stat = path.stat()
    return str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino


def _cache_file(key: Any) -> Path | None:
    root = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if not root.is_absolute():  # a user without a home
        return None
    return root / "dflash-toolkit" / f"weights-{json_digest(key)[:32]}.json"


def _kept(path: Path) -> str | None:
    try:
        found = json.loads(path.read_text())["sha256"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, str) and len(found) == 64 else None


def _keep(path: Path, digest: str) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"sha256": digest}))
        temporary.replace(path)
    except OSError:
        pass  # works without a cache


# ---- other digests ---------------------------------------------------------------------------------------------


def json_digest(value: Any) -> str:
    """Returns the sha256 of a value as JSON, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def files_digest(paths: Sequence[str]) -> str:
    """Returns the sha256 over the contents of files, in order. Raises UserError."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            with open(path, "rb") as handle:
                while chunk := handle.read(1 << 20):
                    digest.update(chunk)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def template_digest(tokenizer: Any) -> str:
    """Returns the sha256 of the chat template: training and serving must use the same."""
    return hashlib.sha256(str(getattr(tokenizer, "chat_template", None)).encode()).hexdigest()


def tensor_digest(tensor: "Tensor") -> str:
    """Returns the sha256 of a tensor's bf16 bytes, as a checkpoint stores them: the same in every compute dtype."""
    import torch

    return hashlib.sha256(
        tensor.detach().to("cpu", torch.bfloat16).contiguous().flatten().view(torch.uint8).numpy().data
    ).hexdigest()


def joint_digest(digests: Mapping[str, str]) -> str:
    """Returns the sha256 of the names and digests of tensors, in the order of their names."""
    return hashlib.sha256("".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()


def drafter_digest(drafter: "Module") -> str:
    """Returns the sha256 that an export records and a report shows for a drafter."""
    return joint_digest({name: tensor_digest(tensor) for name, tensor in drafter.state_dict().items()})


def sample_digest(tensors: Iterable[tuple[str, "Tensor"]]) -> str:
    """Returns the sha256 of the first values of every tensor, by name: compares checkpoints without a full read."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(name.encode())
        digest.update(tensor.detach()[:64].flatten()[:64].cpu().float().numpy().tobytes())
    return digest.hexdigest()


def tokens_digest(tokens: npt.ArrayLike) -> bytes:
    """Returns the key under which token ids are compared or looked up: `TOKENS_BYTES` of BLAKE2b."""
    return hashlib.blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=TOKENS_BYTES).digest()
