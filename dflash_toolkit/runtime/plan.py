"""Plans the GPU memory of an engine from its shapes and options. Needs no GPU and no weights.

Weights, tables and caches are exact: the real classes allocate them on the meta device. The temporary tensors of the
largest passes and the graphs are estimates. The engine measures these passes after the weights are loaded, and divides
the memory by what it has measured.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..kernels.formats import DENSE, FP8_BLOCK, Int4, RowScaledFp8
from ..kernels.formats.int4 import SLICE
from ..kernels.launch import FAR_REQUESTS, LONGEST_SPLIT, MAX_ROWS, MOST_SPLIT, far_keys
from ..kernels.ops import Reference
from ..models.dflash.config import DrafterConfig
from ..models.dflash.network import Drafter
from ..models.spec import AttentionSpec, MlpSpec, ModelSpec
from .allocations import CountBytes
from .draft_length import block_sizes
from .graphs import buckets_up_to
from .options import EngineOptions
from .programs.context import Part
from .programs.prefill import PREFILL_LIMITS, PREFILL_SIZES, batch_shapes
from .prompt_logprobs import ROWS, SCORED_ROWS
from .prompts import chunk_size
from .request import StepShape
from .runner import StepRunner, parts_of
from .sampler import EDITED_ROWS
from .trees.budget import row_buckets, rows_of_trees
from .weights import WIDE_IN_FP8, DrafterWeights, TargetWeights

GRAPH_BYTES_PER_LAYER = 128 << 10  # memory of the driver for a graph, which no allocator reports: 5 MiB for 41 layers
SMALL_GRAPH_BYTES = 1 << 20  # of a graph that runs no layers
LIBRARY_BYTES = 192 << 20  # kernels that are loaded later, and the workspaces of cuBLAS
EDITED_BYTES, SCORED_BYTES = 40, 14  # of a logit that is edited, or scored for a prompt
MARGIN = 16 << 20  # small tensors of a pass, and rounding
SPLITS = 8  # partial sums of a matrix product of few rows, at most


class Plan(NamedTuple):
    """Bytes of an engine."""

    target: int
    drafter: int  # with its copies in fp8
    tables: int  # buffers of steps, tables of the sampler, recurrent states
    step: int  # temporary tensors of the largest step
    prefill: int  # temporary tensors of the largest pass over prompts
    held: int  # those that it keeps while a step runs between two of its slices
    graphs: int
    token: int  # cache of a token
    reach: int  # tokens of the largest request in the cache, with its drafts

    @property
    def weights(self) -> int:
        return self.target + self.drafter

    @property
    def certain(self) -> int:
        """Bytes without any estimate, and without the cache."""
        return self.weights + self.tables

    @property
    def fixed(self) -> int:
        """All bytes but those of the cache."""
        return self.certain + self.step + max(self.step + self.held, self.prefill) + self.graphs + LIBRARY_BYTES

    def tokens(self, budget: float) -> int:
        """Returns the tokens that the cache holds if the engine may use `budget` bytes."""
        return int(max(budget - self.fixed, 0) // self.token)

    def cache(self, options: EngineOptions) -> int:
        """Returns the bytes of the smallest cache that these options accept."""
        size = options.page_size
        tokens = self.reach if options.kv_cache_tokens is None else options.kv_cache_tokens
        return (-(-tokens // size) + 1) * size * self.token

    def missing(self, options: EngineOptions, budget: float) -> float:
        """Returns the bytes that the budget lacks; negative if it suffices."""
        return self.fixed + self.cache(options) - budget


class Planner:
    """Plans engines of one target and one drafter, with different options.

    Args:
        fused: whether the GPU runs whole layers of the drafter in one launch; drafts in fp8 then have copies of them.

    Attributes:
        target_bytes: bytes of the target's weights.
        loaded: bytes of all weights, without the copies in fp8.
        copies_bytes: bytes of these copies.
    """

    def __init__(self, spec: ModelSpec, config: DrafterConfig | None, dtype: torch.dtype, *, fused: bool) -> None:
        self.spec, self.config, self.dtype = spec, config, dtype
        self._specs = [spec, *([config.spec()] if config else [])]
        with CountBytes() as target:
            self._target = TargetWeights.empty(spec, torch.device("meta"), dtype)
        with CountBytes() as drafter:
            self._drafter = self._new_drafter()
        with CountBytes() as narrow:
            kept = self._new_copies(fused)
        self.target_bytes, self.copies_bytes = target.held, narrow.held
        self.loaded = target.held + drafter.held
        del kept

    def _new_drafter(self) -> DrafterWeights | None:
        if self.config is None:
            return None
        with torch.device("meta"):
            module = Drafter(self.config).to(self.dtype)
        return DrafterWeights.of_module(module)

    def _new_copies(self, fused: bool) -> list[Any]:
        """Returns the copies that drafts in fp8 need."""
        if self._drafter is None:
            return []
        layers = self._drafter.layers if fused and self._drafter.spec.hidden_size >= WIDE_IN_FP8 else []
        narrow = [layer.quantized(first=self._drafter.begins(i)) for i, layer in enumerate(layers)]
        return [RowScaledFp8.of(self._target.head), narrow]

    def plan(self, options: EngineOptions) -> Plan:
        """Returns the plan for options that are `fitted`, with a draft_dtype of fp8 or full."""
        arguments = runner_arguments(options, self.config)
        most, block, context = (arguments[name] for name in ("max_num_seqs", "max_block", "max_context"))
        nodes = arguments["tree_nodes"]
        # on a GPU a request has room for the block of one more step
        with CountBytes() as tables:
            runner = StepRunner(
                self._target, self._drafter, Reference(), num_pages=1, **arguments | {"max_context": context + block}
            )
        token = sum(self._token(spec, options) for spec in self._specs)
        if options.keep_taps and self.config:
            token += self.config.feature_size * self.dtype.itemsize
        rows = max(min(chunk_size(options.max_num_batched_tokens or 0), runner.reach), runner.prefill_limits.packed)
        tree_rows = max(rows for batch in buckets_up_to(most) for rows in (0, *row_buckets(batch))) if nodes else 0
        trees = tree_rows if (options.draft_tree_width or 1) > 1 else 0
        kept = trees * sum(self.dtype.itemsize * net.channels + 8 * net.num_heads for net in self.spec.delta_nets)
        return Plan(
            self.target_bytes,
            self.loaded - self.target_bytes + self.copies_bytes * (options.draft_dtype == "fp8"),
            tables=tables.held - options.page_size * token,
            step=self._step(most, block, tree_rows, runner.reach) + kept,
            prefill=self._prefill(rows) + self._read_pages(options, runner.reach),
            held=self._held(rows),
            graphs=self._graphs(options, most, nodes, runner.reach),
            token=token,
            reach=runner.reach,
        )

    def _token(self, spec: ModelSpec, options: EngineOptions) -> int:
        """Returns the bytes that the cache of a model takes for a token."""
        values, size = spec.kv_values_per_token, self.dtype.itemsize
        heads = sum(2 * mixer.num_kv_heads for mixer in spec.attention)
        return values + heads * size if options.fp8_cache else values * size

    def saved_in_fp8(self) -> int | None:
        """Returns how many bytes fewer the same target takes with FP8 weights; None if it cannot be converted."""
        layers = []
        for layer in self.spec.layers:
            sides = [*layer.mixer.matrices(self.spec.hidden_size).values(), (layer.ffn.intermediate_size, 1 << 7)]
            if {layer.mixer.weight, layer.ffn.weight} != {DENSE} or any(n % 128 or k % 128 for n, k in sides):
                return None
            mixer, ffn = replace(layer.mixer, weight=FP8_BLOCK), replace(layer.ffn, weight=FP8_BLOCK)
            layers.append(replace(layer, mixer=mixer, ffn=ffn))
        with CountBytes() as count:
            kept = TargetWeights.empty(replace(self.spec, layers=tuple(layers)), torch.device("meta"), self.dtype)
        del kept
        return self.target_bytes - count.peak

    # ---- estimates -------------------------------------------------------------------------------------

    def _step(self, most: int, block: int, tree_rows: int, reach: int) -> int:
        """A step that edits logits and reports log-probabilities has the whole head's output in memory."""
        size, vocab = self.dtype.itemsize, self.spec.vocab_size
        more = EDITED_BYTES * max(block, EDITED_ROWS)
        if tree_rows:  # logits of the accepted rows; the argmax of many rows
            more = max(
                more, size * most * block + SCORED_BYTES * EDITED_ROWS, size * tree_rows * (tree_rows > MAX_ROWS)
            )
        logits = vocab * (size * max(most * block, tree_rows) + more)
        if self.config is not None:
            logits += self.config.architecture.choice_bytes(self.config, most * (block - 1), size)
        # short prefills run in batches, and their keys are split
        batches = batch_shapes(most, reach)
        rows = max(most * block, tree_rows, *(size * count for size, count in batches), 1)
        split = max(min(most, MOST_SPLIT) * min(block, LONGEST_SPLIT), PREFILL_SIZES[0])
        if most <= MOST_SPLIT:
            split = max(split, tree_rows)
        elif batches:
            split = max(split, LONGEST_SPLIT * PREFILL_LIMITS.most)
        parts = split * max(mixer.width for mixer in self.spec.attention) * 4 * (16 + reach // 1024)
        parts = max(
            parts, *(_far_states(mixer, min(most, FAR_REQUESTS), block, reach) for mixer in self.spec.attention)
        )
        return max(logits + self._layers(max(most * block, tree_rows)), self._layers(rows) + parts)

    def _prefill(self, rows: int) -> int:
        scored = 2 * self.dtype.itemsize * min(rows, ROWS) + SCORED_BYTES * min(rows, SCORED_ROWS)
        return max(self._layers(rows), MARGIN + self.spec.vocab_size * scored)  # scores follow the layers

    def _read_pages(self, options: EngineOptions, reach: int) -> int:
        """The keys and values of a layer and a request, which long chunks read from an fp8 cache."""
        widest = max(mixer.kv_width for mixer in self.spec.attention)
        return 2 * widest * self.dtype.itemsize * reach if options.fp8_cache else 0

    def _held(self, rows: int) -> int:
        """The residual stream, the queries, keys and values of a layer, the features, and the inputs of all layers."""
        widest = max(sum(n for n, _ in layer.mixer.matrices(0).values()) for layer in self.spec.layers)
        features = self.config.feature_size if self.config else 0
        inputs = self.spec.input_size * len(self.spec.layers)
        return rows * self.dtype.itemsize * (2 * self.spec.hidden_size + widest + features + inputs)

    def _layers(self, rows: int) -> int:
        """Temporary bytes of a pass of the layers: states, features of the drafter, and the widest products."""
        spec, size, d = self.spec, self.dtype.itemsize, self.spec.hidden_size
        inputs = 3 * spec.input_size * len(spec.layers)
        each = size * (8 * d + (self.config.feature_size if self.config else 0) + inputs)
        widest = 0
        for layer in spec.layers:
            mixer = sum(n for n, _ in layer.mixer.matrices(d).values())
            experts = layer.routed
            routed = (experts.top_k + 1) * (3 * experts.intermediate_size + 2 * d) if experts else 0
            dense = 3 * layer.ffn.intermediate_size if isinstance(layer.ffn, MlpSpec) else 0
            widest = max(widest, mixer, routed, dense)
        if spec.recurrent:
            each += 4 * 4 * max(net.channels + net.width for net in spec.delta_nets)  # in fp32
        scratch = 0
        if rows > MAX_ROWS and any(isinstance(form, Int4) for form in spec.formats):
            longest = max(max(layer.mixer.width, layer.ffn.intermediate_size, d) for layer in spec.layers)
            scratch = SLICE * longest * size
        return MARGIN + scratch + rows * (each + size * widest) + min(rows, MAX_ROWS) * widest * 4 * SPLITS // 2

    def _graphs(self, options: EngineOptions, most: int, nodes: int, reach: int) -> int:
        parts, prefills = captured_parts(options, self.config, most, nodes), 1
        if options.keep_taps and self.config:  # those without the drafter too, see `Engine.stop_drafting`
            parts += parts_of(buckets_up_to(most), [1], lambda batch: (), masked=True)
            prefills = 2
        small = sum(part.kind in ("choose", "end") for part in parts)
        prefills *= sum(s <= reach for s in PREFILL_SIZES) + len(batch_shapes(most, reach))
        large = len(parts) - small + prefills
        layers = sum(len(spec.layers) for spec in self._specs)
        return large * layers * GRAPH_BYTES_PER_LAYER + small * SMALL_GRAPH_BYTES


def _far_states(mixer: AttentionSpec, requests: int, block: int, reach: int) -> int:
    """Returns the bytes of the states of the splits of many requests, in whole tiles of 64 query heads."""
    far = far_keys(requests, reach, mixer.head_dim)
    tiles = mixer.num_kv_heads * -(-block * mixer.num_heads // (64 * mixer.num_kv_heads))
    return requests * tiles * 64 * mixer.head_dim * 4 * -(-reach // far) if far else 0


def block_lengths(options: EngineOptions, config: DrafterConfig | None) -> tuple[int, ...]:
    """Returns the lengths of the blocks that an engine chooses from."""
    longest = options.block_size or (config.block_size if config else 1)
    return (longest,) if options.block_size is not None or longest == 1 else block_sizes(longest)


def tree_blocks(sizes: tuple[int, ...]) -> list[int]:
    """Returns the lengths of the blocks that steps over trees draft."""
    return [size for size in sizes if size > 1 and 4 * size >= sizes[-1]]


def captured_parts(options: EngineOptions, config: DrafterConfig | None, most: int, nodes: int) -> list[Part]:
    """Returns all steps and parts of steps that an engine may capture.

    Args:
        most: requests of the largest batch.
        nodes: the most nodes of a request's draft tree; 0: all steps are over blocks.
    """
    sizes = block_lengths(options, config)

    def trees(batch: int) -> list[StepShape]:
        return [StepShape(block, rows) for block in tree_blocks(sizes) for rows in rows_of_trees(batch, nodes)]

    return parts_of(buckets_up_to(most), sorted({1, *sizes}), trees if nodes else lambda batch: (), masked=True)


def runner_arguments(options: EngineOptions, config: DrafterConfig | None) -> dict[str, Any]:
    """Returns the arguments of a `StepRunner` that follow from options that are `fitted`."""
    sizes = block_lengths(options, config)
    return {
        "page_size": options.page_size,
        "max_num_seqs": options.max_num_seqs,
        "max_context": options.max_model_len,
        "max_block": sizes[-1],
        "sample_drafts": options.draft_sample_method == "probabilistic",
        "kept_states": options.prefix_states or 0,
        "tree_nodes": (options.draft_tree or 0) if config and sizes[-1] > 1 else 0,
        "tree_width": options.draft_tree_width,
        "packed_rows": options.max_num_batched_tokens,
        "report_offered": options.report_offered,
        "keep_taps": options.keep_taps,
        "fp8_cache": options.fp8_cache,
        "tree_blocks": tree_blocks(sizes),
        "chain_blocks": [size for size in sizes if size > 1],
    }
