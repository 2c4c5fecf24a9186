"""dflash-eval: measures a drafter and writes the report."""

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..checkpoint.readahead import read_ahead
from ..command_line import parse_cli, run_command
from ..config import Options, UnsupportedModel, UserError, option, options, to_mapping
from ..data.benchmarks import BENCHMARKS
from ..data.prompts import warn_of_thinking
from ..data.skipped import Skipped
from ..files import locked
from ..models.published import hint_for
from ..options import (
    DRAFT_TREE,
    MOST_TREE_NODES,
    THINKING,
    AnswerOptions,
    DraftOptions,
    PromptSetOptions,
    TemplateOptions,
)
from ..preflight import check_new_folder, check_target
from ..progress import disable_library_bars
from ..sampling import DraftSampleMethod
from ..threads import use_threads
from ..tracking import log_in
from .protocols import PROTOCOLS, fixed_options

if TYPE_CHECKING:
    from .measure.pairs import Pair

PROG = "dflash-eval"
DESCRIPTION = """\
Decodes prompts with a drafter and without one, and reports how many drafted tokens the target accepts, how much faster
decoding is, and whether every response is identical. Writes report.json, report.md and report.html. You can stop it at
any time; run the same command again to resume.

dflash-eval check REPORT checks a report against limits, dflash-eval compare REPORT REPORT compares reports; each has
its own --help."""
EXAMPLE = "dflash-eval --target Qwen/Qwen3-8B --drafter out/qwen3-8b --prompts gsm8k mt_bench --limit 80"
NAMES = tuple(PROTOCOLS)
COMMANDS = ("check", "compare")  # subcommands, each in the module of its name


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSampling(AnswerOptions):
    """Sampling options: every prompt is decoded at every temperature in every thinking mode."""

    max_tokens: int = option(512, "longest response, in tokens", common=True)
    temperature: tuple[float, ...] = option(
        (0.0,), "sampling temperatures, one or several, as 0 0.6 1; 0 is greedy", common=True
    )
    thinking: tuple[bool, ...] = option((), f"{THINKING}: on, off, or both (default: the template's own)", common=True)
    multi_turn: bool = option(
        False, "decode every turn of a conversation, after the responses before it; off: the first"
    )
    distribution_samples: int = option(
        0, "responses per prompt with and without the drafter, to compare their distributions; 0 makes no test"
    )
    seed: int = option(0, "seed of sampling, the same for every prompt")

    def __post_init__(self) -> None:
        for name, values in (("temperature", self.temperature), ("thinking", self.thinking)):
            if len(set(values)) < len(values) or (name == "temperature" and not values):
                raise ValueError(f"{name} is {list(values)}; give each value once")
        if self.distribution_samples and (self.distribution_samples < 2 or not max(self.temperature)):
            least = "must be 0, or 2 or more" if max(self.temperature) else "needs a temperature above 0"
            raise ValueError(f"distribution_samples is {self.distribution_samples}; it {least}")
        for temperature in self.temperature:
            self.params_at(temperature)  # raises for a value outside its range


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalDrafts(DraftOptions):
    """Draft options; every step drafts a whole block."""

    num_speculative_tokens: int | None = option(
        None, "tokens drafted per step (default: as the drafter was trained)", common=True, within=">= 1"
    )
    draft_tree: int | None = option(0, DRAFT_TREE, off=True, within=">= 0")

    @property
    def tree_nodes(self) -> int:
        """The maximum nodes of a draft tree; 0 is a chain."""
        return self.draft_tree or 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepOptions(Options):
    """Measurements on some of the prompts, in addition to the report on all of them."""

    concurrency: tuple[int, ...] = option(
        (),
        "numbers of concurrent requests to measure, as 1 2 4 8 16 32 64; needs the engine or a server (default: none)",
        common=True,
    )
    draft_length: tuple[int, ...] = option(
        (), "numbers of tokens drafted per step to measure, as 3 7 15 (default: none)"
    )
    context_length: tuple[int, ...] = option(
        (),
        "prompt lengths to measure, in tokens, as 512 2048 8192 32768; the same questions at each length, after other "
        "prompts of their set and the recorded responses, in the order of --seed (default: none)",
    )
    draft_tree_nodes: tuple[int, ...] = option(
        (),
        "sizes of draft trees to measure, as 16 32 63, next to blocks and chains of adaptive length, at each level of "
        "--concurrency; the report recommends the fastest for each load (default: none)",
    )
    sweep_requests: int = option(16, "prompts of each such measurement, taken evenly from all sets", within=">= 1")

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        for name in ("concurrency", "draft_length", "context_length", "draft_tree_nodes"):
            values = getattr(self, name)
            if any(value < 1 for value in values) or list(values) != sorted(set(values)):
                raise ValueError(f"{name} is {list(values)}; give numbers >= 1 in ascending order")
        if (most := max(self.draft_tree_nodes, default=0)) > MOST_TREE_NODES:
            raise ValueError(f"draft_tree_nodes is {most}; the engine takes {MOST_TREE_NODES} nodes at most")


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointOptions(Options):
    """Options of a server to measure instead of models in this process."""

    endpoint: str | None = option(
        None,
        "server to measure: vLLM, SGLang or dflash-serve with a drafter; --target names its tokenizer (default: load "
        "the models here)",
        common=True,
        metavar="URL",
    )
    plain_endpoint: str | None = option(
        None,
        "server of the same target without a drafter, for speed-up and identity; dflash-serve needs none (default: "
        "none)",
        metavar="URL",
    )
    max_concurrency: int = option(
        1, "concurrent requests to the endpoint for the report; raise it to finish sooner", within=">= 1"
    )
    served_model_name: str | None = option(None, "model name on the servers (default: the only model they have)")

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.endpoint is None and self.max_concurrency > 1:
            raise ValueError(
                f"max_concurrency is {self.max_concurrency}, but models in this process decode one request at a time; "
                f"add --endpoint, or measure the engine under load with --concurrency"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishOptions:
    """Options of publishing the report."""

    wandb: str | None = option(None, "Weights & Biases project to log the report to (default: none)")
    write_model_card: bool = option(False, "also write the table, the command and a badge into the drafter's README.md")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig(TemplateOptions):
    """The options of `dflash-eval`."""

    drafter: str | None = option(
        None,
        "drafter: Hugging Face id or directory (default: the server's, with --endpoint)",
        common=True,
        metavar="PATH",
    )
    sets: PromptSetOptions = options(PromptSetOptions, flat=True)
    protocol: str | None = option(
        None,
        "published comparison to repeat, which sets prompts and sampling and is compared with ours (default: none)",
        NAMES,
    )
    output: str = option("report", "directory for the report", common=True, metavar="PATH")
    runtime: str = option(
        "auto",
        "runtime: engine (as in dflash-serve), reference (Hugging Face modules, slow), or auto (the engine if it "
        "supports the target)",
        ("auto", "engine", "reference"),
    )
    baseline: bool = option(True, "also decode without the drafter, for speed-up and identity")
    recall: bool = option(
        False, "also count how often the target's token is among the drafter's 1, 4 and 16 best; uses the reference"
    )
    sampling: EvalSampling = options(EvalSampling, flat=True)
    draft: EvalDrafts = options(EvalDrafts, flat=True)
    sweeps: SweepOptions = options(SweepOptions, flat=True)
    server: EndpointOptions = options(EndpointOptions, flat=True)
    publish: PublishOptions = options(PublishOptions, flat=True)

    def __post_init__(self) -> None:
        TemplateOptions.__post_init__(self)
        if self.prompt_format == "text" and self.sampling.multi_turn:
            raise ValueError("multi_turn is on, but prompt_format text completes one prompt; remove one of them")
        if self.protocol is not None:
            self._follow(self.protocol)
        if not self.sets.prompts:
            raise ValueError("prompts is empty; give at least one, as --prompts gsm8k")
        if self.drafter is None and self.server.endpoint is None:
            known = hint_for(self.target)
            raise ValueError(f"drafter is missing; give --drafter{known}, or --endpoint of a server that has one")
        if self.server.endpoint is None and self.server.plain_endpoint is not None:
            raise ValueError("plain_endpoint is given without endpoint; give both")
        if self.server.endpoint is not None:
            self._check_served()
        if self.sweeps.draft_tree_nodes:
            self._check_trees_swept()
        if self.runtime == "reference" and self.draft.draft_dtype == "fp8":
            raise ValueError(f"draft_dtype is {self.draft.draft_dtype!r}; only --runtime engine can draft in it")
        if self.runtime == "reference" and self.draft.fp8_cache:
            raise ValueError(f"kv_cache_dtype is {self.draft.kv_cache_dtype!r}; only --runtime engine has such a cache")
        if self.runtime != "reference" and self.draft.tree_nodes > MOST_TREE_NODES:
            raise ValueError(
                f"draft_tree is {self.draft.draft_tree}; the engine takes {MOST_TREE_NODES} nodes at most, "
                f"--runtime reference any number"
            )

    def _follow(self, protocol: str) -> None:
        """Sets a protocol's options. Raises ValueError if one has another value."""
        given: dict[str, Any] = {}
        for part in (self.sampling, self.sets):
            values = {f.name: (getattr(part, f.name), getattr(type(part)(), f.name)) for f in fields(part)}
            given |= {key: value for key, (value, default) in values.items() if value != default}
        fixed = fixed_options(protocol, given)
        for name in ("sampling", "sets"):
            part = getattr(self, name)
            own = {f.name: fixed[f.name] for f in fields(part) if f.name in fixed}
            if name == "sets" and not self.sets.prompts:
                own["prompts"] = tuple(each for each in PROTOCOLS[protocol].sets if BENCHMARKS[each].place)
            object.__setattr__(self, name, replace(part, **own))

    def _check_trees_swept(self) -> None:
        """Raises ValueError for options that conflict with a sweep over trees."""
        reasons = {
            "num_speculative_tokens": "draft lengths are chosen at run time",
            "draft_sample_method": "trees contain the most probable tokens, not sampled ones",
        }
        for name, reason in reasons.items():
            if getattr(self.draft, name) != getattr(EvalDrafts(), name):
                raise ValueError(f"draft_tree_nodes is given with {name}; {reason}, so remove it")

    def _check_served(self) -> None:
        """Raises ValueError for options that need models in this process."""
        here = {
            "runtime": self.runtime != "auto",
            "recall": self.recall,
            "num_speculative_tokens": self.draft.num_speculative_tokens is not None,
            "draft_dtype": self.draft.draft_dtype != "auto",
            "kv_cache_dtype": self.draft.kv_cache_dtype != "auto",
            "draft_sample_method": self.draft.draft_sample_method != "greedy",
            "draft_tree": self.draft.tree_nodes > 0,
            "draft_tree_width": self.draft.draft_tree_width != EvalDrafts().draft_tree_width,
            "distribution_samples": self.sampling.distribution_samples > 0,
            "draft_length": bool(self.sweeps.draft_length),
            "draft_tree_nodes": bool(self.sweeps.draft_tree_nodes),
        }
        for name in (name for name, given in here.items() if given):
            raise ValueError(f"{name} is given with endpoint; the server decides that, so remove it")
        if self.publish.write_model_card and self.drafter is None:
            raise ValueError("write_model_card is given with endpoint; also give --drafter, the directory of its card")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in COMMANDS:
        module = importlib.import_module(f".{words[0]}", __package__)  # a fast import, unlike this module's others
        return cast(int, module.main(words[1:]))
    return run_command(lambda: _run(parse_cli(EvalConfig, words, PROG, DESCRIPTION, EXAMPLE)))


def _run(config: EvalConfig) -> None:
    if config.drafter is not None and config.server.endpoint is None:
        read_ahead(config.drafter, config.target)
    # check inputs before the target's weights are loaded, which takes longest
    check_new_folder(Path(config.output), f"output {config.output}")
    skipped = Skipped(config.sets.strict, "strict")
    prompts = config.sets.read(skipped)
    hashes = {each.name: each.contents(config.sets.split) for each in config.sets.sets}
    # imports torch and transformers, which take seconds, while the disk already reads
    from ..models.device import resolve_device
    from .measure.encoding import encode_sets
    from .measure.run import Setting, evaluate_all, serving_command
    from .measure.sweeps import Sweeps
    from .report.files import write_report
    from .report.publish import find_card, log_report, shown_command, write_card
    from .report.terminal import show_report
    from .report.verdict import verdict

    publish = config.publish
    card = find_card(config.drafter) if publish.write_model_card and config.drafter is not None else None
    if publish.wandb:
        log_in("wandb", publish.wandb)
    use_threads(config.threads)
    disable_library_bars()
    place = config.server.endpoint or str(resolve_device(config.device))
    print(f"{PROG}: target {config.target} on {place}; the report goes to {config.output}", file=sys.stderr)
    pair, baseline = _pair(config)
    sampling = config.sampling
    warn_of_thinking(pair.tokenizer, next(iter(sampling.thinking), None))
    modes: tuple[bool | None, ...] = sampling.thinking or (None,)
    encoded = encode_sets(pair, prompts, modes, sampling.multi_turn, skipped)
    if skipped.counts:
        print(f"skipped rows: {skipped}", file=sys.stderr)
    settings = [
        Setting(encoded[thinking], sampling.params_at(temperature, sampling.seed), thinking)
        for thinking in modes
        for temperature in sampling.temperature
    ]

    output = Path(config.output)
    partial = output / "partial.jsonl"
    hidden = {"output", *to_mapping(publish), *to_mapping(config.server)}
    arguments = {key: value for key, value in to_mapping(config).items() if key not in hidden}
    with _only_run(output):
        report = evaluate_all(
            pair,
            settings,
            baseline=baseline,
            sweeps=Sweeps(
                draft_length=config.sweeps.draft_length,
                context_length=config.sweeps.context_length,
                concurrency=config.sweeps.concurrency,
                draft_tree_nodes=config.sweeps.draft_tree_nodes,
                requests=config.sweeps.sweep_requests,
            ),
            recall=config.recall,
            distribution_samples=sampling.distribution_samples,
            arguments={**arguments, "prompt_file_sha256": hashes, "skipped_rows": dict(skipped.counts)},
            partial=partial,
            show_progress=True,
        )
        write_report(report, output)
        partial.unlink(missing_ok=True)
        if card:
            write_card(card, report, shown_command(config))
        if publish.wandb:
            log_report(report, output, publish.wandb)
    served_here = config.server.endpoint is None
    pays = verdict(report).with_drafter
    serve = serving_command(report.arguments, arguments, drafter=pays) if served_here else ()
    show_report(report, output, config.protocol, serve)


@contextlib.contextmanager
def _only_run(output: Path) -> Iterator[None]:
    """Locks a folder for one process at a time."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output {output}: cannot be written ({error.strerror})") from error
    with locked(output):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                output.rmdir()  # removes it only if it is empty


def _pair(config: EvalConfig) -> "tuple[Pair, bool]":
    """Returns the pair to measure, and whether to decode plainly as well."""
    from ..models.target_files import load_tokenizer
    from .measure.endpoint import EndpointPair

    server = config.server
    if server.endpoint is None:
        return _load(config), config.baseline
    pair = EndpointPair(
        config.target, server.endpoint, server.served_model_name, server.plain_endpoint, server.max_concurrency,
        load_tokenizer(config.target, **config.rendering),
    )  # fmt: skip
    if config.baseline and not pair.decodes_plainly:
        print("speed-up, identity and regret are not measured; add --plain-endpoint to measure them", file=sys.stderr)
    return pair, config.baseline and pair.decodes_plainly


def _load(config: EvalConfig) -> "Pair":
    from ..models.dflash.checkpoint import load_drafter
    from ..models.target import Target
    from ..models.target_files import load_tokenizer, warn_of_penalty
    from .measure.pairs import EnginePair, ReferencePair, suggest_reference

    assert config.drafter is not None
    drafter = load_drafter(config.drafter)
    with suggest_reference(UnsupportedModel):
        check_target(config.target, "reference" if config.recall else config.runtime, drafter.config)
    if config.draft.block_size is not None:
        try:
            drafter.config = drafter.config.with_block_size(config.draft.block_size)
        except ValueError as error:
            raise UserError(str(error)) from error
    refused = None
    tokenizer = load_tokenizer(config.target, **config.rendering)
    warn_of_penalty(config.target)

    def reference() -> Target:
        loaded = Target.load(config.target, config.device, config.dtype)
        loaded.tokenizer = tokenizer
        return loaded

    modules = reference() if config.recall else None
    if config.runtime != "reference":
        try:
            drafting = to_mapping(config.draft) | {"num_speculative_tokens": None}
            how = {"share": config.recall, "tokenizer": tokenizer} | drafting
            return EnginePair.load(modules or config.target, drafter, config.device, config.dtype, **how)
        except UnsupportedModel as error:
            if config.runtime == "engine" or config.draft.draft_dtype == "fp8" or config.draft.fp8_cache:
                raise  # the reference supports neither
            refused = str(error.__cause__ or error)  # without the advice to use the reference
    target = modules or reference()
    method = cast(DraftSampleMethod, config.draft.draft_sample_method)  # one of its choices
    pair = ReferencePair(target, drafter, method, config.draft.tree_nodes, config.draft.draft_tree_width)
    if refused is not None:
        print(f"using the reference, because the engine does not support this: {refused}", file=sys.stderr)
        pair.facts["refused_by_the_engine"] = refused
    return pair


if __name__ == "__main__":
    raise SystemExit(main())
