"""Reads prompts, lets the target respond, and writes the responses: the work of dflash-data."""

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_toolkit.checkpoint.reader import locate
from dflash_toolkit.config import UserError, to_mapping
from dflash_toolkit.data.sources import Source
from dflash_toolkit.evaluation.measure.decoders import Decoder, EngineDecoder
from dflash_toolkit.files import locked, write_json
from dflash_toolkit.fingerprint import template_digest
from dflash_toolkit.models.device import resolve_device, resolve_dtype
from dflash_toolkit.models.dflash.checkpoint import check_fits, read_config
from dflash_toolkit.models.restrictions import restrictions
from dflash_toolkit.models.spec import context_limit
from dflash_toolkit.models.target_files import load_config, load_generation_config, warn_of_penalty
from dflash_toolkit.openai_http import find_models
from dflash_toolkit.options import PromptOptions
from dflash_toolkit.preflight import ANSWER_BYTES, check_target, disk_line
from dflash_toolkit.progress import disable_library_bars
from dflash_toolkit.sampling import SamplingParams
from dflash_toolkit.stop_tokens import stop_tokens
from dflash_toolkit.threads import use_threads

from .data_cli import PROG, DataConfig
from .data_options import count_in
from .distributed.parallel import Processes
from .prompts.choosing import Wanted, choose, chosen, say
from .prompts.own import OwnPrompts, own_file, with_own_file, write_own
from .responses.backends import open_decoder
from .responses.batch_size import ON_SERVER, SIZES
from .responses.conversation import load_chat_tokenizer
from .responses.endpoint import EndpointBackend
from .responses.file import of_another_run, resume
from .responses.generate import SAID, ResponsePlan, Tally, limit_of, reasons, respond
from .responses.shares import join_shares, share_file, share_files
from .responses.vllm_backend import VllmBackend, import_vllm
from .run.provenance import target_digest
from .run.settings import first_difference

ANSWERING = ("runtime", "model")  # keys of the record that are known once a backend is open


def run(config: DataConfig) -> None:
    """Reads prompts, lets the target respond and writes the responses; resumes a run that was stopped.

    Several processes (torchrun, --gpus) share the prompts. Each appends to a file of its own, and the first one joins
    the files, sorted by prompt, sample and part.
    """
    use_threads(config.threads)
    disable_library_bars()
    with Processes.started(config.device) as processes, contextlib.ExitStack() as held:
        where = ", ".join(config.endpoint) or str(resolve_device(processes.device))
        where += f", {processes.world} processes" if processes.world > 1 else ""
        if processes.main:
            print(f"{PROG}: target {config.target} on {where}; responses go to {config.output}", file=sys.stderr)
            warn_of_penalty(config.target)
        config = replace(config, device=processes.device)
        target_config = processes.barrier(load_config, config.target)
        tokenizer = processes.barrier(load_chat_tokenizer, config.target, config.sampler.thinking, config.rendering)
        begun = processes.broadcast(processes.rank_zero(_begin, config, target_config, tokenizer, held))
        if begun is not None:
            _respond(config, *begun, tokenizer, target_config, processes)
        if processes.main:
            words = ["dflash-train", "--target", config.target, "--responses", config.output, *config.rendering_words]
            if config.prompts.similarity != PromptOptions().similarity:  # else prompts that were kept are dropped there
                words.append(f"prompts.similarity={config.prompts.similarity:g}")
            print(shlex.join(words))


def _begin(
    config: DataConfig, target_config: Any, tokenizer: Any, held: contextlib.ExitStack
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Locks the output and chooses the prompts.

    Returns:
        the record, and the backend of an earlier run with these options; None if that run has finished.

    Raises:
        UserError: as `run`.
    """
    output = Path(config.output)
    own = (output, _prompts_file(output), _record_file(output), own_file(output))
    if clash := next((name for name in config.data if any(map(Source(name).includes, own))), None):
        raise UserError(f"data {clash} holds a file that this run would overwrite; choose another --output")
    length = _length(config, target_config)
    digest, template = target_digest(config.target), template_digest(tokenizer)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output {output}: {output.parent} cannot be created ({error.strerror})") from error
    held.enter_context(_alone(output))
    names = with_own_file(config.sources, own_file(output))
    if count := count_in(config.sources):
        _check(config, target_config)
        plan = OwnPrompts(
            target=config.target, digest=digest, template=template, tokenizer=tokenizer, count=count,
            seed=config.sampler.seed, similarity=config.prompts.similarity, max_length=length, options=config.synthesis,
        )  # fmt: skip
        write_own(plan, own_file(output), lambda: _backend(config, tokenizer, target_config, length))
    record = {
        "target": config.target,
        "target_digest": digest,
        "vocab_size": int(target_config.vocab_size),
        "template_hash": template,
        "prompts": to_mapping(config.prompts) | {"max_length": length},
        "sampler": to_mapping(config.sampler),
        "data": {name: Source(name, config.prompts.form).digest(config.prompts.split) for name in names},
    }
    defaults = {key: to_mapping(type(getattr(config, key))()) for key in ("prompts", "sampler")}
    begun = _begun(output, record, defaults)
    if ended := begun.get("finished"):
        print(f"{output} is complete: {ended}", file=sys.stderr)
        return None
    _check(config, target_config)
    if not _prompts_file(output).exists():
        _choose(config, names, _prompts_file(output))
    write_json(_record_file(output), record | begun)
    return record, begun


def _length(config: DataConfig, target_config: Any) -> int:
    """Returns the most tokens of prompt and response together."""
    return min(config.prompts.max_length, context_limit(target_config))


def _check(config: DataConfig, target_config: Any) -> None:
    """Raises UserError for mistakes that would otherwise show only after all prompts are read."""
    _params(config, int(target_config.vocab_size))
    if config.endpoint:
        find_models(config.endpoint, config.server.model, config.server.timeout)
        return
    resolve_dtype(config.dtype, resolve_device(config.device))
    drafter = read_config(locate("drafter", config.drafter)) if config.drafter is not None else None
    if config.runtime == "vllm":
        if drafter is not None:
            check_fits(drafter, target_config)
        import_vllm()
    else:
        check_target(config.target, config.runtime, drafter)


def _params(config: DataConfig, vocabulary: int) -> SamplingParams:
    """Returns the sampling parameters of requests. Raises UserError, see `Restrictions.for_server`."""
    params = config.sampler.params()
    if config.endpoint or config.runtime == "vllm":  # these do not read the target's restrictions themselves
        found = restrictions(config.target, load_generation_config(config.target), vocabulary)
        params = found.for_server(config.target, params)
    return params


# ---- record of the run ---------------------------------------------------------------------------------------


def _record_file(output: Path) -> Path:
    return output.with_suffix(".run.json")


def _prompts_file(output: Path) -> Path:
    return output.with_suffix(".prompts.jsonl")


def _begun(output: Path, record: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Returns the backend of an earlier run with these options, and `finished`, its summary, if it completed.

    Raises:
        UserError: the earlier run had other options.
    """
    path = _record_file(output)
    if not path.exists():
        if output.exists() and output.stat().st_size:
            raise UserError(f"{output} exists and {path.name} does not; choose another --output or remove it")
        _prompts_file(output).unlink(missing_ok=True)  # left by a run that stopped while choosing prompts
        return {}
    try:
        old = json.loads(path.read_text())
        for key in ("speed", "cut"):
            old.pop(key, None)
        begun = {key: old.pop(key) for key in ("finished", *ANSWERING) if key in old}
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: not the record of a run; choose another --output or remove it") from error
    if difference := first_difference(old, json.loads(json.dumps(record)), defaults):
        raise of_another_run(output, difference)
    if begun.get("finished") and not output.stat().st_size:
        raise UserError(f"{path} records {output} as finished, but that is empty; remove {path.name} to begin again")
    return begun


def _answering(config: DataConfig, backend: Decoder) -> dict[str, Any]:
    """Returns the backend's runtime and model; another one may not continue its responses."""
    if isinstance(backend, EndpointBackend):
        return {"runtime": "endpoint", "model": ", ".join(sorted(set(backend.models)))}
    if config.runtime == "vllm":
        return {"runtime": "vllm"}
    return {"runtime": "engine" if isinstance(backend, EngineDecoder) else "reference"}


@contextlib.contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Locks the output for one process at a time."""
    with locked(output):
        try:
            yield
        finally:
            if not output.stat().st_size and not _record_file(output).exists():
                output.unlink()  # the run wrote nothing


# ---- prompts -------------------------------------------------------------------------------------------------


def _choose(config: DataConfig, names: tuple[str, ...], path: Path) -> None:
    """Reads the sources into a file of distinct prompts. Raises UserError."""
    options = config.prompts
    wanted = Wanted(names=names, options=options, seed=config.sampler.seed, shuffle=options.shuffle)
    say(choose(wanted, path))


# ---- responses -----------------------------------------------------------------------------------------------


def _respond(
    config: DataConfig,
    record: dict[str, Any],
    begun: dict[str, Any],
    tokenizer: Any,
    target_config: Any,
    processes: Processes,
) -> None:
    """Writes the responses that are missing, the share of each process, and completes the record."""
    output, sampler, length = Path(config.output), config.sampler, _length(config, target_config)
    found = processes.broadcast(processes.rank_zero(_found, output))
    assert found is not None
    done, tally = found
    total = sampler.samples * sum(1 for _ in chosen(_prompts_file(output)))
    plan = ResponsePlan(
        tokenizer=tokenizer, params=_params(config, record["vocab_size"]), length=length, thinking=sampler.thinking,
        seed=sampler.seed, samples=sampler.samples, greedy_first=sampler.greedy_first,
        vocab_size=record["vocab_size"], strict=config.prompts.strict,
    )  # fmt: skip
    written = (total - tally.rows) * min(sampler.max_tokens, config.prompts.max_length) * ANSWER_BYTES
    if processes.main:
        way_out = "lower prompts.max_prompts or max_tokens"
        print(disk_line({"responses": written}, output.parent, way_out), file=sys.stderr)
    backend = processes.barrier(_backend, config, tokenizer, target_config, length)
    try:
        answering = _answering(config, backend)
        if begun and (difference := first_difference(begun, answering)):
            raise processes.mistake(str(of_another_run(output, difference)))
        record |= answering
        processes.rank_zero(write_json, _record_file(output), record)
        common = {key: record[key] for key in SAID}
        own = share_file(output, processes.rank)
        given = backend, plan, _prompts_file(output), own, common, done, total, processes.rank, processes.world
        tallies = processes.all_gather(processes.barrier(respond, *given))
    finally:
        backend.close()
    for each in tallies:
        tally.add(each)
    processes.rank_zero(_end, config, record, tally, total, limit_of(config.prompts.max_length, length))


def _found(output: Path) -> tuple[set[tuple[int, int]], Tally]:
    """Returns the responses that are there, as (index, sample), and their counts."""
    done, tally = set[tuple[int, int]](), Tally()
    for file in share_files(output):
        complete, rows, tokens, left_out, cut = resume(file)
        done |= complete
        tally.add(Tally(rows, tokens, left_out=left_out, cut=cut))
    return done, tally


def _end(config: DataConfig, record: dict[str, Any], tally: Tally, total: int, limit: str) -> None:
    """Joins the files of all processes and completes the record."""
    output = Path(config.output)
    print(tally.speed_in_words, file=sys.stderr)
    if not tally.rows:
        raise UserError(f"none of {total} responses can be trained on: {reasons(tally.dropped, limit, tally.first)}")
    join_shares(output)
    summary = tally.in_words(limit)
    write_json(_record_file(output), record | {"speed": tally.speed, "cut": tally.cut, "finished": summary})
    if warning := tally.warning("--max-tokens"):
        print(warning, file=sys.stderr)
    print(f"{output}: {summary}", file=sys.stderr)


def _backend(config: DataConfig, tokenizer: Any, target_config: Any, length: int) -> Decoder:
    if not config.endpoint and config.runtime != "vllm":
        return open_decoder(
            config.target, runtime=config.runtime, drafter=config.drafter, device=config.device, dtype=config.dtype,
            batch=config.batch_size, context=length, tokens=config.sampler.max_tokens, tokenizer=tokenizer,
        )  # fmt: skip
    stops = stop_tokens(target_config, load_generation_config(config.target), tokenizer)
    if not config.endpoint:
        most = min(length, context_limit(target_config))
        batch = config.batch_size or SIZES[0]
        return VllmBackend(
            config.target, stops, dtype=config.dtype, batch=batch, context=most, gpus=config.gpus
        )  # fmt: skip
    return EndpointBackend(
        config.endpoint, tokenizer, stops, vocab_size=int(target_config.vocab_size), model=config.server.model,
        api="completions" if config.prompt_format == "text" else config.server.api,
        thinking=config.sampler.thinking, concurrency=config.batch_size or ON_SERVER,
        timeout_s=config.server.timeout, retries=config.server.retries,
    )  # fmt: skip
