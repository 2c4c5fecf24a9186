"""The passes of the engine for models of different sizes, on the device "meta": kernels are launched without data.

The library's own host functions choose the tiles and the types, for a GPU with given features.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dflash_toolkit.kernels.clamped import ClampedExperts
from dflash_toolkit.kernels.formats import FP8_BLOCK, MXFP4
from dflash_toolkit.kernels.gpu import Gpu
from dflash_toolkit.kernels.loss_terms import LossMix, RowTerms
from dflash_toolkit.kernels.paged import PagedKV
from dflash_toolkit.kernels.routing import SigmoidRouting
from dflash_toolkit.kernels.triton import convolution, fp8_blocks, pages
from dflash_toolkit.models.dflash.network import Drafter
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.quantized import FORM, GROUP
from dflash_toolkit.models.spec import ModelSpec
from dflash_toolkit.runtime.precompile import META
from dflash_toolkit.runtime.programs.context import Part
from dflash_toolkit.runtime.runner import StepRunner
from dflash_toolkit.runtime.sampler import Mode
from dflash_toolkit.runtime.weights import DrafterWeights, TargetWeights
from scripts.shapes import WEIGHTS, named_shape

LAYERS = 8  # layers of a target: at least one of each type, and enough for the taps of a drafter
CHANNELS: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "float-quantized"}
CHANNELS |= {"ignore": ["lm_head", "re:.*in_proj_[ab]$", "re:.*gate$"]}
CHANNELS |= {"config_groups": {"group_0": {**GROUP, "targets": ["Linear"]}}}
WINDOW = {"layer_types": ("sliding_attention",) * 5, "sliding_window": 2048}
Pass = tuple[str, Callable[[], object]]


@dataclass(frozen=True)
class Model:
    """A target, its drafter, and how they run."""

    shape: str  # a name of scripts/shapes.py
    kind: str = "dflash"
    weights: dict[str, Any] | None = None  # `quantization_config` of the target
    draft_fp8: bool = False
    sample_drafts: bool = False
    window: bool = False  # whether the drafter's layers have a window
    cap: float | None = None  # cap of the drafter's logits
    tokens: int | None = None  # in the vocabulary; None: as the shape has
    fp8_cache: bool = False
    heads: int | None = None  # width of a head, of the target and of the drafter; None: as the shape has
    chains: bool = False  # instead of trees

    def runner(self) -> StepRunner:
        config = named_shape(self.shape)
        config.num_hidden_layers, config.quantization_config = LAYERS, self.weights
        config.vocab_size = self.tokens or config.vocab_size
        if self.heads is not None:
            config.head_dim = self.heads
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:LAYERS]
        target = TargetWeights.empty(ModelSpec.of_target(config), META, torch.bfloat16)
        shape = drafter_shape(config, **(WINDOW if self.window else {}), kind=self.kind)
        shape = replace(shape, final_logit_softcapping=self.cap)
        with META:
            module = Drafter(shape).to(torch.bfloat16)
        drafter = DrafterWeights.of_module(module)
        if self.draft_fp8:
            drafter = drafter.quantized(target.head)
        return StepRunner(
            target, drafter, Gpu(), num_pages=999, page_size=64, max_num_seqs=16, max_context=8192,
            max_block=shape.block_size, sample_drafts=self.sample_drafts, tree_nodes=63,
            tree_width=1 if self.chains else 8, tree_blocks=(shape.block_size,), fp8_cache=self.fp8_cache,
        )  # fmt: skip


# together they launch every kernel
FEW = {
    "4B, DFlash 2, sampled drafts, heads of 256": Model("qwen3-4b", "dflash2", sample_drafts=True, heads=256),
    "4B and drafts in FP8 by channels": Model("qwen3-4b", weights=CHANNELS, draft_fp8=True),
    "27B": Model("qwen3.8-27b"),
    "4B, DSpine, drafts in FP8": Model("qwen3-4b", "dspine", draft_fp8=True),
    "35B-A3B in FP8": Model("qwen3.6-35b-a3b", weights=FORM, chains=True),
    "4B, a cache in FP8": Model("qwen3-4b", fp8_cache=True),
    "30B-A3B in INT4": Model("qwen3-30b-a3b", weights=WEIGHTS["-awq"]),
}
MODELS = FEW | {
    "0.5B": Model("qwen2.5-0.5b"),
    "0.5B, DFlash 2, an odd vocabulary": Model("qwen2.5-0.5b", "dflash2", tokens=151_937),
    "SmolLM2": Model("smollm2"),
    "1.5B": Model("qwen2.5-1.5b"),
    "4B": Model("qwen3-4b"),
    "4B, DFlash 2": Model("qwen3-4b", "dflash2"),
    "0.5B, DSpine, sampled drafts": Model("qwen2.5-0.5b", "dspine", sample_drafts=True),
    "4B, sampled drafts, a window, a cap": Model("qwen3-4b", sample_drafts=True, window=True, cap=30.0),
    "4B in FP8": Model("qwen3-4b", weights=FORM),
    "8B": Model("qwen3-8b"),
    "8B in FP8": Model("qwen3-8b", weights=FORM),
    "8B, DFlash 2, drafts in FP8": Model("qwen3-8b", "dflash2", draft_fp8=True),
    "27B in FP8": Model("qwen3.8-27b", weights=FORM),
    "8B in INT4": Model("qwen3-8b", weights=WEIGHTS["-awq"]),
    "35B-A3B": Model("qwen3.6-35b-a3b"),
    "35B-A3B in FP8 by channels": Model("qwen3.6-35b-a3b", weights=CHANNELS),
}
SIZES = ((1, 1), (16, 1), (1, 16), (2, 16), (4, 16), (8, 16), (16, 16))  # requests and block of steps
TREES = ((1, 16), (1, 64), (4, 32), (16, 256), (8, 128))  # requests and rows of steps over trees


def passes(models: Mapping[str, Model]) -> Iterator[Pass]:
    """Yields the passes of models and of the loss, each with a name."""
    for name, model in models.items():
        for label, run in _of_engine(model.runner()):
            yield f"{name}: {label}", run
    yield from _of_quantized()
    yield from _of_other_families()
    yield from _of_llama_4()
    yield from _of_training()


def _of_engine(runner: StepRunner) -> Iterator[Pass]:
    """Yields steps over blocks and over trees, greedy and with sampling, and prefills."""
    parts = [Part("step", *size) for size in SIZES]
    parts += [Part(kind, *size) for size in (SIZES[-1], SIZES[2]) for kind in ("propose", "read", "end")]
    parts += [Part("choose", *size, mode) for size in (SIZES[-1], SIZES[2]) for mode in Mode]
    parts += [Part("tree", batch, 16, nodes=rows) for batch, rows in TREES]
    parts += [parts[-1]._replace(mode=mode) for mode in (Mode.SAMPLED, Mode.FULL)]
    for part in parts:
        name = f"{part.kind} of {part.rows} requests, block {part.block}, {part.mode.name.lower()}"
        yield name + f", {part.nodes} rows" * bool(part.nodes), lambda part=part: runner.run_part(part)
    prefills = runner.prefills
    for size in (64, 512):
        yield f"prefill of {size}", lambda size=size: prefills.padded(size)
    stack, place = runner.verifier.stack, torch.empty(1, 8, dtype=torch.int32, device=META)
    if stack.scales is not None:
        kv = PagedKV(stack.cache[0], place[0, :1], place, runner.page_size, scales=stack.scales[0])
        yield "pages of a cache in FP8", lambda: pages.read_pages(kv)
    size, count = prefills.batch_shapes[-1]
    yield f"prefill of {count} times {size}", lambda: prefills.run_empty_batch(size, count)


def _of_quantized() -> Iterator[Pass]:
    """Yields GEMMs of quantized targets with sizes or formats that no model above has."""
    with META:
        gate_up, down = (FP8_BLOCK.empty(257, *sides, new=torch.empty) for sides in ((1024, 2048), (2048, 512)))
        many = _bf16(4096, 2048), gate_up, down, torch.empty(4096, 9), torch.empty(4096, 9, dtype=torch.int32)
    yield "experts of more rows than Hopper's kernel streams", lambda: Gpu.experts_mlp(*many)
    with META:
        matrices = (MXFP4.empty(32, *sides, new=torch.empty) for sides in ((5760, 2880), (2880, 2880)))
        clamped = ClampedExperts(_bf16(32, 5760), _bf16(32, 2880), 1.702, 7.0)
        routed = _bf16(1024, 2880), *matrices, torch.empty(1024, 4), torch.empty(1024, 4, dtype=torch.int32), clamped
    yield "experts in MXFP4", lambda: Gpu.experts_mlp(*routed)
    yield "an FFN of more rows than MAX_ROWS", lambda: fp8_blocks.swiglu(_bf16(256, 2048))


def _of_other_families() -> Iterator[Pass]:
    """Yields operations of families that no model above has, with sizes of OLMo 2 7B, Gemma 3 12B and Gemma 4."""
    with META:
        parts, rows, norm = torch.empty(4, 16, 3 * 4096), torch.empty(2, 16, 4096), torch.empty(4096)
    joint = parts, None, norm, norm, 1e-6, torch.bfloat16
    yield "norms of the queries of all heads, and of the keys", lambda: Gpu.norm_queries_keys(*joint)
    outputs = _bf16(16, 4096), rows, None, 1e-6, None, norm
    yield "norms of outputs", lambda: Gpu.add_rms_norm(*outputs)
    with META:
        sums, weight, rope = torch.empty(1, 16, 40 * 512), torch.empty(512), torch.empty(2, 64, 256)
        place = torch.empty(1, 1, dtype=torch.int32)
    written = sums, None, weight, weight, 1e-6, rope, place[0], place, _bf16(2, 64, 4, 512), 64
    yield "normed values", lambda: Gpu.rope_write(*written, normed_values=True)
    queries, placed = (sums, None, weight, None, *written[4:]), place[0]  # flags that no other launch has
    yield "queries alone", lambda: Gpu.rope_write(*queries, at=placed, normed_values=True, queries_only=True)
    with META:
        ids, size = torch.empty(16, dtype=torch.int64), torch.empty(256)
    of_layers = ids, _bf16(9, 8960), _bf16(16, 8960), size, 1e-6, 1.0
    yield "inputs of layers", lambda: Gpu.layer_inputs(*of_layers)
    yield "their gates", lambda: Gpu.gate_layer_input(rows[..., :256], _bf16(16, 256), "gelu_tanh")
    logits, scales = _bf16(1, 16, 128), _bf16(128)
    yield "scaled experts", lambda: Gpu.top_experts(logits, torch.float32, 8, normalized=True, shared=0, scales=scales)
    with META:
        chosen = torch.empty(16, 8), torch.empty(16, 8, dtype=torch.int32), None
    inside = _bf16(16, 2816), _bf16(128, 1408, 2816), _bf16(128, 2816, 704), *chosen
    yield "gelu of experts", lambda: Gpu.experts_mlp(*inside, "gelu_tanh")
    for count in (16, 256):
        x, gate_up = _bf16(count, 3840), _bf16(2 * 15360, 3840)
        yield f"gelu of {count} rows", lambda x=x, w=gate_up: Gpu.linear_swiglu(x, w, "gelu_tanh")


def _of_llama_4() -> Iterator[Pass]:
    """Yields the operations that only Llama 4 has, with the sizes of Scout."""
    with META:
        places, sums = torch.empty(16, 512, dtype=torch.int32), torch.empty(1, 16, 56 * 128)
        routing, rope = torch.empty(16, 2), torch.empty(3, 64, 64)
    cache, chunk = _bf16(2, 64, 8, 128), -8192
    for batch in (1, 16):
        kv = PagedKV(cache, places[:batch, 0], places[:batch], 64, chunk)
        q = _bf16(16 * batch, 40, 128)
        yield f"attention within chunks, {batch} requests", lambda q=q, kv=kv: Gpu.block_attention(q, kv, causal=True)
    written = sums, None, None, None, 1e-5, rope, places[:1, 0], places[:1], cache, 64
    yield "queries times factors", lambda: Gpu.rope_write(*written, interleaved=True)
    how: dict[str, Any] = {"normalized": False, "shared": 1, "sigmoid": SigmoidRouting(None)}
    yield "experts by their logits", lambda: Gpu.top_experts(_bf16(1, 16, 16), torch.float32, 1, **how)
    inside = _bf16(16, 5120), _bf16(17, 16384, 5120), _bf16(17, 5120, 8192), routing, routing.int(), None
    yield "experts of weighted inputs", lambda: Gpu.experts_mlp(*inside, weighted_inputs=True)


def _of_training() -> Iterator[Pass]:
    """Yields the losses of rows with Qwen3's vocabulary, and the gradients of a convolution."""
    logits = _bf16(512, 151_936)
    labels, at = torch.empty(2, 512, dtype=torch.int64, device=META)
    plain, distribution = LossMix(), LossMix(kl=1.0)
    for name, mix in (
        ("cross-entropy", plain),
        ("distributions", distribution),
        ("distributions at a temperature", replace(distribution, temperature=2.0)),
    ):
        terms = RowTerms.empty(512, mix.distribution, META)
        for gradient in (True, False):
            args = logits, labels, terms, mix, gradient, *((logits, at) if mix.distribution else ())
            yield f"loss, {name}", lambda args=args: Gpu.row_loss_(*args)
    yield "largest logits", lambda: Gpu.row_top(logits, 16)
    x, dynamic, base = _bf16(512, 4096), _bf16(512, 2 * 4096 // 16), _bf16(2, 4096)
    yield "convolution", lambda: convolution.block_conv(x, dynamic, base, 16, x.dtype)
    yield "gradients of a convolution", lambda: convolution.block_conv_backward(x, x, dynamic, base, 16)


def _bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=META)
