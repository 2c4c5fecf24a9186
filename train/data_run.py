"""Reads prompts, lets the target respond, and writes the responses: the work of dflash-data."""

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_toolkit.checkpoint.reader import locate
from dflash_toolkit.config import UserError, to_mapping
from dflash_toolkit.data.sources import Source
from dflash_toolkit.evaluation.measure.decoders import Decoder, EngineDecoder
from dflash_toolkit.files import locked, write_json
from dflash_toolkit.fingerprint import template_digest
from dflash_toolkit.models.dflash.checkpoint import check_fits, read_config
from dflash_toolkit.models.restrictions import restrictions
from dflash_toolkit.models.target import (
    context_limit,
    load_config,
    load_generation_config,
    resolve_device,
    resolve_dtype,
)
from dflash_toolkit.openai_http import find_models
from dflash_toolkit.preflight import ANSWER_BYTES, check_target, disk_line
from dflash_toolkit.progress import disable_library_bars
from dflash_toolkit.sampling import SamplingParams
from dflash_toolkit.stop_tokens import stop_tokens
from dflash_toolkit.threads import use_threads

from .data_cli import PROG, DataConfig
from .prompts.choosing import Wanted, choose, chosen, left_out
from .prompts.dedup import Duplicates
from .responses.backends import open_decoder
from .responses.batch_size import ON_SERVER, SIZES
from .responses.conversation import load_chat_tokenizer
from .responses.endpoint import EndpointBackend
from .responses.file import of_another_run, resume
from .responses.generate import SAID, ResponsePlan, Tally, limit_of, reasons, respond
from .responses.vllm_backend import VllmBackend, import_vllm
from .run.provenance import target_digest
from .run.resume_point import first_difference

ANSWERING = ("runtime", "model")  # keys of the record that are known once a backend is open


def run(config: DataConfig) -> None:
    """Reads prompts, lets the target respond and writes the responses; resumes a run that was stopped."""
    use_threads(config.threads)
    disable_library_bars()
    where = ", ".join(config.endpoint) or str(resolve_device(config.device))
    print(f"{PROG}: target {config.target} on {where}; responses go to {config.output}", file=sys.stderr)
    output = Path(config.output)
    own = (output, _prompts_file(output), _record_file(output))
    if clash := next((name for name in config.data if any(map(Source(name).includes, own))), None):
        raise UserError(f"data {clash} holds a file that this run would overwrite; choose another --output")
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
            print(f"{output} is complete: {ended}", file=sys.stderr)
            _next(config)
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
            summary, speed = _answer(config, record, tokenizer, backend, prompts, output, length)
        finally:
            backend.close()
        write_json(_record_file(output), record | {"speed": speed, "finished": summary})
    print(f"{output}: {summary}", file=sys.stderr)
    _next(config)


def _next(config: DataConfig) -> None:
    """Prints the command that uses the responses."""
    print(shlex.join(["dflash-train", "--target", config.target, "--responses", config.output]))


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


def _begun(output: Path, record: dict[str, Any]) -> dict[str, Any]:
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
        old.pop("speed", None)
        begun = {key: old.pop(key) for key in ("finished", *ANSWERING) if key in old}
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: not the record of a run; choose another --output or remove it") from error
    if difference := first_difference(old, json.loads(json.dumps(record))):
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


def _choose(config: DataConfig, path: Path) -> None:
    """Reads the sources into a file of distinct prompts. Raises UserError."""
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
) -> tuple[str, dict[str, Any]]:
    """Writes the responses that `output` lacks; returns a summary in words, and the speed."""
    sampler = config.sampler
    done, rows, tokens, found = resume(output)
    total = sampler.samples * sum(1 for _ in chosen(prompts))
    plan = ResponsePlan(
        tokenizer=tokenizer, params=_params(config, record["vocab_size"]), length=length, thinking=sampler.thinking,
        seed=sampler.seed,
        samples=sampler.samples, greedy_first=sampler.greedy_first,
    )  # fmt: skip
    written = (total - rows) * min(sampler.max_tokens, config.prompts.max_length) * ANSWER_BYTES
    print(disk_line({"responses": written}, output.parent, "lower prompts.max_prompts or max_tokens"), file=sys.stderr)
    tally = Tally(rows, tokens, left_out=found)
    tally.add(respond(backend, plan, prompts, output, {key: record[key] for key in SAID}, done, total))
    print(tally.speed_in_words, file=sys.stderr)
    limit = limit_of(config.prompts.max_length, length)
    if not tally.rows:
        raise UserError(f"none of {total} responses can be trained on: {reasons(tally.dropped, limit)}")
    return tally.in_words(limit), tally.speed


def _backend(config: DataConfig, tokenizer: Any, target_config: Any, length: int) -> Decoder:
    if not config.endpoint and config.runtime != "vllm":
        return open_decoder(
            config.target, runtime=config.runtime, drafter=config.drafter, device=config.device, dtype=config.dtype,
            batch=config.batch_size, context=length, tokens=config.sampler.max_tokens,
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
        api=config.server.api, thinking=config.sampler.thinking, concurrency=config.batch_size or ON_SERVER,
        timeout_s=config.server.timeout, retries=config.server.retries,
    )  # fmt: skip
