"""Drafter checkpoints on disk, in the format that z-lab's client, vLLM and SGLang load; also reads speculators' format.

Reading is strict: every tensor must have a known name and the right shape, and none may be missing. Writing goes to a
temporary folder inside the checkpoint's; then its files move to their places one by one, config.json last: no file is
ever incomplete, and a first export is complete once it has a config.json.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from ...checkpoint.reader import MASK_EMBEDDING, each_tensor, load_weights, locate, weight_files
from ...config import UserError
from ..rope import read_rope, warn_of_vllm
from .architecture import DFLASH, DraftArchitecture, architectures, named, of_sizes
from .config import DrafterConfig
from .eight_bits import in_eight_bits, narrowed, widened
from .network import Drafter
from .serving import served_elsewhere

PROVENANCE_KEY = "dflash_toolkit"  # ignored by every other loader
WEIGHTS = "model.safetensors"
# on a block's embeddings and on logits, with their defaults; read in dflash_config by all loaders
SCALES: dict[str, float | None] = {
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}
STALE_S = 3600.0  # no export takes so long
DIVERGED = "its training diverged; train again with a lower optim.learning_rate"
# tensors of the speculators format: those that repeat the target's, and the map of a reduced vocabulary to the target's
TARGETS_OWN = {"embed_tokens.weight", "lm_head.weight"}
SPECULATORS_COPIES = {*TARGETS_OWN, "verifier_lm_head.weight", "verifier_norm.weight"}
SPECULATORS_MAPS = {"d2t", "t2d"}
REDUCED = "a reduced vocabulary, which is not drafted with; dflash-train --init-from starts from its layers"


# ---- writing ---------------------------------------------------------------------------------------------------


def config_json(config: DrafterConfig, provenance: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the contract's `config.json`; `block_size` and the rope appear twice: loaders differ in the keys."""
    scaling = config.rope_scaling.parameters if config.rope_scaling else None
    values: dict[str, Any] = {
        "architectures": [config.architecture.names[0]],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_parameters": (scaling or {"rope_type": "default"}) | {"rope_theta": config.rope_theta},
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "use_sliding_window": "sliding_attention" in config.layer_types,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "dflash_config": {
            "target_layer_ids": list(config.target_layer_ids),
            "mask_token_id": config.mask_token_id,
            "block_size": config.block_size,
        }
        | scales_of(config)
        | acceptance_of(config),
    }
    architecture = config.architecture
    own = {architecture.sizes[name].stored or name: size for name, size in config.sizes.items() if size}
    values[architecture.stored_in] = values.get(architecture.stored_in, {}) | own
    if scaling:
        values["rope_scaling"] = scaling  # transformers 4 does not read rope_parameters
    if config.is_causal is not None:
        values["is_causal"] = config.is_causal
    if provenance is not None:
        values[PROVENANCE_KEY] = provenance
    return values


def scales_of(config: DrafterConfig) -> dict[str, float]:
    """Returns the SCALES of a drafter that are set."""
    return {key: getattr(config, key) for key, none in SCALES.items() if getattr(config, key) != none}


def acceptance_of(config: DrafterConfig) -> dict[str, Any]:
    """Returns the measured calibration of a drafter's probabilities; empty without one."""
    if not config.acceptance_bias:
        return {}
    return {"acceptance_slope": config.acceptance_slope, "acceptance_bias": list(config.acceptance_bias)}


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Returns every tensor of a checkpoint and its shape: the whitelist for reading and writing."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}


def save_drafter(
    drafter: Drafter, path: str | Path, provenance: dict[str, Any] | None = None, dtype: str | None = None
) -> None:
    """Writes `config.json` and bf16 weights to the directory `path`, then reads them back and compares.

    With `dtype` fp8 or int8 the matrices of the layers have 8 bits, and the weights read back are compared with these.
    Files of an earlier export are replaced together; others in `path` (metrics, state) stay. Warns on stderr if vLLM
    computes the rope differently.

    Raises:
        UserError: a weight or an output is not a finite number, the disk is full or `path` cannot be written;
            nothing is half-written.
        RuntimeError: the files read back differ from those written.
    """
    tensors = stored_tensors(drafter)
    if diverged := next((name for name, tensor in tensors.items() if not tensor.isfinite().all()), None):
        raise UserError(f"drafter {path}: not written, because {diverged} contains NaN or infinity; {DIVERGED}")
    stored, values = tensors, config_json(drafter.config, provenance)
    if dtype:
        stored, values["quantization_config"] = narrowed(tensors, dtype)
        tensors = widened(stored)
        drafter = Drafter.of_tensors(drafter.config, tensors)
    with staged(Path(path)) as stage:
        save_file(stored, stage / WEIGHTS, metadata={"format": "pt"})
        (stage / "config.json").write_text(json.dumps(values, indent=2) + "\n")
        reread = load_drafter(str(stage))
        if reread.config != drafter.config:
            raise RuntimeError(f"{path}: the configuration read back differs from the one written")
        for name, value in reread.state_dict().items():
            if not torch.equal(value, tensors[name]):
                raise RuntimeError(f"{path}: tensor {name} read back differs from the one written")
        _compare_hidden(drafter, reread)
    warn_of_vllm(str(path), drafter.config.rope_scaling)


def stored_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint: weights in bf16, on the CPU."""
    return {
        name: t.detach().to("cpu", torch.bfloat16 if t.is_floating_point() else t.dtype).contiguous()
        for name, t in drafter.state_dict().items()
    }


@torch.no_grad()
def _compare_hidden(drafter: Drafter, reread: Drafter) -> None:
    """Runs one block through both modules, in fp32 with bf16-rounded weights; detects a network built differently."""
    config = drafter.config
    twin = Drafter.of_tensors(config, stored_tensors(drafter)).float()
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 5, config.feature_size, generator=generator)
    block = torch.randn(1, config.block_size, config.hidden_size, generator=generator)
    positions = torch.arange(5 + config.block_size)[None]
    tokens = torch.zeros_like(positions[:, 5:])
    before, after = (
        m(block, positions[:, 5:], m.context_kv(features, positions[:, :5]), tokens=tokens)
        for m in (twin, reread.float())
    )
    if not before.isfinite().all():  # weights so large that their products overflow
        raise UserError(f"the drafter is not written, because its hidden states contain NaN or infinity; {DIVERGED}")
    if not torch.allclose(before, after, rtol=1e-5, atol=1e-5):
        raise RuntimeError("the exported drafter computes other hidden states than the trained one")


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """Yields a temporary folder in `path`; its files move up into `path` if the block ends without an error."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        for left in path.glob(".partial-*"):  # after a kill
            if time.time() - left.stat().st_mtime > STALE_S:
                shutil.rmtree(left, ignore_errors=True)
        stage = Path(tempfile.mkdtemp(dir=path, prefix=".partial-"))
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error
    try:
        yield stage
        for file in sorted(stage.iterdir(), key=lambda f: f.name == "config.json"):  # config last: it marks completion
            file.chmod((stage / "config.json").stat().st_mode)  # safetensors makes files that other users cannot read
            os.replace(file, path / file.name)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot write the checkpoint ({error}); free some space and run again") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


# ---- reading ---------------------------------------------------------------------------------------------------


def load_drafter(
    name: str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None, *, layers_only: bool = False
) -> Drafter:
    """Loads a drafter directory or Hugging Face id, in z-lab's format or the speculators format.

    Args:
        layers_only: skip the head of a drafter with a reduced vocabulary, and its map to the target's vocabulary.

    Raises:
        UserError: missing or corrupt files, an unknown, missing or misshapen tensor (named), a network that this
            project does not implement (named).
    """
    path = locate("drafter", name)
    config = read_config(path, layers_only=layers_only)
    if (path / MASK_EMBEDDING).exists():
        raise UserError(
            f"drafter {name}: has a learned embedding of the mask token ({MASK_EMBEDDING}), which only vLLM uses; "
            f"run it with --engine vllm"
        )
    with torch.device("meta"):
        drafter = Drafter(config).to(dtype or torch.bfloat16)
    drafter = drafter.to_empty(device=device).eval().requires_grad_(False)
    tensors = drafter.state_dict()
    load_weights(f"drafter {name}", tensors, read_tensors(path, tensors, layers_only=layers_only))
    if why := config.architecture.unusable(drafter):
        raise UserError(f"drafter {name}: {why}; train or export it again")
    return drafter


def read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON object of a drafter's directory. Raises UserError."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"drafter {path.parent}: cannot read {path.name} ({error})") from error
    if not isinstance(values, dict):
        raise UserError(f"drafter {path.parent}: {path.name} is not a JSON object")
    return values


def read_tensors(path: Path, known: Collection[str] = (), *, layers_only: bool = False) -> dict[str, Tensor]:
    """Returns every tensor on disk, except copies of the target's embedding and head.

    Args:
        known: names of the drafter's tensors; those without `.weight` at the end are also read with it.

    Raises:
        UserError: no or corrupt files; a tensor that is stored twice; a map of a reduced vocabulary, unless
            `layers_only`.
    """
    raw = read_json(path / "config.json")
    speculators = "speculators_model_type" in raw
    left_out = set(SPECULATORS_COPIES if speculators else ())
    if layers_only and (speculators or reduced_vocabulary(raw) is not None):
        left_out |= SPECULATORS_COPIES | SPECULATORS_MAPS
    table = [raw.get("vocab_size"), raw.get("hidden_size")]  # the shape of the target's embedding and head
    tensors: dict[str, Tensor] = {}
    spellings: dict[str, str] = {}
    unused: set[str] = set()

    def take(stored: str, read: Callable[[str], Tensor]) -> None:
        name = stored.removeprefix("model.")  # some trainers save their module one level up
        if name not in known and (bare := name.removesuffix(".weight")) in known:  # and a parameter as an nn.Embedding
            name = bare
        if speculators and name in SPECULATORS_MAPS - left_out:
            raise UserError(f"drafter {path}: tensor {stored!r} maps {REDUCED}")
        if name in left_out:
            return
        tensor = read(stored)
        if name in TARGETS_OWN and list(tensor.shape) == table:
            unused.add(name)
            return
        if (other := spellings.setdefault(name, stored)) != stored:
            short, long = sorted((other, stored), key=len)
            raise UserError(f"drafter {path}: tensor {short!r} is stored twice, once as {long!r}")
        tensors[name] = tensor

    each_tensor(f"drafter {path}", weight_files(path), take)
    if unused:
        print(
            f"notice: drafter {path}: its own {' and '.join(sorted(unused))} are not used; it drafts with the target's",
            file=sys.stderr,
        )
    return widened(tensors) if raw.get("quantization_config") else tensors


def reduced_vocabulary(raw: dict[str, Any]) -> Any:
    """Returns `draft_vocab_size` of a config.json, the rows of the drafter's own head; None for the target's."""
    body, key = raw.get("transformer_layer_config") or raw, "draft_vocab_size"
    parts = (raw.get("dflash_config") or {}, raw, body)
    found = next((part[key] for part in parts if part.get(key)), None)
    return None if found == body.get("vocab_size") else found


def read_config(path: Path, *, layers_only: bool = False) -> DrafterConfig:
    """Reads the `config.json` of either format, nested or flat, as published; the vocabulary is the target's.

    Raises:
        UserError: a key is missing, wrong or of a network that this project does not implement; a reduced vocabulary,
            unless `layers_only`.
    """
    raw = read_json(path / "config.json")

    def group(parent: dict[str, Any], key: str) -> dict[str, Any]:
        if not isinstance(parent.get(key) or {}, dict):
            raise UserError(f"drafter {path}: config.json: {key!r} is {parent[key]!r}, not a group of keys")
        return parent.get(key) or {}

    body = group(raw, "transformer_layer_config") or raw
    nested, provenance = group(raw, "dflash_config"), group(raw, PROVENANCE_KEY)
    rope, scaling = group(body, "rope_parameters"), group(body, "rope_scaling")

    def find(key: str, default: Any = None) -> Any:
        parts = (nested, raw, body, provenance)
        return next((part[key] for part in parts if part.get(key) is not None), default)

    def get(key: str, default: Any = None, kind: Any = int) -> Any:
        return checked(key, find(key, default), kind)

    def checked(key: str, found: Any, kind: Any) -> Any:
        if found is None:
            raise UserError(f"drafter {path}: config.json has no {key!r}")
        if not isinstance(found, kind) or isinstance(found, bool):
            raise UserError(f"drafter {path}: config.json: {key!r} is {found!r}, which has the wrong type")
        if isinstance(found, int) and not -(2**63) <= found < 2**63:
            raise UserError(f"drafter {path}: config.json: {key!r} is {found}, which is out of range")
        return found

    stated = group(raw, "quantization_config")
    if (method := stated.get("quant_method")) and not in_eight_bits(stated):
        raise UserError(
            f"drafter {path}: its weights are quantized ({method}), which is not supported; give the one in 16 bits, "
            f"or one that dflash-train export wrote in fp8 or int8"
        )
    speculators = "speculators_model_type" in raw
    projector = find("projector_type", "dflash")
    plain = speculators and raw["speculators_model_type"] == projector == "dflash"
    # that library writes the keys of every variant into all configurations
    for key in ("markov_rank", "use_swa", "attention_sink_bias", *(() if plain else ("emb_dim",))):
        if find(key) not in (None, 0, False):
            where = served_elsewhere(str(projector))
            raise UserError(f"drafter {path}: {key!r} belongs to an unsupported variant of DFlash{where}")
    owners = {each.stored_in: group(raw, each.stored_in) for each in architectures()}

    def find_size(owner: DraftArchitecture, name: str) -> Any:
        if owner.stored_in == DFLASH.stored_in:
            return find(name)
        return owners[owner.stored_in].get(owner.sizes[name].stored or name)

    every = {name: find_size(each, name) for each in architectures() for name in each.sizes}
    architecture = _read_architecture(path, raw, {name: size for name, size in every.items() if size})
    vocabulary = checked("vocab_size", body.get("vocab_size"), int)  # the target's, also with a reduced one
    if (rows := reduced_vocabulary(raw)) is not None:
        if not 0 < checked("draft_vocab_size", rows, int) < vocabulary:
            raise UserError(f"drafter {path}: config.json: 'draft_vocab_size' is {rows}, 'vocab_size' {vocabulary}")
        if not layers_only:
            raise UserError(f"drafter {path}: 'draft_vocab_size' is {rows}, {REDUCED}")
    if find("sample_from_anchor") or find("shift_label"):
        raise UserError(f"drafter {path}: its slots predict the token after them; this is not plain DFlash")
    if find("hidden_act", "silu") != "silu":
        raise UserError(f"drafter {path}: hidden_act {find('hidden_act')!r} is not supported; only silu is")
    key = "partial_rotary_factor"  # the groups' before the outer one; null means the default
    part = next((keys[key] for keys in (scaling, rope) if keys.get(key) is not None), find(key, 1.0))
    if part != 1.0:
        raise UserError(f"drafter {path}: {key} is {part!r}; only 1.0 is supported: drafters rotate whole heads")

    causal = _read_causality(raw, nested, speculators)
    if causal not in (None, True, False):
        raise UserError(f"drafter {path}: config.json: is_causal is {causal!r}; expected true or false")
    shift, key = (1, "aux_hidden_state_layer_ids") if speculators else (0, "target_layer_ids")
    ids = get(key, kind=list)
    if not ids or not all(type(i) is int for i in ids):
        raise UserError(f"drafter {path}: config.json: {key!r} is {ids!r}; expected layer ids")
    ids = [i - shift for i in ids]
    layer_types = get("layer_types", [], kind=list)
    bias = get("acceptance_bias", [], kind=list)
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in bias):
        raise UserError(f"drafter {path}: config.json: 'acceptance_bias' is {bias!r}; expected numbers")
    try:
        theta, rope_scaling = read_rope(rope, scaling, body)
        return architecture.config()(
            hidden_size=get("hidden_size"),
            num_layers=get("num_hidden_layers"),
            num_heads=get("num_attention_heads"),
            num_kv_heads=get("num_key_value_heads"),
            head_dim=get("head_dim", get("hidden_size") // max(1, get("num_attention_heads"))),
            intermediate_size=get("intermediate_size"),
            vocab_size=vocabulary,
            num_target_layers=get("num_target_layers", _least_layers(ids)),
            target_layer_ids=tuple(ids),
            mask_token_id=get("mask_token_id"),
            block_size=get("block_size", 16),
            rms_norm_eps=float(get("rms_norm_eps", 1e-6, kind=int | float)),
            rope_theta=float(checked("rope_theta", find("rope_theta") if theta is None else theta, int | float)),
            max_position_embeddings=get("max_position_embeddings", 32768),
            layer_types=tuple(layer_types),
            sliding_window=None if body.get("sliding_window") is None else get("sliding_window"),
            is_causal=causal,
            attention_bias=find("attention_bias", False) is True,
            rope_scaling=rope_scaling,
            **{key: checked(key, 0 if every[key] is None else every[key], int) for key in architecture.sizes},
            input_embedding_scale=float(get("input_embedding_scale", 1.0, kind=int | float)),
            output_multiplier=float(get("output_multiplier", 1.0, kind=int | float)),
            # 0 means none, as in the other loaders
            final_logit_softcapping=float(get("final_logit_softcapping", 0.0, kind=int | float)) or None,
            acceptance_slope=float(get("acceptance_slope", 1.0, kind=int | float)),
            acceptance_bias=tuple(map(float, bias)),
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"drafter {path}: config.json: {error}") from error


def _read_architecture(path: Path, raw: dict[str, Any], sizes: dict[str, Any]) -> DraftArchitecture:
    """Returns the architecture by its name and the sizes of its parts.

    Servers go by the name: one that drafts with fewer parts than were trained gives no error.
    """
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"drafter {path}: config.json: 'architectures' is {names!r}, not a list of names")
    if unknown := [name for name in names if named(name) is None]:
        *known, last = (each.names[0] for each in architectures())
        raise UserError(
            f"drafter {path}: config.json: architecture {unknown[0]!r} is not that of a drafter "
            f"({', '.join(known)} or {last}){served_elsewhere(unknown[0])}"
        )
    found = next((each for each in map(named, names) if each), None)
    if "speculators_model_type" in raw:
        form = next((each for each in architectures() if each.kind == raw["speculators_model_type"]), DFLASH)
        owner = _owner(sizes) if sizes else DFLASH
        if other := next((each for each in (form, found, owner) if each not in (None, DFLASH)), None):
            raise UserError(
                f"drafter {path}: the speculators form of {other.title} is not supported; "
                f"serve it with dflash-serve --engine vllm"
            )
        return DFLASH
    if found is None:
        try:
            return of_sizes(sizes)
        except ValueError as error:
            raise UserError(f"drafter {path}: config.json: {error}") from error
    if strange := [key for key in sizes if key not in found.sizes]:
        name = _owner(strange[:1]).names[0]
        raise UserError(f"drafter {path}: config.json: {strange[0]!r} is of {name}, but 'architectures' is {names}")
    if found.parts and not sizes:
        missing = " and ".join(repr(next(iter(part.sizes))) for part in found.parts)
        are = "are" if len(found.parts) > 1 else "is"
        raise UserError(f"drafter {path}: config.json: {missing} {are} missing, but 'architectures' is {names}")
    return found


def _owner(sizes: Iterable[str]) -> DraftArchitecture:
    return next(each for each in architectures() if set(sizes) & each.sizes.keys())


def _least_layers(ids: Sequence[int]) -> int:
    # the least depth for a checkpoint that does not record its target's: no tap on the last layer
    return max(ids) + 2


def _read_causality(raw: dict[str, Any], nested: dict[str, Any], speculators: bool) -> bool | None:
    # the speculators library: the key is about sliding layers, full ones are bidirectional whatever it says (vLLM 0.26
    # takes false for all layers); without the key, which is younger than the form, all are
    if speculators:
        return False if raw.get("sliding_window_non_causal", True) else None
    # vLLM's precedence: top-level is_causal, then dflash_config.causal, then the layer's type
    return nested.get("causal") if raw.get("is_causal") is None else raw["is_causal"]


# ---- fitting a target ------------------------------------------------------------------------------------------


def check_fits(drafter: DrafterConfig, target: PreTrainedConfig, embedding_rows: int | None = None) -> None:
    """Refuses a drafter that was made for another target.

    Raises:
        UserError: hidden size, number of layers, layer ids, vocabulary or mask id do not fit; names both values.
    """
    rows = embedding_rows or int(target.vocab_size)
    layers = int(target.num_hidden_layers)
    if drafter.hidden_size != target.hidden_size:
        raise UserError(
            f"the drafter's hidden size is {drafter.hidden_size}, the target's {target.hidden_size}: "
            f"this drafter was made for another target"
        )
    if max(drafter.target_layer_ids) >= layers - 1:
        raise UserError(
            f"the drafter taps layer {max(drafter.target_layer_ids)}; this target of {layers} layers has "
            f"tappable layers 0..{layers - 2}"
        )
    if drafter.num_target_layers not in (layers, _least_layers(drafter.target_layer_ids)):
        raise UserError(
            f"the drafter was made for a target of {drafter.num_target_layers} layers; this one has {layers}"
        )
    if drafter.mask_token_id >= rows:
        raise UserError(f"the drafter's mask id {drafter.mask_token_id} is not a row of the target's {rows}")
    if drafter.vocab_size != target.vocab_size:
        raise UserError(f"the drafter's vocabulary is {drafter.vocab_size}, the target's {target.vocab_size}")
