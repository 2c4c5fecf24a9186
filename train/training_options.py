"""Options of the drafter, its loss, the optimizer and the run.

The choices among them are from an ablation (docs/benchmarks.md, "Settings"): Qwen2.5-Coder-0.5B-Instruct, an
H200, two minutes each on the same responses, acceptance length decoded on four sets. As chosen here it was 2.92; with
AdamW instead of Muon 2.23, with decay weights instead of D-PACE 2.86, with 3 taps for 5 2.77, with KL for half of the
cross-entropy 2.85, with 2 layers for 5 2.77 (and 3 % more tokens a second on that small target; five are the
checkpoints' usual shape). Muon's learning rate is from half a minute each: 2.28 at 6e-4, 2.73 at 1.2e-3, 2.95 at 3e-3
(teacher-forced, after 200 steps). One run each: the gaps to decay and KL are within chance. The same 2304 blocks of a
step from 12288 tokens gave 4.91 instead of 3.98 (teacher-forced, after 66 seconds), with four times as many responses
seen; that is about the density of the paper's recipe.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from dflash_toolkit.config import Options, option
from dflash_toolkit.models.dflash.architecture import DraftArchitecture, all_sizes, asked_by, kinds, of_kind
from dflash_toolkit.models.dflash.shape import BLOCK_SIZE, WIDTH_FOR_PARTS, WINDOW

from .data_options import PACKS, RUNTIMES

ATTENTION = ("full_attention", "sliding_attention")  # types of layers
PACK_TOKENS = 12288  # tokens of a step on a GPU (default)
MOST_GIB = 2**20  # no machine has more memory
EPOCHS = 6  # passes over the data with one response to every prompt
C = TypeVar("C")


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
class LossOptions(Options):
    """The terms of the loss and the weights of the slots (contract, "Training recipe").

    Every term but `ce` compares with the target's own distribution. Then all layers of the target run, its last hidden
    state is kept next to the tapped ones, and each step multiplies once more with the head.
    `dflash_toolkit.kernels.loss_terms` has the formulas. DSpark (arXiv 2607.05147) mixes ce 0.1 and tv 0.9.
    """

    ce: float = option(
        1.0, "weight of the cross-entropy with the response's token (default: 1, or 0.1 for DSpine)", within=">= 0"
    )
    kl: float = option(0.0, "weight of KL(target || drafter) over the whole vocabulary", within=">= 0")
    tv: float = option(
        0.0,
        "weight of the total variation distance, 1 - the acceptance rate of sampled verification (default: 0, or 1.8 "
        "for DSpine)",
        within=">= 0",
    )
    lk: float = option(0.0, "weight of -log(acceptance rate), LK^alpha of arXiv 2602.23881", within=">= 0")
    lk_hybrid: float = option(
        0.0, "weight of KL that turns into TV as acceptance grows, LK^lambda of arXiv 2602.23881", within=">= 0"
    )
    selector: float = option(1.0, "weight of the loss over the candidates of DFlash 2 or DSpine", within=">= 0")
    gold: str = option(
        "skip",
        "DFlash 2: what to do if the true token is not a candidate: skip the slot in the selector's loss, or inject "
        "the token as the last candidate",
        choices=("skip", "inject"),
    )
    temperature: float = option(
        1.0,
        "temperature of both distributions in kl, tv, lk and lk_hybrid; the one used in serving fits best",
        within="> 0",
    )
    weights: str = option("dpace", "slot weights (default: dpace, or decay for DSpine)", choices=("decay", "dpace"))
    gamma: float | None = option(
        None,
        "decay of the slot weights exp(-(k-1)/gamma), for loss.weights=decay (default: 7, 5, 4 for block size 16, 10, "
        "8)",
        within="> 0",
    )
    alpha: float = option(0.5, "smoothing of the slots' probabilities, for loss.weights=dpace", within="in [0, 1]")
    anchors: int = option(512, "draft blocks per sequence and step; disables packing if given", within=">= 1")
    head_rows: int = option(1024, "rows of logits in memory at a time", within=">= 1")
    input_noise: float = option(
        0.0,
        "standard deviation of noise on the target's hidden states, as a share of each one's root mean square",
        within=">= 0",
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
        Options.__post_init__(self)
        if not (self.ce or self.distribution):
            raise ValueError("loss.ce, kl, tv, lk and lk_hybrid are all 0; give one of them a weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimOptions(Options):
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
        within=">= 1",
    )
    steps: int = option(0, "optimiser steps of the run, instead of epochs; 0 goes by epochs", within=">= 0")
    minutes: float = option(0.0, "minutes of training, instead of epochs; 0 goes by epochs", common=True, within=">= 0")
    pack_tokens: int | None = option(
        None,
        f"tokens per step, packed from several sequences; a multiple of 128 (default: about {PACK_TOKENS} on a "
        "GPU, at least the longest row)",
    )
    pack_blocks: int | None = option(None, "draft blocks per packed step (default: 3 for every 16 tokens)")
    batch_size: int = option(8, "sequences per micro step; disables packing if given", within=">= 1")
    accumulate: int = option(1, "micro steps of every process per optimiser step", within=">= 1")
    splits: int | None = option(
        None,
        "passes in which the drafter computes the blocks of a micro step; their gradients are summed, so more passes "
        "save memory and the update stays the same (default: as few as the GPU's memory allows)",
        within=">= 1",
    )
    recompute: bool | None = option(
        None,
        "recompute activations in the backward pass, which saves memory and costs a tenth of the speed (default: only "
        "if the GPU's memory requires it)",
    )
    learning_rate: float | None = option(
        None,
        "peak learning rate (default: 3e-3 for muon, 6e-4 for adamw; with --init-from 3e-4 and 6e-5)",
        within="> 0",
    )
    warmup: float = option(0.04, "share of the run in which the learning rate rises", within="in [0, 1)")
    schedule: str = option(
        "cosine",
        "learning rate after the warm-up: cosine to zero, or wsd (constant, then a decay to zero)",
        choices=("cosine", "wsd"),
    )
    decay: float = option(0.2, "share of the run in the final decay, for optim.schedule=wsd", within="in (0, 1]")
    ema: float = option(
        0.0,
        "decay per step of an average of the weights that is measured and exported, e.g. 0.999; 0 uses no average",
        within="in [0, 1)",
    )
    weight_decay: float = option(0.0, "weight decay of the matrices", within=">= 0")
    clip: float = option(1.0, "maximum norm of the gradient", within="> 0")

    @property
    def passes(self) -> int:
        """Epochs if the number of responses to a prompt is unknown."""
        return EPOCHS if self.epochs is None else self.epochs

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.minutes and self.steps:
            raise ValueError("optim.steps and optim.minutes are both given; give one of them")
        if (self.pack_tokens or 0) < 0 or (self.pack_tokens or 0) % PACKS:
            raise ValueError(f"optim.pack_tokens is {self.pack_tokens}; it must be a multiple of {PACKS}, or 0")
        if self.pack_blocks is not None and not 1 <= self.pack_blocks <= (self.pack_tokens or PACK_TOKENS):
            most = self.pack_tokens or PACK_TOKENS
            raise ValueError(f"optim.pack_blocks is {self.pack_blocks}; it must be in 1..{most} (optim.pack_tokens)")
        if self.schedule == "wsd" and self.warmup + self.decay > 1:
            raise ValueError(
                f"optim.decay is {self.decay}; it must be at most 1 - optim.warmup with optim.schedule=wsd"
            )

    @property
    def final_decay(self) -> float | None:
        """Share of the run in a final decay; None is a cosine after the warm-up."""
        return self.decay if self.schedule == "wsd" else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions(Options):
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
    feature_gpu_share: float = option(0.9, "share of the free GPU memory used for hidden states", within="in [0, 1]")
    feature_cache_gb: float = option(
        0.0, "GiB of host memory used for hidden states, for all processes of a machine", within=f"in 0..{MOST_GIB}"
    )
    fsdp: bool = option(False, "shard weights, gradients and optimiser states over the processes with FSDP2")
    fsdp_reshard_after_forward: bool = option(
        True, "gather a layer's weights again in the backward pass; off keeps them in memory from the forward pass"
    )
    zero: int = option(
        0, "DeepSpeed ZeRO stage: shard optimiser states (1), also gradients (2), also weights (3); 0 is off; "
        "optim.optimizer=auto is then adamw", within="in 0..3",
    )  # fmt: skip
    target_tensor_parallel_size: int = option(
        1, "processes of a machine that share one target by tensor parallelism (torchrun); each trains the drafter on "
        "its own rows", within=">= 1",
    )  # fmt: skip
    offload_target: bool | None = option(
        None,
        "move the target's layers to host memory once all hidden states are stored; needs run.features=disk and no "
        "held-out prompts (default: only if the GPU's memory requires it)",
    )
    seed: int = option(0, "seed of weights, data order and anchors", flag="seed", within=f"in 0..{2**63 - 1}")
    log_every: int = option(10, "steps between lines in metrics.jsonl", within=">= 1")
    save_minutes: float = option(
        10.0, "minutes between resume points, which are written while training continues", within="> 0"
    )
    save_every: int = option(
        0, "steps between resume points, instead of minutes; 0 goes by run.save_minutes", within=">= 0"
    )
    evaluate_every: int = option(
        1000,
        "steps between measurements of acceptance on held-out prompts; 0 measures only at the end",
        within=">= 0",
    )
    evaluate_prompts: int = option(
        16,
        "held-out prompts of each measurement, at most half of them; the final measurement uses the others",
        within=">= 1",
    )
    evaluate_tokens: int = option(256, "longest response of a measurement, in tokens", within=">= 1")
    final_tokens: int | None = option(
        None,
        "longest response of the final measurement, which chooses the exported drafter (default: responses.max_tokens)",
        within=">= 1",
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
