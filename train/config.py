"""Every option of a training run. The defaults are a complete run for an 8B target on one large GPU."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_toolkit.config import UserError, from_mapping, option, options
from dflash_toolkit.models.dflash.architecture import DraftArchitecture
from dflash_toolkit.options import TemplateOptions

from .data_options import (
    DataOptions,
    ResponseOptions,
    SynthesisOptions,
    count_in,
)
from .training_options import EPOCHS, DrafterOptions, LossOptions, OptimOptions, RunOptions


def _samples_in(file: str) -> int:
    """Returns the number of responses to a prompt in a file of dflash-data, from its record; 1 without a record."""
    try:
        return max(1, int(json.loads(Path(file).with_suffix(".run.json").read_bytes())["sampler"]["samples"]))
    except (OSError, ValueError, KeyError, TypeError):
        return 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(TemplateOptions):
    """One training run."""

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
    estimate_price: float | None = option(
        None, "price of a GPU hour, for the cost of the run in --estimate (default: no cost)"
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
        if self.estimate_price is not None and self.estimate_price < 0:
            raise ValueError(f"estimate_price is {self.estimate_price}; it must be >= 0")
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
        ("estimate_price", config.estimate_price, None, not config.estimate, "--estimate"),
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
