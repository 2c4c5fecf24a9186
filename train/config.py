"""Every option of a training run, with its default. The defaults are a complete run for an 8B target on one large GPU.

The choices among them are from an ablation (docs/benchmarks.md, "Settings"): Qwen2.5-Coder-0.5B-Instruct, an
H200, two minutes each on the same responses, acceptance length decoded on four sets. As chosen here it was 2.92; with
AdamW instead of Muon 2.23, with decay weights instead of D-PACE 2.86, with 3 taps for 5 2.77, with KL for half of the
cross-entropy 2.85, with 2 layers for 5 2.77 (and 3 % more tokens a second on that small target; five are the
checkpoints' usual shape). Muon's learning rate is from half a minute each: 2.28 at 6e-4, 2.73 at 1.2e-3, 2.95 at 3e-3
(teacher-forced, after 200 steps). One run each: the gaps to decay and KL are within chance. The same 2304 blocks of a
step from 12288 tokens gave 4.91 instead of 3.98 (teacher-forced, after 66 seconds), with four times as many responses
seen; that is about the density of the paper's recipe.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from dflash_toolkit.config import UserError, from_mapping, option, options
from dflash_toolkit.models.dflash.architecture import DraftArchitecture, all_sizes, asked_by, kinds, of_kind
from dflash_toolkit.models.dflash.shape import BLOCK_SIZE, WIDTH_FOR_PARTS, WINDOW
from dflash_toolkit.options import PromptOptions, SamplingOptions, TemplateOptions
from dflash_toolkit.sampling import COLDEST, HOTTEST

RUNTIMES = ("auto", "engine", "reference")
BATCH_SIZE = "prompts answered at a time (default: as many as the GPU's memory holds, at most 256; 32 on a CPU)"
GREEDY_FIRST = "make the first of several responses greedy, at any temperature"
ATTENTION = ("full_attention", "sliding_attention")  # types of layers
PACK_TOKENS = 12288  # tokens of a step on a GPU (default)
PACKS = 128  # tokens of packs and joined rows are multiples of this
MOST_GIB = 2**20  # no machine has more memory
OWN = "self:"  # of a source: the target writes the prompts itself
EPOCHS = 6  # passes over the data with one response to every prompt


C = TypeVar("C")


def own_count(name: str) -> int | None:
    """Returns N of a source `self:N`; None for any other source."""
    number = name.removeprefix(OWN)
    return int(number) if number != name and number.isdecimal() else None


def count_in(names: Sequence[str]) -> int:
    """Returns N of the source `self:N`, 0 without one. Raises ValueError for more than one, or for N = 0."""
    found = [count for name in names if (count := own_count(name)) is not None]
    if len(found) > 1 or 0 in found:
        raise ValueError(f"data has {len(found)} sources {OWN}N; give one, with N >= 1")
    return sum(found)


def _samples_in(file: str) -> int:
    """Returns the number of responses to a prompt in a file of dflash-data, from its record; 1 without a record."""
    try:
        return max(1, int(json.loads(Path(file).with_suffix(".run.json").read_bytes())["sampler"]["samples"]))
    except (OSError, ValueError, KeyError, TypeError):
        return 1


def _with_sizes(cls: type[C]) -> type[C]:
    """Adds an option for every size of a draft architecture's parts, with the size's name."""
    for name, size in all_sizes().items():
        cls.__annotations__[name] = int | None
        setattr(cls, name, option(None, size.help))
    return cls


@dataclass(frozen=True, kw_only=True, slots=True)
@_with_sizes
class DrafterOptions:
    """Kind and shape of the drafter. Sizes that are not given are the target's."""

    kind: str | None = option(
        None,
        "architecture of the drafter; dflash2 adds convolutions and a token selector, dspine messages between slots "
        f"(default: dflash2, or dflash for a target with a hidden size below {WIDTH_FOR_PARTS})",
        choices=kinds,
        common=True,
    )
    layers: int | None = option(
        None, "number of draft layers (default: 5, or 6 for a mixture-of-experts target)", common=True
    )
    taps: int | None = option(
        None,
        "number of target layers that the drafter reads hidden states of, evenly spaced (default: 5, or 8 for a "
        "mixture-of-experts target)",
    )
    target_layer_ids: tuple[int, ...] = option(
        (), "target layers that the drafter reads hidden states of, counted from 0 (default: see drafter.taps)"
    )
    block_size: int = option(
        BLOCK_SIZE, "size of a draft block: one anchor and block_size - 1 drafted tokens", common=True
    )
    mask_token_id: int | None = option(None, "row of the target's embedding for masked slots (default: an unused row)")
    num_heads: int | None = option(None, "query heads (default: the target's)")
    num_kv_heads: int | None = option(None, "key/value heads (default: the target's)")
    head_dim: int | None = option(None, "size of an attention head (default: the target's)")
    intermediate_size: int | None = option(None, "hidden size of the feed-forward layers (default: the target's)")
    layer_types: tuple[str, ...] = option(
        (),
        "attention type of each layer, or one for all; sliding_attention sees a window of the context (default: "
        "full_attention)",
        choices=ATTENTION,
    )
    sliding_window: int | None = option(
        None, f"tokens that a sliding layer sees, up to the slot itself (default: {WINDOW})"
    )
    is_causal: bool | None = option(
        False,
        "let a slot see only earlier slots of its block, as those of DSpine always do; null does so in sliding layers "
        "only",
    )

    def __post_init__(self) -> None:
        try:
            if self.architecture:
                self.architecture.sizes_of(self.sizes)
        except ValueError as error:
            raise ValueError(f"drafter: {error}") from error

    @property
    def architecture(self) -> DraftArchitecture | None:
        """The architecture of `kind`, or of the sizes that are given; None if the target decides."""
        return of_kind(self.kind) if self.kind else asked_by(self.sizes)

    @property
    def sizes(self) -> dict[str, int | None]:
        """Sizes of the parts of all architectures; None is the default."""
        return {name: getattr(self, name, None) for name in all_sizes()}

    @classmethod
    def sizes_in(cls, shape: object) -> dict[str, Any]:
        """Returns the sizes of the parts in a drafter's configuration, by option; 0 for parts that it lacks."""
        own = {each.name for each in fields(cls)}
        return {name: getattr(shape, name, 0) for name in all_sizes() if name in own}


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions(PromptOptions):
    """The prompts that are read, and how many of them are used."""

    dataset: str = option(
        "mlabonne/open-perfectblend", "public instruction dataset that is read if --data is not given", metavar="SOURCE"
    )
    max_prompts: int = option(100_000, "number of prompts sampled from all sources; 0 uses all", common=True)
    held_out: int = option(64, "number of prompts kept out of training, to measure acceptance on")
    join_to: int | None = option(
        None,
        "join prompts with their responses to training rows of up to this many tokens, for long contexts; a multiple "
        "of 128 (default: each is a row)",
    )

    def __post_init__(self) -> None:
        PromptOptions.__post_init__(self)
        if self.held_out < 0:
            raise ValueError(f"held_out is {self.held_out}; it must be >= 0")
        if self.join_to is not None and (self.join_to < self.max_length or self.join_to % PACKS):
            raise ValueError(
                f"join_to is {self.join_to}; it must be a multiple of {PACKS}, at least max_length ({self.max_length})"
            )

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest training row."""
        return self.join_to or self.max_length


@dataclass(frozen=True, kw_only=True, slots=True)
class SynthesisOptions:
    """How the target writes prompts itself (--data self:N)."""

    topics: str | None = option(
        None,
        "file with a topic on each line; prompts are about these, through the system message (default: system messages "
        "for mathematics, code, writing, advice and other fields)",
        metavar="PATH",
        flag="topics",
    )
    turns: int = option(1, "most user turns of a conversation; the target answers between them")
    script: str | None = option(
        None, "keep only prompts in this script, as Unicode names it: latin, cyrillic, cjk, ... (default: any)"
    )
    temperature: float = option(1.0, "temperature of prompts")
    max_tokens: int = option(512, "longest prompt, in tokens; longer ones are skipped")

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ValueError(f"synthesis.turns is {self.turns}; it must be >= 1")
        if self.max_tokens < 8:
            raise ValueError(f"synthesis.max_tokens is {self.max_tokens}; it must be >= 8")
        if not COLDEST <= self.temperature <= HOTTEST:
            raise ValueError(f"synthesis.temperature is {self.temperature}; it must be in [{COLDEST}, {HOTTEST}]")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplesOptions(SamplingOptions):
    """How the target samples its responses, of which a prompt may have several.

    Two responses, one of them sampled, teach more than twice as many epochs over one (docs/benchmarks.md, "Settings").
    """

    samples: int = option(2, "number of responses to every prompt, each with its own seed", common=True)
    greedy_first: bool = option(True, GREEDY_FIRST)
    temperature: float = option(1.0, "temperature of sampled responses; 0 is greedy")

    def __post_init__(self) -> None:
        SamplingOptions.__post_init__(self)
        if self.samples < 1:
            raise ValueError(f"samples is {self.samples}; it must be >= 1")
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be >= 2")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples is {self.samples}, but responses at temperature 0 are all the same; set samples to 1, or "
                "raise the temperature"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseOptions(SamplesOptions):
    """How the target responds to the prompts. A drafter must be trained on the target's own responses."""

    regenerate: bool = option(
        True,
        "let the target write the responses; off trains on those in the data, which this target must have written",
    )
    runtime: str = option(
        "auto", "runtime that writes the responses; auto is the engine if it supports the target", choices=RUNTIMES
    )
    batch_size: int | None = option(None, BATCH_SIZE)
    draft: bool = option(True, "write responses faster with the drafter of --init-from; the responses stay the same")

    def __post_init__(self) -> None:
        SamplesOptions.__post_init__(self)
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be >= 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions:
    """The terms of the loss and the weights of the slots (contract, "Training recipe").

    Every term but `ce` compares with the target's own distribution. Then all layers of the target run, its last hidden
    state is kept next to the tapped ones, and each step multiplies once more with the head.
    `dflash_toolkit.kernels.loss_terms` has the formulas. DSpark (arXiv 2607.05147) mixes ce 0.1 and tv 0.9.
    """

    ce: float = option(1.0, "weight of the cross-entropy with the response's token (default: 1, or 0.1 for DSpine)")
    kl: float = option(0.0, "weight of KL(target || drafter) over the whole vocabulary")
    tv: float = option(
        0.0,
        "weight of the total variation distance, 1 - the acceptance rate of sampled verification (default: 0, or 1.8 "
        "for DSpine)",
    )
    lk: float = option(0.0, "weight of -log(acceptance rate), LK^alpha of arXiv 2602.23881")
    lk_hybrid: float = option(0.0, "weight of KL that turns into TV as acceptance grows, LK^lambda of arXiv 2602.23881")
    selector: float = option(1.0, "weight of the loss over the candidates of DFlash 2 or DSpine")
    gold: str = option(
        "skip",
        "DFlash 2: what to do if the true token is no candidate: skip the slot in the selector's loss, or inject the "
        "token as the last candidate",
        choices=("skip", "inject"),
    )
    temperature: float = option(
        1.0, "temperature of both distributions in kl, tv, lk and lk_hybrid; the one used in serving fits best"
    )
    weights: str = option("dpace", "slot weights (default: dpace, or decay for DSpine)", choices=("decay", "dpace"))
    gamma: float | None = option(
        None,
        "decay of the slot weights exp(-(k-1)/gamma), for loss.weights=decay (default: 7, 5, 4 for block size 16, 10, "
        "8)",
    )
    alpha: float = option(0.5, "smoothing of the slots' probabilities, for loss.weights=dpace")
    anchors: int = option(512, "draft blocks per sequence and step; disables packing if given")
    head_rows: int = option(1024, "rows of logits in memory at a time")
    input_noise: float = option(
        0.0, "standard deviation of noise on the target's hidden states, as a share of each one's root mean square"
    )

    def of_kind(self, kind: DraftArchitecture) -> "LossOptions":
        """Returns the options with those that a kind of drafter is trained with, unless one of these was given."""
        default = LossOptions()
        given = any(getattr(self, name) != getattr(default, name) for name in kind.loss)
        return self if given else replace(self, **kind.loss)

    @property
    def distribution(self) -> bool:
        """Whether a term of the loss needs the target's own distribution."""
        return max(self.kl, self.tv, self.lk, self.lk_hybrid) > 0

    def __post_init__(self) -> None:
        terms = {name: getattr(self, name) for name in ("ce", "kl", "tv", "lk", "lk_hybrid")}
        for name, weight in terms.items():
            if not 0 <= weight < math.inf:
                raise ValueError(f"loss.{name} is {weight}; it must be >= 0")
        if not 0 <= self.selector < math.inf:
            raise ValueError(f"loss.selector is {self.selector}; it must be >= 0")
        if not any(terms.values()):
            raise ValueError(f"{', '.join(f'loss.{name}' for name in terms)} are all 0; give one of them a weight")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"loss.temperature is {self.temperature}; it must be > 0 (1 is the target as it is)")
        if not 0 <= self.input_noise < math.inf:
            raise ValueError(f"loss.input_noise is {self.input_noise}; it must be >= 0")
        for name in ("anchors", "head_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"loss.{name} is {getattr(self, name)}; it must be >= 1")
        if self.gamma is not None and self.gamma <= 0:
            raise ValueError(f"loss.gamma is {self.gamma}; it must be > 0")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"loss.alpha is {self.alpha}; it must be in [0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimOptions:
    """Optimiser and schedule: fp32 master weights, linear warm-up, decay to zero."""

    optimizer: str = option(
        "auto",
        "optimiser: muon for the matrices (AdamW for the rest), or adamw for all; auto is muon on a GPU "
        "without run.zero",
        choices=("auto", "adamw", "muon"),
    )
    epochs: int | None = option(
        None,
        f"passes over the responses (default: {EPOCHS} divided by the number of responses to a prompt)",
        common=True,
    )
    steps: int = option(0, "optimiser steps of the run, instead of epochs; 0 goes by epochs")
    minutes: float = option(0.0, "minutes of training, instead of epochs; 0 goes by epochs", common=True)
    pack_tokens: int | None = option(
        None,
        f"tokens per step, packed from several sequences; a multiple of 128 (default: about {PACK_TOKENS} on a "
        "GPU, at least the longest row)",
    )
    pack_blocks: int | None = option(None, "draft blocks per packed step (default: 3 for every 16 tokens)")
    batch_size: int = option(8, "sequences per micro step; disables packing if given")
    accumulate: int = option(1, "micro steps of every process per optimiser step")
    splits: int | None = option(
        None,
        "passes in which the drafter computes the blocks of a micro step; their gradients are summed, so more passes "
        "save memory and the update stays the same (default: as few as the GPU's memory allows)",
    )
    recompute: bool | None = option(
        None,
        "recompute activations in the backward pass, which saves memory and costs a tenth of the speed (default: only "
        "if the GPU's memory requires it)",
    )
    learning_rate: float | None = option(
        None, "peak learning rate (default: 3e-3 for muon, 6e-4 for adamw; with --init-from 3e-4 and 6e-5)"
    )
    warmup: float = option(0.04, "share of the run in which the learning rate rises")
    schedule: str = option(
        "cosine",
        "learning rate after the warm-up: cosine to zero, or wsd (constant, then a decay to zero)",
        choices=("cosine", "wsd"),
    )
    decay: float = option(0.2, "share of the run in the final decay, for optim.schedule=wsd")
    ema: float = option(
        0.0, "decay per step of an average of the weights that is measured and exported, e.g. 0.999; 0 uses no average"
    )
    weight_decay: float = option(0.0, "weight decay of the matrices")
    clip: float = option(1.0, "maximum norm of the gradient")

    @property
    def passes(self) -> int:
        """Epochs if the number of responses to a prompt is unknown."""
        return EPOCHS if self.epochs is None else self.epochs

    def __post_init__(self) -> None:
        least = {"steps": (self.steps, 0), "epochs": (self.passes, 1), "batch_size": (self.batch_size, 1)}
        least |= {"accumulate": (self.accumulate, 1), "splits": (self.splits or 1, 1)}
        for name, (value, at_least) in least.items():
            if value < at_least:
                raise ValueError(f"optim.{name} is {value}; it must be >= {at_least}")
        if self.minutes and self.steps:
            raise ValueError("optim.steps and optim.minutes are both given; give one of them")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"optim.weight_decay is {self.weight_decay}; it must be >= 0")
        if self.minutes < 0:
            raise ValueError(f"optim.minutes is {self.minutes}; it must be >= 0")
        if (self.pack_tokens or 0) < 0 or (self.pack_tokens or 0) % PACKS:
            raise ValueError(f"optim.pack_tokens is {self.pack_tokens}; it must be a multiple of {PACKS}, or 0")
        if self.pack_blocks is not None and not 1 <= self.pack_blocks <= (self.pack_tokens or PACK_TOKENS):
            most = self.pack_tokens or PACK_TOKENS
            raise ValueError(f"optim.pack_blocks is {self.pack_blocks}; it must be in 1..{most} (optim.pack_tokens)")
        if self.learning_rate is not None and self.learning_rate <= 0:
            raise ValueError(f"optim.learning_rate is {self.learning_rate}; it must be > 0")
        if self.clip <= 0:
            raise ValueError(f"optim.clip is {self.clip}; it must be > 0")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"optim.warmup is {self.warmup}; it must be in [0, 1)")
        if not 0 < self.decay <= 1 or (self.schedule == "wsd" and self.warmup + self.decay > 1):
            raise ValueError(
                f"optim.decay is {self.decay}; it must be in (0, 1], and at most 1 - optim.warmup with "
                "optim.schedule=wsd"
            )
        if not 0 <= self.ema < 1:
            raise ValueError(f"optim.ema is {self.ema}; it must be in [0, 1)")

    @property
    def final_decay(self) -> float | None:
        """Share of the run in a final decay; None is a cosine after the warm-up."""
        return self.decay if self.schedule == "wsd" else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Memory, logging, resume points, and how often acceptance is measured by real decoding."""

    attention: str = option(
        "auto", "attention kernel of training; auto is flex on a GPU, sdpa on a CPU", choices=("auto", "flex", "sdpa")
    )
    compile: str = option(
        "auto", "compile the drafter with torch.compile; auto does so on a GPU", choices=("auto", "on", "off")
    )
    features: str = option(
        "auto",
        "storage of the target's hidden states: auto uses free GPU memory, then host memory up to "
        "run.feature_cache_gb, and computes the rest at every step; online keeps none; memory keeps all or refuses; "
        "disk writes all before training; hybrid writes them during the first epoch",
        choices=("auto", "online", "memory", "disk", "hybrid"),
    )
    feature_dir: str | None = option(
        None,
        "directory of the hidden states for disk and hybrid; runs with the same target and taps may share it (default: "
        "OUTPUT/work/features)",
        metavar="PATH",
    )
    feature_endpoint: str | None = option(
        None,
        "vLLM server that computes hidden states (extract_hidden_states), for a target too large for these GPUs; this "
        "process loads only the target's embedding and head (default: compute them here)",
        metavar="URL",
    )
    feature_dtype: str = option(
        "auto",
        "number format of the hidden states; auto is the target's, float8 has a scale per token",
        choices=("auto", "bfloat16", "float8"),
    )
    feature_gpu_share: float = option(0.9, "share of the free GPU memory used for hidden states")
    feature_cache_gb: float = option(0.0, "GiB of host memory used for hidden states, for all processes of a machine")
    fsdp: bool = option(False, "shard weights, gradients and optimiser states over the processes with FSDP2")
    fsdp_reshard_after_forward: bool = option(
        True, "gather a layer's weights again in the backward pass; off keeps them in memory from the forward pass"
    )
    zero: int = option(
        0, "DeepSpeed ZeRO stage: shard optimiser states (1), also gradients (2), also weights (3); 0 is off; "
        "optim.optimizer=auto is then adamw",
    )  # fmt: skip
    target_tensor_parallel_size: int = option(
        1, "processes of a machine that share one target by tensor parallelism (torchrun); each trains the drafter on "
        "its own rows",
    )  # fmt: skip
    offload_target: bool | None = option(
        None,
        "move the target's layers to host memory once all hidden states are stored; needs run.features=disk and no "
        "held-out prompts (default: only if the GPU's memory requires it)",
    )
    seed: int = option(0, "seed of weights, data order and anchors", flag="seed")
    log_every: int = option(10, "steps between lines in metrics.jsonl")
    save_minutes: float = option(10.0, "minutes between resume points, which are written while training continues")
    save_every: int = option(0, "steps between resume points, instead of minutes; 0 goes by run.save_minutes")
    evaluate_every: int = option(
        1000, "steps between measurements of acceptance on held-out prompts; 0 measures only at the end"
    )
    evaluate_prompts: int = option(
        16, "held-out prompts of each measurement, at most half of them; the final measurement uses the others"
    )
    evaluate_tokens: int = option(256, "longest response of a measurement, in tokens")
    final_tokens: int | None = option(
        None,
        "longest response of the final measurement, which chooses the exported drafter (default: responses.max_tokens)",
    )
    evaluate_runtime: str = option(
        "auto",
        "runtime of measurements; auto is the engine on a GPU if it supports the target, else the reference",
        choices=RUNTIMES,
    )
    export_selector: str = option(
        "better",
        "export of a DFlash 2 drafter's selector: better exports it only if it improves acceptance on held-out prompts",
        choices=("better", "always", "never"),
    )
    wandb: str | None = option(None, "Weights & Biases project to log to (default: none)")
    speculators: bool = option(False, "also export in the speculators format, to OUTPUT/speculators")

    def __post_init__(self) -> None:
        for name, least in {"log_every": 1, "evaluate_prompts": 1, "evaluate_tokens": 1, "save_every": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"run.{name} is {getattr(self, name)}; it must be >= {least}")
        if self.final_tokens is not None and self.final_tokens < 1:
            raise ValueError(f"run.final_tokens is {self.final_tokens}; it must be >= 1")
        if not 0 < self.save_minutes < math.inf:
            raise ValueError(f"run.save_minutes is {self.save_minutes}; it must be > 0")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"run.seed is {self.seed}; it must be in 0..2**63 - 1")
        if not 0 <= self.zero <= 3:
            raise ValueError(f"run.zero is {self.zero}; it must be 0 (off), 1, 2 or 3")
        if self.target_tensor_parallel_size < 1:
            raise ValueError(
                f"run.target_tensor_parallel_size is {self.target_tensor_parallel_size}; it must be >= 1 (1 is a whole "
                f"target on every process)"
            )
        if self.evaluate_every < 0:
            raise ValueError(f"run.evaluate_every is {self.evaluate_every}; it must be >= 0")
        if not 0 <= self.feature_cache_gb <= MOST_GIB:
            raise ValueError(f"run.feature_cache_gb is {self.feature_cache_gb}; it must be in 0..{MOST_GIB}")
        if not 0 <= self.feature_gpu_share <= 1:
            raise ValueError(f"run.feature_gpu_share is {self.feature_gpu_share}; it must be in [0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(TemplateOptions):
    """One training run."""

    renamed: ClassVar[dict[str, Any]] = {
        "run.device": "device",
        "run.dtype": "dtype",
        "answer_files": "response_files",
        "trust_answers": "trust_responses",
        **{f"answers.{field.name}": f"responses.{field.name}" for field in fields(ResponseOptions)},
        "answers.max_new_tokens": "responses.max_tokens",
    }
    data: tuple[str, ...] = option(
        (),
        "sources of prompts: JSONL, JSON, Parquet or text files, or datasets as DATASET[:SUBSET]; SOURCE[a:b] takes "
        "rows a to b-1, gsm8k=SOURCE uses that benchmark's prompt template, and self:N lets the target write N prompts "
        "itself (default: prompts.dataset)",
        common=True,
        metavar="SOURCE",
    )
    response_files: tuple[str, ...] = option(
        (),
        "files of dflash-data with responses to train on (default: the target writes responses first)",
        flag="responses",
        old_flag="answers",
        common=True,
        metavar="PATH",
    )
    trust_responses: bool = option(False, "accept responses recorded for another target or chat template")
    held_out: tuple[str, ...] = option(
        (), "sources of prompts to measure acceptance on (default: a part of the data, see prompts.held_out)",
        metavar="SOURCE",
    )  # fmt: skip
    output: str | None = option(
        None, "directory of the drafter (default: out/dflash-TARGET)", common=True, metavar="PATH"
    )
    push_to_hub: str | None = option(
        None, "Hugging Face repository to upload the drafter and its model card to, created if missing (default: none)"
    )
    license: str | None = option(
        None,
        "licence of the drafter in its model card, as the hub names it, e.g. apache-2.0 (default: none; with the "
        "default dataset: other, with a link to it)",
        metavar="NAME",
    )
    init_from: str | None = option(
        None,
        "drafter to start from, as a directory or Hugging Face id, with its shape; drafter.kind=dflash2 adds the parts "
        "of DFlash 2 to a plain one, drafter.block_size changes its block (default: random weights)",
        metavar="PATH",
    )
    estimate: bool = option(
        False,
        "print the hours, disk and memory of the run and a shorter command, and exit; loads no weights",
        common=True,
    )
    estimate_gpu: str | None = option(
        None, "GPU that --estimate is for, e.g. 'RTX 4090' (default: the one of this machine)", metavar="NAME"
    )
    drafter: DrafterOptions = options(DrafterOptions)
    prompts: DataOptions = options(DataOptions)
    synthesis: SynthesisOptions = options(SynthesisOptions)
    responses: ResponseOptions = options(ResponseOptions)
    loss: LossOptions = options(LossOptions)
    optim: OptimOptions = options(OptimOptions)
    run: RunOptions = options(RunOptions)

    def __post_init__(self) -> None:
        TemplateOptions.__post_init__(self)
        if self.data and self.response_files:
            raise ValueError("data and responses are given; the responses hold their prompts, so give one of them")
        if count_in(self.data) and not self.responses.regenerate:
            raise ValueError("data has self:N, prompts without responses; leave out responses.regenerate=false")
        if count_in(self.data) and self.prompt_format == "text":
            raise ValueError("prompt_format text excludes data self:N, which needs a chat template")
        if self.run.zero and self.run.fsdp:
            raise ValueError(f"run.fsdp=true and run.zero={self.run.zero} are both given; a drafter is sharded by one")
        if self.run.zero and self.optim.ema:
            raise ValueError(
                "run.zero cannot average the weights; give optim.ema=0, or run.fsdp=true instead of run.zero"
            )
        if self.run.feature_endpoint:
            self._check_served()
        if self.run.target_tensor_parallel_size > 1:
            runtimes = {
                "run.evaluate_runtime": self.run.evaluate_runtime,
                "responses.runtime": self.responses.runtime if self.responses.regenerate else "",
            }
            for name, runtime in runtimes.items():
                if runtime == "engine":
                    raise ValueError(
                        f"{name} is engine, which computes a target on one GPU; leave it out with "
                        f"run.target_tensor_parallel_size={self.run.target_tensor_parallel_size}, then the reference "
                        f"decodes"
                    )
        if self.drafter.block_size < 2:
            raise ValueError(
                f"drafter.block_size is {self.drafter.block_size}; a block needs an anchor and a mask (>= 2)"
            )

    def with_loss_of(self, kind: DraftArchitecture) -> "TrainConfig":
        """Returns the options with the loss of a kind of drafter, see `LossOptions.of_kind`. Raises UserError."""
        try:
            return replace(self, loss=self.loss.of_kind(kind))
        except ValueError as error:
            raise UserError(f"drafter.kind={kind.kind} compares with the target's distribution: {error}") from error

    def _check_served(self) -> None:
        """Raises ValueError if an option needs more of the target than hidden states."""
        asked = (
            (not self.response_files and self.responses.regenerate, "give --responses (dflash-data --endpoint)"),
            (bool(self.held_out) or self.prompts.held_out > 0, "give prompts.held_out=0 and no --held-out"),
            (self.loss.distribution, "leave out loss.kl, tv, lk and lk_hybrid"),
            (self.run.target_tensor_parallel_size > 1, "leave out run.target_tensor_parallel_size"),
        )
        if words := [words for wrong, words in asked if wrong]:
            raise ValueError(
                f"run.feature_endpoint computes hidden states but decodes nothing; {', '.join(words)}, and measure "
                f"the drafter with dflash-eval --endpoint"
            )

    @property
    def epochs(self) -> int:
        """Passes over the responses. The default is divided by the number of responses to a prompt."""
        if self.optim.epochs is not None:
            return self.optim.epochs
        if self.response_files:
            return max(1, round(EPOCHS / min(map(_samples_in, self.response_files))))
        return max(1, round(EPOCHS / self.responses.samples)) if self.responses.regenerate else EPOCHS

    @property
    def output_dir(self) -> str:
        return self.output or "out/dflash-" + self.target.rstrip("/").split("/")[-1]

    @property
    def gamma(self) -> float:
        """The decay constant; the paper's 7, 5, 4 for block sizes 16, 10, 8, and in between by size."""
        return self.loss.gamma or {16: 7.0, 10: 5.0, 8: 4.0}.get(self.drafter.block_size, self.drafter.block_size / 2.2)


def configure(values: Mapping[str, Any], where: str = "config") -> TrainConfig:
    """Returns a run's configuration from nested values. Each value has an effect, and means the same on any device.

    `optim.batch_size` and `loss.anchors` need unpacked rows: if one of them is given, rows are not packed on a GPU
    either. The value null counts as not given, so a command can reset a value of its file.

    Raises:
        UserError: as `from_mapping`, or a value other than its default has no effect because of another one.
    """
    given = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    apart = []
    for group_, key in (("optim", "batch_size"), ("loss", "anchors")):
        part = given.get(group_)
        if isinstance(part, dict) and key in part:
            if part[key] is None:
                del part[key]
            else:
                apart.append(f"{group_}.{key}")
    optim = given.setdefault("optim", {})
    if apart and isinstance(optim, dict):
        optim.setdefault("pack_tokens", 0)
    config = from_mapping(TrainConfig, given, where)
    if apart and config.optim.pack_tokens:
        raise UserError(
            f"optim.pack_tokens packs rows, but {apart[0]} needs unpacked ones; leave out one of them, or reset "
            f"{apart[0]} with {apart[0]}=null and give optim.pack_blocks"
        )
    if apart and config.optim.pack_blocks:
        raise UserError(f"optim.pack_blocks needs packed rows, but {apart[0]} unpacked ones; give one of them")
    check_effects(config)
    return config


def why_target_stays(config: TrainConfig) -> str:
    """Returns the options for which the target's layers are needed during training; empty if it can be offloaded."""
    run = config.run
    needed = {
        f"run.features={run.features}": run.features != "disk",
        "held-out prompts (prompts.held_out, --held-out)": config.prompts.held_out or config.held_out,
        f"run.target_tensor_parallel_size={run.target_tensor_parallel_size}": run.target_tensor_parallel_size > 1,
        "run.feature_endpoint": run.feature_endpoint,
    }
    return ", ".join(name for name, given in needed.items() if given)


def check_effects(config: TrainConfig) -> None:
    """Raises UserError if a value other than its default has no effect because of another one.

    Without a kind of drafter the target decides later; until then a value counts if any kind uses it.
    """
    loss, optim, run, responses = config.loss, config.optim, config.run, config.responses
    kind = config.drafter.architecture
    selects: Any = kind is None or kind.between_name or kind.has_selector(kind.sizes_of(config.drafter.sizes))
    selects = selects or config.init_from
    void = (
        ("loss.selector", loss.selector, LossOptions().selector, not selects, "a selector (drafter.kind=dflash2)"),
        ("loss.gold", loss.gold, LossOptions().gold, not selects, "a selector (drafter.kind=dflash2)"),
        ("loss.gamma", loss.gamma, None, loss.weights != "decay", "loss.weights=decay"),
        ("loss.alpha", loss.alpha, LossOptions().alpha, loss.weights != "dpace", "loss.weights=dpace"),
        ("loss.temperature", loss.temperature, 1.0, not loss.distribution, "loss.kl, tv, lk or lk_hybrid"),
        ("responses.samples", responses.samples, ResponseOptions().samples,
         not responses.regenerate and responses.samples > 1,
         "responses.regenerate=true"),
        ("responses.temperature", responses.temperature, ResponseOptions().temperature,
         responses.samples == 1 and responses.greedy_first and responses.temperature > 0,
         "responses.samples above 1 or responses.greedy_first=false"),
        ("optim.decay", optim.decay, OptimOptions().decay, optim.schedule != "wsd", "optim.schedule=wsd"),
        ("estimate_gpu", config.estimate_gpu, None, not config.estimate, "--estimate"),
        ("run.feature_dir", run.feature_dir, None, run.features not in ("disk", "hybrid"),
         "run.features=disk or hybrid"),
        ("run.feature_cache_gb", run.feature_cache_gb, 0.0, run.features == "online", "run.features=auto"),
    )  # fmt: skip
    if run.offload_target and (why := why_target_stays(config)):
        raise UserError(f"run.offload_target needs run.features=disk and no held-out prompts; change {why}")
    for name, value, default, nothing, needs in void:
        if nothing and value != default:
            raise UserError(
                f"{name} is {value}, but it has no effect without {needs}; give that too, or leave {name} out"
            )
