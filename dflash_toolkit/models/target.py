"""The frozen target: loads it, taps the outputs of chosen layers, lends its embedding and head.

Taps are forward hooks on exactly the chosen layers (and the final norm), so memory holds only K hidden states.
If no logits are needed, the forward stops after the highest tapped layer.
"""

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ..checkpoint.dense import dense_tensors
from ..checkpoint.reader import locate, missing_tensors, weight_files
from ..config import UnsupportedModel, UserError
from ..draft_tree import WIDTH
from ..stop_tokens import stop_tokens
from . import packed
from .cache import BatchCache, TargetCache
from .device import resolve_dtype, use_device
from .quantized import dequantized_format
from .restrictions import Restrictions, restrictions
from .spec import context_limit
from .structure import Structure, text_config
from .target_files import (
    load_generation_config,
    load_tokenizer,
    one_line,
    whole_config,
)
from .temperature import scale_by_positions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel  # takes seconds to import, and the runtime needs none of it

DENSE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(slots=True)
class TargetOutput:
    """The results of one forward of the target."""

    features: Tensor | None  # [B, T, K*D] in tap order, None without taps
    logits: Tensor | None  # [B, T, V] ("all"), [B, 1, V] ("last"), None ("none")
    final: Tensor | None = None  # [B, T, D] after the final norm: the head's input; None unless requested


class _EnoughLayers(Exception):
    """Ends the forward after the highest tapped layer."""


def _dequantized_fp8(asked: dict[str, Any], name: str, slices: int = 1) -> dict[str, Any]:
    """Returns the quantization of a checkpoint in FP8 with the request to dequantize its weights at loading, also if
    there is a GPU.

    Raises:
        UserError: blocks that do not divide a matrix, or its slices: transformers reads their scales as those of
            smaller blocks.
    """
    blocks = asked.get("weight_block_size") or ()
    for file in weight_files(locate("target", name)):
        with safe_open(file, framework="pt") as tensors:
            stored = set(tensors.keys())
            for tensor in sorted(key for key in stored if f"{key}_scale_inv" in stored):
                shape = tensors.get_slice(tensor).get_shape()
                for size, block in zip(shape, blocks, strict=False):
                    if slices > 1 and size % (block * slices):
                        raise UserError(
                            f"target {name}: tensor {tensor!r} of {shape} cannot be cut into {slices} slices of whole "
                            f"FP8 blocks of {block}; give a smaller run.target_tensor_parallel_size, or the "
                            f"unquantized checkpoint"
                        )
                    if size > block and size % block:
                        raise UserError(
                            f"target {name}: tensor {tensor!r} of {shape} is not a multiple of its FP8 blocks of "
                            f"{block}, which cannot be dequantized; use --device cuda with the package kernels, or the "
                            f"unquantized checkpoint"
                        )
    return asked | {"dequantize": True}


def _computes_fp8(where: torch.device, mesh: "DeviceMesh | None") -> bool:
    """Whether transformers multiplies matrices in FP8 there: its kernels come from the hub, by a package; they were not
    tried with slices."""
    if mesh is not None:
        return False
    if where.type == "cuda" and importlib.util.find_spec("kernels") is not None:
        return True
    if where.type == "cuda":
        print(
            "the target's FP8 weights are dequantized, and its activations are not cast: pip install kernels for "
            "the GEMMs that it is served with",
            file=sys.stderr,
        )
    return False


class Target:
    """A frozen causal LM with its tokenizer. Every method runs without gradients unless noted."""

    def __init__(
        self, model: "PreTrainedModel", tokenizer: Any = None, name: str = "", mesh: "DeviceMesh | None" = None
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = text_config(model.config)
        self.tokenizer = tokenizer
        self.mesh = mesh
        self.name = name or str(model.config.name_or_path)
        self.structure = Structure.of_model(model, self.name)
        scale_by_positions(self.structure.layers)
        # a checkpoint with a head of its own is loaded with it, even if its config.json says that they are tied
        self.config.tie_word_embeddings = self.structure.head.weight is self.structure.embedding.weight
        self._continues = False  # whether a recurrent model was seen to continue from a cached state
        self._takes_trees = False  # whether `forward` was seen to compute trees
        if getattr(self.config, "attn_logit_softcapping", None):
            model.set_attn_implementation("eager")  # before 5.21 transformers used SDPA, which ignores the cap
        for what, module in (("embedding", self.structure.embedding), ("LM head", self.structure.head)):
            weight = getattr(module, "weight", None)
            if weight is None or weight.dtype not in DENSE or weight.shape[-1:] != (self.config.hidden_size,):
                raise UserError(
                    f"target {self.name}: its {what} is quantized, and a drafter needs it dense; "
                    f"quantize the target without it (it is left out by default in bitsandbytes and llm-compressor)"
                )

    @classmethod
    def load(cls, name: str, device: str = "auto", dtype: str = "auto", mesh: "DeviceMesh | None" = None) -> "Target":
        """Loads a Hugging Face id or directory.

        A checkpoint with a `quantization_config` is loaded as transformers does, quantized if its library is installed;
        other computations are in `dtype`. An FP8 checkpoint is dequantized on a CPU, which has no FP8 GEMMs, without
        the package kernels, and in slices: its weights are the same numbers, and activations are not cast. INT4 and
        modelopt's FP8 are dequantized everywhere.

        Args:
            mesh: shard the layers over these processes, each of which must call this and every forward.

        Raises:
            UserError: missing or corrupt weights or configurations, an unsupported architecture, no such device, a
                quantized checkpoint without its library or without dense embedding and head.
        """
        whole = whole_config(name)
        config = text_config(whole)
        stop_tokens(config, load_generation_config(name))  # transformers ignores a file that it cannot read
        where = use_device(device)
        asked = getattr(config, "quantization_config", None)
        quantized, source, precision = asked is not None, dict[str, Any](), resolve_dtype(dtype, where)
        form = None if mesh is not None else dequantized_format(config)
        if form is not None:
            files = weight_files(locate("target", name))
            source["state_dict"] = dense_tensors(f"target {name}", files, form, precision)
            for each in (whole, config):
                each.quantization_config = None
        try:
            in_fp8 = asked if isinstance(asked, dict) and asked.get("quant_method") == "fp8" else None
            if mesh is not None and quantized and in_fp8 is None:
                raise UnsupportedModel(
                    f"target {name}: only quantized targets in FP8 blocks can be split over several "
                    f"processes; a GPU must hold it whole, or vLLM compute its hidden states (run.feature_endpoint)"
                )
            if in_fp8 is not None and not _computes_fp8(where, mesh):
                whole.quantization_config = _dequantized_fp8(in_fp8, name, mesh.size() if mesh is not None else 1)
            load: Any = AutoModelForCausalLM.from_pretrained
            if source:  # the class's own method also loads from memory
                with torch.device("meta"):
                    load = type(AutoModelForCausalLM.from_config(whole)).from_pretrained
            if mesh is not None:
                from . import sharded  # takes seconds to import

                load = functools.partial(sharded.load, mesh=mesh)
            model, info = load(
                None if source else name,
                config=whole,  # transformers uses its text part if it has a model of that alone
                dtype=precision,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **source,
                # quantized tensors cannot be moved, or are made only on their device; others load faster without
                device_map={"": where} if quantized and mesh is None else None,
            )
        except (ImportError, OSError, SafetensorError, RuntimeError, ValueError) as error:
            raise UserError(f"target {name}: cannot load its weights ({one_line(error)})") from error
        # transformers would fill the tensors named here with random numbers and continue
        if mismatched := sorted(info["mismatched_keys"]):
            tensor, stored, wanted = mismatched[0]
            raise UserError(f"target {name}: tensor {tensor!r} has shape {tuple(stored)}, not {tuple(wanted)}")
        if missing := sorted(info["missing_keys"]):
            raise UserError(f"target {name}: {missing_tensors(missing)}")
        placed = model if quantized or mesh is not None else model.to(where)
        return cls(placed, load_tokenizer(name), name, mesh)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def layers(self) -> nn.ModuleList:
        return self.structure.layers

    @property
    def embedding(self) -> nn.Embedding:
        return self.structure.embedding

    @property
    def head_weight(self) -> Tensor:
        """The LM head's matrix [V, D]: the embedding's own if they are tied."""
        return self.structure.head.weight

    @property
    def head_bias(self) -> Tensor | None:
        return getattr(self.structure.head, "bias", None)

    @property
    def context_limit(self) -> int:
        """Maximum tokens of prompt and answer together."""
        return context_limit(self.config)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer, see `stop_tokens`. Raises UserError for an invalid id."""
        return stop_tokens(self.config, getattr(self.model, "generation_config", None), self.tokenizer)

    @property
    def restrictions(self) -> Restrictions:
        """The tokens that generation_config.json forbids in every answer. Raises UserError, see `restrictions`."""
        generation = getattr(self.model, "generation_config", None)
        return restrictions(self.name, generation, self.embedding.num_embeddings)

    def embed(self, ids: Tensor) -> Tensor:
        """Returns rows [..., D] of the embedding's table, as drafters read it: without the factor in Gemma's module.

        z-lab's client and vLLM do the same; SGLang applies Gemma's factor.
        """
        return self.embedding(ids) if type(self.embedding) is nn.Embedding else F.embedding(ids, self.embedding.weight)

    def head(self, hidden: Tensor) -> Tensor:
        """Returns logits [..., V] of final hidden states by the head and its bias alone: without the final norm, and
        without the model's order-preserving changes after the head (a soft cap, a scale).
        """
        return self.structure.head(hidden)

    @property
    def leads(self) -> bool:
        """Whether this process decides if several decode with one sharded target."""
        return self.mesh is None or self.mesh.get_local_rank() == 0

    def broadcast_(self, tensor: Tensor) -> None:
        """Copies a contiguous tensor from the process that `leads` to all; every process of the target calls it."""
        if self.mesh is not None:
            dist.broadcast(tensor, group=self.mesh.get_group(), group_src=0)

    def local_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights by name; for a sharded target this process's slices."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.to_local() if hasattr(parameter, "to_local") else parameter

    def new_cache(self) -> TargetCache:
        """Returns an empty cache for one row of tokens.

        Raises:
            UnsupportedModel: the model keeps state that no such cache holds, or does not read its state.
        """
        cache = TargetCache(self.config, self.name)
        if cache.recurrent and not self._continues:
            self._check_states()
        return cache

    def _check_states(self) -> None:
        """Refuses a recurrent model that runs several tokens as if no tokens preceded them, as transformers' Jamba."""
        ids, cache = torch.arange(16, device=self.device)[None], TargetCache(self.config, self.name)
        try:
            whole, _ = (
                self.forward(each, cache=kept, final=True).final for each, kept in ((ids, None), (ids[:, :8], cache))
            )
            rest = self.forward(ids[:, 8:], cache=cache, final=True).final
        except ValueError as error:
            raise UnsupportedModel(
                f"target {self.name}: it does not support transformers' cache ({one_line(error)})"
            ) from error
        assert whole is not None and rest is not None
        off = float((rest - whole[:, 8:]).norm() / whole[:, 8:].norm())
        # rounding moves hidden states by less than 0.1 % in fp32, by some per cent in bf16 with its choice of experts
        if not off < (0.02 if self.dtype.itemsize > 2 else 0.2):
            raise UnsupportedModel(
                f"target {self.name}: transformers' {type(self.model).__name__} computes other hidden states after a "
                f"cache than without one (off by {off:.0%}), so that nothing can be verified"
            )
        self._continues = True

    def tree_width(self, asked: int | None = None) -> int:
        """Returns the maximum children of a tree node for this model, WIDTH by default; 1 makes chains, always valid.

        Raises:
            UnsupportedModel: see `check_trees`.
        """
        width = asked or WIDTH
        if width > 1 and not self.new_cache().recurrent:  # else each path runs alone
            self.check_trees()
        return width

    def check_trees(self) -> None:
        """Refuses a model without recurrent layers that computes a tree of tokens differently from each of its paths.

        Raises:
            UnsupportedModel: a model that ignores the mask or the positions that it gets.
        """
        if self._takes_trees:
            return
        cache = self.new_cache()
        paths = ((0, 1, 2), (0, 3, 4))  # after eight tokens; row 4 is not next to row 0
        ids = torch.arange(13, device=self.device)[None] % self.embedding.num_embeddings
        visible = torch.eye(5, dtype=torch.bool, device=self.device)
        for path in paths:
            for i, row in enumerate(path):
                visible[row, list(path[:i])] = True
        try:
            self.forward(ids[:, :8], cache=cache)
            cache.flush()
            tree = self.forward(ids[:, 8:], cache=cache, visible=visible, final=True).final
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedModel(
                f"target {self.name}: it does not accept the mask of a draft tree ({one_line(error)}); "
                f"use chains (--draft-tree-width 1)"
            ) from error
        for path in paths:
            rows = [8 + row for row in path]
            alone = self.forward(ids[:, [*range(8), *rows]], final=True).final
            assert tree is not None and alone is not None
            off = float((tree[:, list(path)] - alone[:, 8:]).norm() / alone[:, 8:].norm())
            if not off < (0.02 if self.dtype.itemsize > 2 else 0.2):  # as for states
                raise UnsupportedModel(
                    f"target {self.name}: transformers' {type(self.model).__name__} computes other hidden states in a "
                    f"draft tree than in a chain (off by {off:.0%}); use chains (--draft-tree-width 1)"
                )
        self._takes_trees = True

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        *,
        taps: Sequence[int] = (),
        cache: TargetCache | BatchCache | None = None,
        logits: Literal["all", "last", "none"] = "none",
        final: bool = False,
        lengths: Sequence[int] | None = None,
        padding: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> TargetOutput:
        """Runs the target on `ids` [B, T], after the tokens in `cache`.

        Args:
            taps: 0-based layer ids; the feature of id l is the output of layer l, HF `hidden_states[l + 1]`.
            cache: extended in place by T tokens. With early exit only the layers that ran are extended.
            logits: positions to return logits for; "none" with taps stops after the highest tapped layer, and
                otherwise before the head.
            final: also return the last hidden state after the final norm; every layer runs then, the head does not.
            lengths: ids are one row [1, T] of concatenated documents of these lengths; each sees only itself, from
                position 0 on. Only without a cache.
            padding: integers [B]; this many places at the left of each row, of the cache or of ids, hold no token.
            visible: bool [T, T]; ids are one row [1, T], a tree after the cached tokens; each token sees itself and its
                ancestors. Needs a cache of one row and `check_trees`.
        """
        if lengths is not None and (cache is not None or ids.shape != (1, sum(lengths))):
            raise ValueError(f"documents of {list(lengths)} tokens need ids [1, {sum(lengths)}] and no cache")
        if cache is not None:  # the next tokens depend on the choice of these
            self.broadcast_(ids)
        tapped, norm = [self.layers[layer] for layer in taps], self.structure.norm
        leave = None
        if logits == "none":
            leave = self.layers[max(taps)] if taps and not final else norm
        documents: contextlib.AbstractContextManager[dict[str, Any]] = contextlib.nullcontext({})
        if lengths is not None:
            documents = packed.alone(self.model, lengths)
        with _outputs([*tapped, norm] if final else tapped, leave) as found, documents as extra:
            if padding is not None:
                seen = 0 if cache is None else cache.get_seq_length()
                places = torch.arange(seen + ids.shape[1], device=ids.device) - padding[:, None]
                extra = {"attention_mask": (places >= 0).long(), "position_ids": places[:, seen:].clamp(min=0)}
            if visible is not None:
                assert isinstance(cache, TargetCache)
                places = cache.get_seq_length() + visible.sum(-1) - 1
                extra = {"attention_mask": cache.tree_mask(visible, self.dtype), "position_ids": places[None]}
            try:
                # a tensor, not 1: Gemma 4 runs its last layers on the last token alone if it gets a number
                keep = torch.tensor([ids.shape[1] - 1], device=ids.device) if logits == "last" else 0
                extra |= {self.structure.cache_argument: cache, "use_cache": cache is not None}
                out = self.model(ids, logits_to_keep=keep, **extra)
            except _EnoughLayers:
                out = None
        features = torch.cat([found[layer] for layer in tapped], dim=-1) if taps else None
        shown = None if out is None or logits == "none" else out.logits
        if shown is not None and cache is not None:
            self.broadcast_(shown)
        return TargetOutput(features, shown, found[norm] if final else None)


@contextlib.contextmanager
def _outputs(modules: Sequence[nn.Module], leave: nn.Module | None) -> Iterator[dict[nn.Module, Tensor]]:
    """Collects the outputs of `modules` during a forward, which ends after the module `leave`."""
    found: dict[nn.Module, Tensor] = {}

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        found[module] = output if isinstance(output, Tensor) else output[0]
        if module is leave:
            raise _EnoughLayers

    handles = [module.register_forward_hook(hook) for module in dict.fromkeys(modules)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
