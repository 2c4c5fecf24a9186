"""Command line of dflash-serve."""

import contextlib
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from dflash_toolkit.checkpoint.readahead import read_ahead
from dflash_toolkit.command_line import given_values, run_command
from dflash_toolkit.config import UserError, from_mapping
from dflash_toolkit.models.published import named_for

from .config import OWN, ServeConfig
from .external import check_built_in, split, start, suggest_vllm
from .vllm_flags import translate_vllm_flags

PROG = "dflash-serve"
DESCRIPTION = """\
Serves a target over OpenAI's API. A drafter makes decoding faster and does not change the output; without a drafter
the server decodes plainly. Requests are batched continuously: every step can add and remove some."""
EXAMPLE = "dflash-serve --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 --max-model-len 16384"
MAX_FOLDER = 96  # bytes; a socket's path has at most 107
EXTRA = ("fastapi", "pydantic", "uvicorn", "prometheus_client", "httptools")  # from the extra `serve`


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return run_command(lambda: _dispatch(sys.argv[1:] if argv is None else argv))


def _dispatch(argv: Sequence[str]) -> int:
    if any(re.match(r"(--api-key|api_key)(=|$)", word) for word in argv):
        raise UserError(
            "--api-key shows the key in the list of processes; put it into a file (--api-key-file) or into the "
            "environment ($DFLASH_API_KEY)"
        )
    own, passed = split(argv)
    if not any(re.match(r"(--)?engine(=|$)", word) for word in own):
        own = translate_vllm_flags(own)
    given, source = given_values(ServeConfig, own, PROG, DESCRIPTION, EXAMPLE)
    if isinstance(name := given.get("served_model_name"), str):  # a file may give a string instead of a list
        given["served_model_name"] = [name]
    config = from_mapping(ServeConfig, given, source)
    if config.from_report is not None:
        config, given = _with_report(config.from_report, config, given, source)
    if config.drafter is None and (names := named_for(config.target)):
        text = f"no drafter is given, so it decodes plainly; published for {config.target}: {names} (--drafter)"
        notice(text, config)
    if config.external.engine != OWN:
        start(config, given, passed)
    check_built_in(config, given, passed)
    with suggest_vllm(config, given):
        return _run(config)


def _with_report(
    path: str, config: ServeConfig, given: dict[str, Any], source: str
) -> tuple[ServeConfig, dict[str, Any]]:
    """Adds the options that a report recommends, and says which."""
    from .report_options import other_target, recommended

    if other := other_target(path, config.target):
        notice(f"warning: {path} was measured with target {other}, not {config.target}", config)
    found = recommended(path, config, given)
    taken = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in found.items())
    notice(f"from {path}: {taken or 'nothing, all of its options are given'}", config)
    given = {**given, **found}
    return from_mapping(ServeConfig, given, source), given


def _run(config: ServeConfig) -> int:
    _require_extra()
    from .access import set_up_logs
    from .keys import read_admin_keys, read_keys
    from .processes import EngineProcess, Fronts
    from .server import bind, bind_path, check_certificate, url_of
    from .signals import Signals

    keys = read_keys(config.api_key_file)
    read_admin_keys(config.admin_key_file)  # reports an error before anything is loaded
    if config.prefix_cache_per_key and not keys:
        raise UserError("prefix_cache_per_key needs API keys; give --api-key-file, or set $DFLASH_API_KEY")
    if config.ssl_certfile is not None and config.ssl_keyfile is not None:
        check_certificate(config.ssl_certfile, config.ssl_keyfile)
    read_ahead(config.drafter, config.target)  # into the page cache, for the engine's process
    set_up_logs(config.log_json, config.access_log)
    config = replace(config, api_server_count=config.front_ends)  # all processes must use the same number
    with contextlib.ExitStack() as files, Signals(files.close) as signals, contextlib.ExitStack() as stack:
        bound = bind(config.host, config.port, config.front_ends > 1) if config.uds is None else bind_path(config.uds)
        files.enter_context(bound)
        if config.uds is not None:
            files.callback(Path(config.uds).unlink, missing_ok=True)
        folder = Path(files.enter_context(_socket_folder()))
        pair = f"target {config.target}" + (f", drafter {config.drafter}" if config.drafter else "")
        pair += ", and trains its drafter" * config.adaptation.adapt
        where = f"on {config.device}" if config.device != "auto" else "on the GPU, if there is one"
        address = url_of(bound, https=config.ssl_certfile is not None)
        notice(f"loads {pair} {where}; will listen on {address}", config)
        process = stack.enter_context(contextlib.closing(EngineProcess(config, folder, signals)))
        process.start()
        fronts = stack.enter_context(contextlib.closing(Fronts(config, keys, bound, process.path, signals)))
        # imports torch and transformers, which takes seconds, while the engine's process does the same
        from .front import Front

        front = Front(config, keys)
        info = process.ready()
        process.watch(config.restart)
        drafting = f"drafter {config.drafter}" if config.drafter else "no drafter"
        line = f"{PROG}: {address}/v1 serves {config.models[0]} ({drafting}, {info.place})"
        server = front.server(process.path, info, 0, ready=lambda: say(line), drain=fronts.drain)
        fronts.ready(info, server)
        signals.serve(server)
        server.run(sockets=[bound])
        fronts.close()
        return 1 if fronts.failed else 0


def _socket_folder() -> tempfile.TemporaryDirectory[str]:
    """Creates a directory, mode 0700, for the sockets between processes. Raises UserError."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="dflash-")
    except OSError as error:
        raise UserError(f"no directory for temporary files is writable ({error}); set TMPDIR to one") from error
    if len(os.fsencode(folder.name)) > MAX_FOLDER:
        folder.cleanup()
        raise UserError(f"TMPDIR is {Path(folder.name).parent}, too long for the path of a socket; set a shorter one")
    return folder


def say(line: str, file: TextIO | None = None) -> None:
    """Prints a line; if the file (stdout) cannot be written (a full disk, a closed pipe), redirects it to /dev/null."""
    file = file or sys.stdout
    try:
        print(line, file=file, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def notice(text: str, config: ServeConfig) -> None:
    """Prints a notice to stderr, with --log-json as JSON."""
    message = {"level": "info", "logger": PROG, "message": text}
    say(json.dumps(message, ensure_ascii=False) if config.log_json else f"{PROG}: {text}", sys.stderr)


def _require_extra() -> None:
    """Raises UserError if a package of the extra `serve` is missing."""
    for package in EXTRA:
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{package} is not installed; install it with: pip install 'dflash-toolkit[serve]'")


if __name__ == "__main__":
    raise SystemExit(main())
