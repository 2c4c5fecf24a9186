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

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from dflash_toolkit.config import UserError, from_mapping, option, options
from dflash_toolkit.models.dflash.architecture import DraftArchitecture, all_sizes, asked_by, kinds, of_kind
from dflash_toolkit.models.dflash.shape import BLOCK_SIZE, WIDTH_FOR_PARTS, WINDOW
from dflash_toolkit.options import ModelOptions, PromptOptions, SamplingOptions

RUNTIMES = ("auto", "engine", "reference")
ATTENTION = ("full_attention", "sliding_attention")  # types of layers
PACK_TOKENS = 12288  # of a step on a GPU, unless said
MOST_GIB = 2**20  # no machine has more memory
EPOCHS = 6  # over one response to every prompt


C = TypeVar("C")


def _with_sizes(cls: type[C]) -> type[C]:
    """With an option for every size of a part of a draft architecture, which has its name."""
    for name, size in all_sizes().items():
        cls.__annotations__[name] = int | None
        setattr(cls, name, option(None, size.help))
    return cls


@dataclass(frozen=True, kw_only=True, slots=True)
@_with_sizes
class DrafterOptions:
    """Kind and shape of the drafter; what is not given is the target's own."""

    kind: str | None = option(
        None,
        "dflash, or dflash2: with convolutions in its blocks and a selector of tokens (default: dflash2, or dflash for "
        f"a target with a hidden size below {WIDTH_FOR_PARTS})",
        choices=kinds,
    )
    layers: int | None = option(None, "draft layers (default: 5, or 6 for a target of experts)")
    taps: int | None = option(None, "tapped target layers, evenly spaced (default: 5, or 8 for a target of experts)")
    target_layer_ids: tuple[int, ...] = option((), "tap exactly these 0-based layers instead")
    block_size: int = option(BLOCK_SIZE, "one anchor plus block_size - 1 drafted tokens")
    mask_token_id: int | None = option(None, "row of the target's embedding for masked slots (default: an unused one)")
    num_heads: int | None = option(None, "query heads")
    num_kv_heads: int | None = option(None, "key/value heads")
    head_dim: int | None = option(None, "head dimension")
    intermediate_size: int | None = option(None, "FFN width")
    layer_types: tuple[str, ...] = option(
        (), "what each layer sees, or one for all: everything (the default), or a window of context", choices=ATTENTION
    )
    sliding_window: int | None = option(
        None, f"tokens that a sliding layer sees, up to the slot itself (default: {WINDOW})"
    )
    is_causal: bool | None = option(
        False, "whether a slot sees only earlier slots of its block; null: in sliding layers, not in full ones"
    )

    def __post_init__(self) -> None:
        try:
            if self.architecture:
                self.architecture.sizes_of(self.sizes)
        except ValueError as error:
            raise ValueError(f"drafter: {error}") from error

    @property
    def architecture(self) -> DraftArchitecture | None:
        """Of the kind, or of the parts whose sizes are given; None: that is left to the target."""
        return of_kind(self.kind) if self.kind else asked_by(self.sizes)

    @property
    def sizes(self) -> dict[str, int | None]:
        """Of the parts of all architectures; None is the default."""
        return {name: getattr(self, name, None) for name in all_sizes()}

    @classmethod
    def sizes_in(cls, shape: object) -> dict[str, Any]:
        """Of the parts of a drafter's configuration, by option; 0 where it has them not."""
        own = {each.name for each in fields(cls)}
        return {name: getattr(shape, name, 0) for name in all_sizes() if name in own}


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions(PromptOptions):
    """Where prompts come from when no files are given, and how much of them is used."""

    dataset: str = option("mlabonne/open-perfectblend", "public instruction dataset, read when --data is not given")
    max_prompts: int = option(100_000, "prompts to use, sampled from all sources; 0 is all")
    held_out: int = option(64, "prompts kept out of training to measure acceptance on")

    def __post_init__(self) -> None:
        PromptOptions.__post_init__(self)
        if self.held_out < 0:
            raise ValueError(f"prompts.held_out is {self.held_out}; it must be >= 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplesOptions(SamplingOptions):
    """How the target picks the tokens of its responses, of which a prompt may have several."""

    samples: int = option(1, "responses to every prompt, each with a seed of its own")
    greedy_first: bool = option(False, "the first of several responses is greedy whatever the temperature")

    def __post_init__(self) -> None:
        SamplingOptions.__post_init__(self)
        if self.samples < 1 or self.max_tokens < 2:
            raise ValueError("samples must be >= 1 and max_tokens >= 2")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples is {self.samples}, which at temperature 0 are all the same; give samples=1, or a temperature"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseOptions(SamplesOptions):
    """How the target answers the prompts. A drafter must see the target's own words.

    Two responses, one of them drawn, teach more than twice as many passes over one (docs/benchmarks.md, "Settings").
    """

    samples: int = option(2, "responses to every prompt, each with a seed of its own")
    greedy_first: bool = option(True, "the first response is greedy whatever the temperature")
    temperature: float = option(1.0, "of responses that are drawn; 0 is greedy")
    regenerate: bool = option(True, "false trains on the data's own responses (only right if this target wrote them)")
    runtime: str = option("auto", "auto is the engine where it computes the target", choices=RUNTIMES)
    batch_size: int = option(32, "prompts answered at a time")

    def __post_init__(self) -> None:
        SamplesOptions.__post_init__(self)
        if self.batch_size < 1:
            raise ValueError(f"responses.batch_size is {self.batch_size}; it must be >= 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions:
    """What a slot's loss is, a weighted sum, and which slots count how much (contract, "Training recipe").

    All but `ce` compare with the target's own distribution: every layer of the target runs, its last hidden state is
    kept beside the tapped ones, and each step pays one more product with the head. `dflash_toolkit.kernels.mix` has the
    formulas; DSpark (arXiv 2607.05147) mixes ce 0.1 and tv 0.9.
    """

    ce: float = option(1.0, "weight of the cross-entropy with the response's token")
    kl: float = option(0.0, "weight of KL(target || drafter) over the whole vocabulary")
    tv: float = option(0.0, "weight of the total variation: 1 - the acceptance of sampled verification")
    lk: float = option(0.0, "weight of -log(acceptance), LK^alpha of arXiv 2602.23881")
    lk_hybrid: float = option(0.0, "weight of KL turning into TV as acceptance grows, LK^lambda of the same paper")
    selector: float = option(1.0, "dflash2: weight of the selector's loss, the cross-entropy over its candidates")
    gold: str = option(
        "skip",
        "dflash2: where the true token is no candidate the slot has no selector's loss, or it is injected as the last",
        choices=("skip", "inject"),
    )
    temperature: float = option(1.0, "of both distributions in kl, tv, lk and lk_hybrid: the one it will be served at")
    weights: str = option("dpace", "slot weights", choices=("decay", "dpace"))
    gamma: float | None = option(None, "decay: exp(-(k-1)/gamma); default 7, 5, 4 for block size 16, 10, 8")
    alpha: float = option(0.5, "dpace: smoothing of the slots' probabilities")
    anchors: int = option(512, "blocks per sequence and step; if it is given, sequences are not packed")
    head_rows: int = option(1024, "rows whose logits exist at one time")

    @property
    def distribution(self) -> bool:
        """Whether the target's own distribution is needed."""
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
        if self.anchors < 1 or self.head_rows < 1:
            raise ValueError("loss.anchors and loss.head_rows must be >= 1")
        if self.gamma is not None and self.gamma <= 0:
            raise ValueError(f"loss.gamma is {self.gamma}; it must be > 0")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"loss.alpha is {self.alpha}; it must be in [0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimOptions:
    """fp32 master weights, linear warm-up, decay to zero."""

    optimizer: str = option(
        "auto",
        "muon (for the matrices, AdamW for the rest) or adamw; auto is muon on a GPU without run.zero",
        choices=("auto", "adamw", "muon"),
    )
    epochs: int | None = option(
        None,
        f"passes over the responses (default: {EPOCHS}, divided by the responses that the target writes to a prompt)",
    )
    steps: int = option(0, "stop after this many optimiser steps instead; 0 goes by epochs")
    minutes: float = option(0.0, "stop after so many minutes instead, the learning rate going by the clock; 0 does not")
    pack_tokens: int | None = option(
        None, f"pack sequences into one row of so many tokens a step (default: {PACK_TOKENS} on a GPU)"
    )
    pack_blocks: int | None = option(None, "blocks of a packed row (default: three for every 16 of its tokens)")
    batch_size: int = option(8, "sequences per micro step; if it is given, they are not packed")
    accumulate: int = option(1, "micro steps (of every process) whose gradients make one optimiser step")
    recompute: bool = option(
        False, "compute the activations of layers again in the backward: less memory, a tenth slower"
    )
    learning_rate: float | None = option(None, "peak (default: 3e-3 for muon, 6e-4 for adamw)")
    warmup: float = option(0.04, "share of the run")
    schedule: str = option(
        "cosine",
        "behind the warm-up: cosine to zero, or wsd (the peak, then a decay to zero)",
        choices=("cosine", "wsd"),
    )
    decay: float = option(0.2, "wsd: share of the run in the final decay")
    ema: float = option(
        0.0, "measure and export an average of the weights with this decay a step, e.g. 0.999; 0 does not"
    )
    weight_decay: float = option(0.0, "on matrices only")
    clip: float = option(1.0, "gradient norm")

    @property
    def passes(self) -> int:
        """Epochs, where nothing is known of responses."""
        return EPOCHS if self.epochs is None else self.epochs

    def __post_init__(self) -> None:
        if self.steps < 0 or min(self.passes, self.batch_size, self.accumulate) < 1:
            raise ValueError("optim.steps must be >= 0, optim.epochs, optim.batch_size and optim.accumulate >= 1")
        if self.minutes and self.steps:
            raise ValueError("optim.steps and optim.minutes are both given; a run ends by one of them")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"optim.weight_decay is {self.weight_decay}; it must be >= 0")
        if self.minutes < 0 or (self.pack_tokens or 0) < 0 or (self.pack_tokens or 0) % 128:
            raise ValueError("optim.minutes must be >= 0 and optim.pack_tokens a multiple of 128")
        if self.pack_blocks is not None and not 1 <= self.pack_blocks <= (self.pack_tokens or PACK_TOKENS):
            raise ValueError("optim.pack_blocks must be between 1 and optim.pack_tokens")
        if self.learning_rate is not None and self.learning_rate <= 0:
            raise ValueError(f"optim.learning_rate is {self.learning_rate}; it must be > 0")
        if self.clip <= 0 or not 0 <= self.warmup < 1:
            raise ValueError("optim.clip must be > 0, optim.warmup in [0, 1)")
        if not 0 < self.decay <= 1 or (self.schedule == "wsd" and self.warmup + self.decay > 1):
            raise ValueError("optim.decay must be in (0, 1], and with optim.schedule=wsd at most 1 - optim.warmup")
        if not 0 <= self.ema < 1:
            raise ValueError(f"optim.ema is {self.ema}; it must be in [0, 1)")

    @property
    def final_decay(self) -> float | None:
        """Share of the run in a final decay; None: a cosine from the warm-up on."""
        return self.decay if self.schedule == "wsd" else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Memory, logging, saving, and how often acceptance is measured by real decoding."""

    attention: str = option("auto", "auto is flex on a GPU, sdpa on a CPU", choices=("auto", "flex", "sdpa"))
    compile: str = option("auto", "compile the drafter; auto does on a GPU", choices=("auto", "on", "off"))
    features: str = option(
        "auto",
        "the target's hidden states: auto keeps them in a GPU's memory if all fit, then in host memory up to "
        "feature_cache_gb, and computes the rest at every step; online keeps none; memory keeps all or refuses; disk "
        "writes all before training; hybrid writes them during the first epoch",
        choices=("auto", "online", "memory", "disk", "hybrid"),
    )
    feature_dir: str | None = option(
        None, "where disk and hybrid write (default: OUTPUT/work/features); runs of one target and taps may share it"
    )
    feature_endpoint: str | None = option(
        None,
        "a server of vLLM that computes hidden states (extract_hidden_states), for a target too large for these GPUs; "
        "here are its embedding and head alone",
    )
    feature_dtype: str = option(
        "auto",
        "what features are kept in, and rounded to where they are not: the target's own, bfloat16, or float8 with a "
        "scale a token",
        choices=("auto", "bfloat16", "float8"),
    )
    feature_gpu_share: float = option(0.9, "share of a GPU's memory that is free beside a training step, for features")
    feature_cache_gb: float = option(0.0, "GiB of host memory that features may take, of a machine for all processes")
    fsdp: bool = option(False, "shard weights, gradients and the optimiser over the processes with torch's FSDP2")
    fsdp_reshard_after_forward: bool = option(
        True, "gather a layer's weights again in the backward; false keeps them from the forward: more memory"
    )
    zero: int = option(
        0, "stage of DeepSpeed's ZeRO: shard the optimiser's state (1), gradients too (2), weights too (3); "
        "with it optim.optimizer=auto is adamw",
    )  # fmt: skip
    target_tensor_parallel_size: int = option(
        1, "processes of a machine that hold one target together, a slice of every layer each (torchrun); every one of "
        "them trains the drafter on rows of its own",
    )  # fmt: skip
    seed: int = option(0, "of weights, data order and anchors", flag="seed")
    log_every: int = option(10, "steps between lines in metrics.jsonl")
    save_minutes: float = option(10.0, "minutes between resume points, written while training goes on")
    save_every: int = option(0, "steps between resume points instead; 0 goes by save_minutes")
    evaluate_every: int = option(1000, "steps between real decodings of held-out prompts; 0 is only at the end")
    evaluate_prompts: int = option(16, "held-out prompts decoded each time, of all files in turn; all are at the end")
    evaluate_tokens: int = option(256, "longest response then")
    evaluate_runtime: str = option(
        "auto",
        "auto is the engine on a GPU, where it computes the target, and the reference elsewhere",
        choices=RUNTIMES,
    )
    export_selector: str = option(
        "better",
        "a DFlash 2 drafter's selector: better refuses to export one with which held-out prompts are accepted worse "
        "than without it; always exports it as it is; never leaves it out",
        choices=("better", "always", "never"),
    )
    wandb: str | None = option(None, "Weights & Biases project to log to")
    speculators: bool = option(False, "also export the speculators form, to OUTPUT/speculators")

    def __post_init__(self) -> None:
        if min(self.log_every, self.evaluate_prompts, self.evaluate_tokens) < 1:
            raise ValueError("run.log_every, evaluate_prompts and evaluate_tokens must be >= 1")
        if self.save_every < 0 or not 0 < self.save_minutes < math.inf:
            raise ValueError("run.save_every must be >= 0 and run.save_minutes > 0")
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
class TrainConfig(ModelOptions):
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
        "its rows a..b-1, and gsm8k=SOURCE asks as that benchmark does; without them a public dataset is loaded",
    )
    response_files: tuple[str, ...] = option(
        (), "responses of dflash-data, trained on as they are", flag="responses", old_flag="answers"
    )
    trust_responses: bool = option(
        False, "take responses whatever target and chat template they say they are of; only right if you know better"
    )
    held_out: tuple[str, ...] = option((), "sources of prompts to measure acceptance on, instead of a part of the data")
    output: str | None = option(None, "where the checkpoint goes (default: out/dflash-TARGET)")
    push_to_hub: str | None = option(
        None, "also upload the drafter and its model card to this repository of the Hugging Face hub, made if missing"
    )
    init_from: str | None = option(
        None,
        "drafter to start from, with its shape: directory or Hugging Face id; a plain one gets the parts of DFlash 2 "
        "with drafter.kind=dflash2",
    )
    estimate: bool = option(
        False, "print what the run will take (hours, disk, memory) and a shorter command, and exit; needs no weights"
    )
    drafter: DrafterOptions = options(DrafterOptions)
    prompts: DataOptions = options(DataOptions)
    responses: ResponseOptions = options(ResponseOptions)
    loss: LossOptions = options(LossOptions)
    optim: OptimOptions = options(OptimOptions)
    run: RunOptions = options(RunOptions)

    def __post_init__(self) -> None:
        ModelOptions.__post_init__(self)
        if self.data and self.response_files:
            raise ValueError("data and responses are given; the responses hold their prompts, so give one of them")
        if self.run.zero and self.run.fsdp:
            raise ValueError(f"run.fsdp=true and run.zero={self.run.zero} are both given; a drafter is sharded by one")
        if self.run.zero and self.optim.ema:
            raise ValueError(
                "run.zero keeps no average of the weights: give optim.ema=0, or run.fsdp=true instead of run.zero"
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
                        f"{name} is engine, which computes a target on one GPU; with run.target_tensor_parallel_size="
                        f"{self.run.target_tensor_parallel_size} leave it out: the reference decodes"
                    )
        if self.drafter.block_size < 2:
            raise ValueError(
                f"drafter.block_size is {self.drafter.block_size}; a block needs an anchor and a mask (>= 2)"
            )

    def _check_served(self) -> None:
        """What wants more of a target than hidden states. Raises ValueError."""
        asked = (
            (not self.response_files and self.responses.regenerate, "give --responses (dflash-data --endpoint)"),
            (bool(self.held_out) or self.prompts.held_out > 0, "give prompts.held_out=0 and no --held-out"),
            (self.loss.distribution, "leave out loss.kl, tv, lk and lk_hybrid"),
            (self.run.target_tensor_parallel_size > 1, "leave out run.target_tensor_parallel_size"),
        )
        if words := [words for wrong, words in asked if wrong]:
            raise ValueError(
                f"run.feature_endpoint computes hidden states, and decodes nothing: {', '.join(words)}; "
                f"dflash-eval --endpoint measures the drafter"
            )

    @property
    def epochs(self) -> int:
        """Passes over the responses: several ones that the target writes to a prompt count as passes over one."""
        written = self.responses.regenerate and not self.response_files
        default = max(1, round(EPOCHS / self.responses.samples)) if written else EPOCHS
        return default if self.optim.epochs is None else self.optim.epochs

    @property
    def output_dir(self) -> str:
        return self.output or "out/dflash-" + self.target.rstrip("/").split("/")[-1]

    @property
    def gamma(self) -> float:
        """The decay constant; the paper's 7, 5, 4 for block sizes 16, 10, 8, and in between by size."""
        return self.loss.gamma or {16: 7.0, 10: 5.0, 8: 4.0}.get(self.drafter.block_size, self.drafter.block_size / 2.2)


def configure(values: Mapping[str, Any], where: str = "config") -> TrainConfig:
    """A run's configuration from the values given, nested: each has an effect, and means the same on any device.

    `optim.batch_size` and `loss.anchors` are of rows that stay apart: if one of them is given, rows are not packed on a
    GPU either. Their value null is as if they were not given, so that a command can take back what its file says.

    Raises:
        UserError: what `from_mapping` raises, or a value, other than its default, that another one makes void.
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
            f"optim.pack_tokens packs rows, where {apart[0]} has no effect: leave it out, or take {apart[0]} back "
            f"({apart[0]}=null) and give optim.pack_blocks"
        )
    if apart and config.optim.pack_blocks:
        raise UserError(
            f"optim.pack_blocks is of packed rows, and {apart[0]} of rows that stay apart: give one of them"
        )
    check_effects(config)
    return config


def check_effects(config: TrainConfig) -> None:
    """Raises UserError: a value, other than its default, that another one makes void. Without a kind of drafter, which
    the target decides then, what any kind gives an effect has one."""
    loss, optim, run, responses = config.loss, config.optim, config.run, config.responses
    kind = config.drafter.architecture
    selects = kind is None or kind.has_selector(kind.sizes_of(config.drafter.sizes)) or config.init_from  # or may have
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
        ("run.feature_dir", run.feature_dir, None, run.features not in ("disk", "hybrid"),
         "run.features=disk or hybrid"),
        ("run.feature_cache_gb", run.feature_cache_gb, 0.0, run.features == "online", "run.features=auto"),
    )  # fmt: skip
    for name, value, default, nothing, needs in void:
        if nothing and value != default:
            raise UserError(
                f"{name} is {value}, which has an effect with {needs} only; give that too, or leave {name} out"
            )
