"""dflash-data: prompts -> the target's own responses, one JSON line each, for `dflash-train --responses`.

Beside FILE.jsonl (its rows: `responses/file.py`) stand FILE.prompts.jsonl, the prompts that were chosen, and
FILE.run.json, what was asked for.
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dflash_toolkit.checkpoint.reader import locate
from dflash_toolkit.config import UserError, option, options, parse_cli, run_command, to_mapping
from dflash_toolkit.data.sources import Source
from dflash_toolkit.evaluation.measure.decoders import Decoder, EngineDecoder
from dflash_toolkit.files import locked, write_json
from dflash_toolkit.fingerprint import template_digest
from dflash_toolkit.models.dflash.checkpoint import check_fits, read_config
from dflash_toolkit.models.target import (
    context_limit,
    declared_stop_ids,
    load_config,
    load_generation_config,
    resolve_device,
    resolve_dtype,
)
from dflash_toolkit.options import ModelOptions, PromptOptions
from dflash_toolkit.threads import use_threads

from .config import RUNTIMES, SamplesOptions
from .prompts.choosing import Wanted, choose, chosen, left_out
from .prompts.dedup import Duplicates
from .responses.backends import open_decoder
from .responses.conversation import likeliest_end_first, load_chat_tokenizer
from .responses.endpoint import APIS, EndpointBackend
from .responses.file import of_another_run, resume
from .responses.generate import SAID, ResponsePlan, Tally, limit_of, reasons, respond
from .responses.openai_http import find_models
from .responses.vllm_backend import VllmBackend, import_vllm
from .run.identity import target_digest
from .run.state import first_difference

ANSWERING = ("runtime", "model")  # keys of the record that are known once something answers
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "thinking", "samples", "greedy_first", "seed")
WEEK_S = 7 * 24 * 3600  # sockets wait no longer than 24 days
MOST_THREADS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPromptOptions(PromptOptions):
    """Which prompts are read."""

    shuffle: int = option(10_000, "rows of a dataset to sample the next from; 0 keeps its order; files keep theirs")

    def __post_init__(self) -> None:
        PromptOptions.__post_init__(self)
        if self.shuffle < 0:
            raise ValueError(f"prompts.shuffle is {self.shuffle}; it must be >= 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerOptions(SamplesOptions):
    """How the target answers."""

    seed: int = option(0, "of responses, and of the order of datasets")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """How --endpoint is asked."""

    model: str | None = option(None, "name of the target there (default: the only one it has)")
    api: str = option("auto", "auto is completions, and chat where these are refused or missing", choices=APIS)
    timeout: float = option(600.0, "seconds for one response")
    retries: int = option(6, "times a request is sent again after an error that may pass, pausing 1, 2, 4, ... seconds")

    def __post_init__(self) -> None:
        if not 0 < self.timeout <= WEEK_S:
            raise ValueError(f"server.timeout is {self.timeout}; it must be > 0 and at most {WEEK_S}, a week")
        if not 0 <= self.retries <= 1000:
            raise ValueError(f"server.retries is {self.retries}; it must be in 0..1000")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(ModelOptions):
    """One run of `dflash-data`."""

    renamed: ClassVar[dict[str, Any]] = {
        "batch": "batch_size",
        "sampler.max_new_tokens": "max_tokens",
        **{f"sampler.{name}": name for name in SAMPLING},
    }
    data: tuple[str, ...] = option(
        help="sources: JSONL, JSON, Parquet or text files, or datasets as DATASET[:SUBSET]; SOURCE[a:b] takes its rows "
        "a..b-1, and gsm8k=SOURCE asks as that benchmark does"
    )
    output: str = option(help="FILE.jsonl for the responses; what it holds already is not answered again")
    endpoint: tuple[str, ...] = option((), "ask OpenAI-compatible servers of the target instead of loading it")
    runtime: str = option(
        "auto",
        "auto is the engine where it computes the target; vllm needs vllm installed",
        choices=(*RUNTIMES, "vllm"),
    )
    gpus: int = option(1, "GPUs that share the target, with runtime vllm")
    drafter: str | None = option(None, "speeds the engine up, which alone uses it; the responses stay the same")
    batch_size: int = option(64, "responses written at a time")
    prompts: DataPromptOptions = options(DataPromptOptions)
    sampler: SamplerOptions = options(SamplerOptions, flat=True)
    server: ServerOptions = options(ServerOptions)

    def __post_init__(self) -> None:
        ModelOptions.__post_init__(self)
        if not self.data:
            raise ValueError("data names no source")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be >= 1")
        if self.endpoint and self.batch_size > MOST_THREADS:
            raise ValueError(
                f"batch_size is {self.batch_size}; with endpoint, where each response takes a thread, it must be <= "
                f"{MOST_THREADS}"
            )
        if Path(self.output).suffix != ".jsonl":
            raise ValueError(f"output {self.output!r} must end in .jsonl")
        if self.endpoint and (self.drafter or self.runtime != "auto"):
            raise ValueError("endpoint excludes drafter and runtime: the server decides")
        if self.runtime == "reference" and self.drafter:
            raise ValueError("runtime reference excludes drafter; it answers without one")
        if self.runtime == "vllm" and self.drafter:
            raise ValueError("runtime vllm excludes drafter; start 'vllm serve' with it and give --endpoint")
        if self.gpus < 1 or (self.gpus > 1 and self.runtime != "vllm"):
            raise ValueError(f"gpus is {self.gpus}; it must be >= 1, and 1 but with runtime vllm")


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Exit codes: 0 done, 2 a mistake (one line), 130 interrupted (run again to resume)."""
    description = (
        "Answer the prompts of DATA with exactly TARGET, for dflash-train --responses. Resumes where it stopped."
    )
    return run_command(lambda: run(parse_cli(DataConfig, argv, "dflash-data", description)))


def run(config: DataConfig) -> None:
    """Read prompts, answer them, write the responses; goes on where an earlier run stopped."""
    use_threads(config.threads)
    output = Path(config.output)
    own = {path.resolve() for path in (output, _prompts_file(output), _record_file(output))}
    if clash := next((name for name in config.data if Path(Source(name).place).resolve() in own), None):
        raise UserError(f"data {clash} is a file that this run would write; choose another --output")
    target_config = load_config(config.target)
    tokenizer = load_chat_tokenizer(config.target, config.sampler.thinking)
    length = min(config.prompts.max_length, context_limit(target_config))
    record = {
        "target": config.target,
        "target_digest": target_digest(config.target),
        "vocab_size": int(target_config.vocab_size),
        "template_hash": template_digest(tokenizer),
        "prompts": to_mapping(config.prompts) | {"max_length": length},
        "sampler": to_mapping(config.sampler),
        "data": {name: Source(name, config.prompts.form).digest(config.prompts.split) for name in config.data},
    }
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output {output}: {output.parent} cannot be created ({error.strerror})") from error
    with _alone(output):
        begun = _begun(output, record)
        if ended := begun.get("finished"):
            print(f"{output} holds this run, finished: {ended}", file=sys.stderr)
            return
        _check(config, target_config)
        prompts = _prompts_file(output)
        if not prompts.exists():
            _choose(config, prompts)
        write_json(_record_file(output), record | begun)
        backend = _backend(config, tokenizer, target_config, length)
        try:
            answering = _answering(config, backend)
            if begun and (difference := first_difference(begun, answering)):
                raise of_another_run(output, difference)
            record |= answering
            write_json(_record_file(output), record)
            summary = _answer(config, record, tokenizer, backend, prompts, output, length)
        finally:
            backend.close()
        write_json(_record_file(output), record | {"finished": summary})
    print(f"{output}: {summary}", file=sys.stderr)


def _check(config: DataConfig, target_config: Any) -> None:
    """What would else be found wrong only once all prompts are read. Raises UserError."""
    if config.endpoint:
        find_models(config.endpoint, config.server.model, config.server.timeout)
        return
    resolve_dtype(config.dtype, resolve_device(config.device))
    if config.drafter is not None:
        check_fits(read_config(locate("drafter", config.drafter)), target_config)
    if config.runtime == "vllm":
        import_vllm()


# ---- what was asked for --------------------------------------------------------------------------------------


def _record_file(output: Path) -> Path:
    return output.with_suffix(".run.json")


def _prompts_file(output: Path) -> Path:
    return output.with_suffix(".prompts.jsonl")


def _begun(output: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Of an earlier run of the same kind: what answered, and `finished`, how it ended, if it did.

    Raises:
        UserError: it was of another kind.
    """
    path = _record_file(output)
    if not path.exists():
        if output.exists() and output.stat().st_size:
            raise UserError(f"{output} exists and {path.name} does not; choose another --output or remove it")
        _prompts_file(output).unlink(missing_ok=True)  # chosen by a run that did not get further
        return {}
    try:
        old = json.loads(path.read_text())
        begun = {key: old.pop(key) for key in ("finished", *ANSWERING) if key in old}
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: not the record of a run; choose another --output or remove it") from error
    if difference := first_difference(old, json.loads(json.dumps(record))):
        raise of_another_run(output, difference)
    if begun.get("finished") and not output.stat().st_size:
        raise UserError(f"{path} says that {output} was finished, but that is empty; remove {path.name} to begin again")
    return begun


def _answering(config: DataConfig, backend: Decoder) -> dict[str, Any]:
    """What answers: another model or runtime does not go on with its responses."""
    if isinstance(backend, EndpointBackend):
        return {"runtime": "endpoint", "model": ", ".join(sorted(set(backend.models)))}
    if config.runtime == "vllm":
        return {"runtime": "vllm"}
    return {"runtime": "engine" if isinstance(backend, EngineDecoder) else "reference"}


@contextlib.contextmanager
def _alone(output: Path) -> Iterator[None]:
    """One process writes an output at a time."""
    with locked(output):
        try:
            yield
        finally:
            if not output.stat().st_size and not _record_file(output).exists():
                output.unlink()  # nothing was begun


# ---- prompts -------------------------------------------------------------------------------------------------


def _choose(config: DataConfig, path: Path) -> None:
    """Read the sources into a file of prompts, each there once. Raises UserError."""
    options = config.prompts
    wanted = Wanted(names=config.data, options=options, seed=config.sampler.seed, shuffle=options.shuffle)
    counts = choose(wanted, path, Duplicates(options.similarity))
    print(f"{counts['prompts']} prompts; left out: {left_out(counts)}", file=sys.stderr)


# ---- responses -----------------------------------------------------------------------------------------------


def _answer(
    config: DataConfig,
    record: dict[str, Any],
    tokenizer: Any,
    backend: Decoder,
    prompts: Path,
    output: Path,
    length: int,
) -> str:
    """Answer what `output` does not hold yet; returns what came of it, in words."""
    sampler = config.sampler
    done, rows, tokens, found = resume(output)
    total = sampler.samples * sum(1 for _ in chosen(prompts))
    plan = ResponsePlan(
        tokenizer=tokenizer, params=sampler.params(), length=length, thinking=sampler.thinking, seed=sampler.seed,
        samples=sampler.samples, greedy_first=sampler.greedy_first,
    )  # fmt: skip
    tally = Tally(rows, tokens, left_out=found)
    tally.add(respond(backend, plan, prompts, output, {key: record[key] for key in SAID}, done, total))
    limit = limit_of(config.prompts.max_length, length)
    if not tally.rows:
        raise UserError(f"none of {total} responses can be trained on: {reasons(tally.dropped, limit)}")
    return tally.in_words(limit)


def _backend(config: DataConfig, tokenizer: Any, target_config: Any, length: int) -> Decoder:
    if not config.endpoint and config.runtime != "vllm":
        return open_decoder(
            config.target, runtime=config.runtime, drafter=config.drafter, device=config.device, dtype=config.dtype,
            batch=config.batch_size, context=length,
        )  # fmt: skip
    stops = declared_stop_ids(target_config, load_generation_config(config.target))
    stops = likeliest_end_first(tokenizer, stops)
    if not config.endpoint:
        most = min(length, context_limit(target_config))
        return VllmBackend(
            config.target, stops, dtype=config.dtype, batch=config.batch_size, context=most, gpus=config.gpus
        )  # fmt: skip
    return EndpointBackend(
        config.endpoint, tokenizer, stops, vocab_size=int(target_config.vocab_size), model=config.server.model,
        api=config.server.api, thinking=config.sampler.thinking, concurrency=config.batch_size,
        timeout_s=config.server.timeout, retries=config.server.retries,
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
