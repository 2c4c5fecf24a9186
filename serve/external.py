"""Starts vLLM or SGLang with the flags that a target and its drafter need.

This process first checks the package and its release, the drafter, whether it fits the target, and options that the
other engine lacks. Then it executes the other engine in its place, so logs, signals and the exit code are that engine's
own, a supervisor sees one process, and no memory stays in use.
"""

import contextlib
import importlib.metadata
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dflash_toolkit.checkpoint.reader import check_merged
from dflash_toolkit.config import UnsupportedModel, UserError, to_mapping
from dflash_toolkit.models.dflash.architecture import architectures
from dflash_toolkit.models.dflash.serving import sglang_options, verifies_adaptively, vllm_options
from dflash_toolkit.threads import given_environment

from .external_models import SLIDING, check_heads, read_config, read_draft
from .keys import read_keys

if TYPE_CHECKING:
    from .config import ServeConfig


Flags = Callable[[Any], list[str]]


def _flag(name: str) -> Flags:
    return lambda value: [name, str(value)]


def _unless(given: Any, *words: str) -> Flags:
    return lambda value: [] if value == given else list(words)


def _named(flag: str, names: Mapping[str, str], *also: str) -> Flags:
    """Translates the name of a parser, and adds the flags `also`."""

    def words(value: Any) -> list[str]:
        if value == "none":
            return []
        if value not in names:
            raise UserError(f"{flag} {value} exists only in the built-in engine; choose from {', '.join(names)}")
        return [*also, flag, names[value]]

    return words


def _one(flag: str) -> Flags:
    """Passes a list that may have one element."""

    def words(values: Any) -> list[str]:
        if len(values) > 1:
            raise UserError(f"{flag} {' '.join(values)}: the other engine accepts only one value; give one")
        return [flag, *values]

    return words


@dataclass(frozen=True)
class Engine:
    """Describes how to start another engine."""

    name: str  # also of its package
    module: tuple[str, ...]  # arguments of `python -m`; the target follows
    always: tuple[str, ...]
    # flags for a drafter, its block size, a draft sample method, and whether it verifies adaptively
    speculation: Callable[[str, int, str, bool], list[str]]
    releases: Mapping[str, str]  # architecture of a drafter -> first release that supports it
    speculators: bool  # reads checkpoints of the speculators library
    flags: Mapping[str, Flags]  # option of dflash-serve -> flags of the engine


def _releases(engine: str) -> dict[str, str]:
    return {each.names[0]: each.releases[engine] for each in architectures() if engine in each.releases}


COMMON = {
    "host": _flag("--host"),
    "port": _flag("--port"),
    "dtype": _flag("--dtype"),
    "served_model_name": lambda value: ["--served-model-name", *value],
    "chat_template": _flag("--chat-template"),
    "tensor_parallel_size": _flag("--tensor-parallel-size"),
    "data_parallel_size": _flag("--data-parallel-size"),
    "ssl_keyfile": _flag("--ssl-keyfile"),
    "ssl_certfile": _flag("--ssl-certfile"),
}
VLLM_TOOLS = {name: name for name in ("hermes", "qwen3_coder", "qwen3_xml", "llama3_json", "llama4_json", "mistral")}
SGLANG_TOOLS = {"hermes": "hermes", "qwen3_coder": "qwen3_coder", "llama3_json": "llama3", "mistral": "mistral"}
VLLM = Engine(
    name="vllm",
    module=("vllm.entrypoints.cli.main", "serve"),
    always=(),
    speculation=vllm_options,
    releases=_releases("vllm") | {SLIDING: "0.28.0"},
    speculators=True,
    flags=COMMON
    | {
        "max_num_seqs": _flag("--max-num-seqs"),
        "max_model_len": _flag("--max-model-len"),
        "max_num_batched_tokens": _flag("--max-num-batched-tokens"),
        "gpu_memory_utilization": _flag("--gpu-memory-utilization"),
        "page_size": _flag("--block-size"),
        "kv_cache_dtype": _flag("--kv-cache-dtype"),
        "prefix_cache": lambda value: [f"--{'' if value else 'no-'}enable-prefix-caching"],
        "sampling_defaults": lambda value: ["--generation-config", "auto" if value == "model" else "vllm"],
        "tool_call_parser": _named("--tool-call-parser", VLLM_TOOLS, "--enable-auto-tool-choice"),
        "reasoning_parser": _named("--reasoning-parser", {"qwen3": "qwen3", "deepseek_r1": "deepseek_r1"}),
        "drain_timeout": lambda value: ["--shutdown-timeout", str(math.ceil(value))],
        "uds": _flag("--uds"),
        "api_server_count": _flag("--api-server-count"),
        "per_request_spec_decode_metrics": _flag("--per-request-spec-decode-metrics"),
        "scheduling_policy": lambda value: ["--scheduling-policy", "fcfs" if value == "fair" else value],
        "root_path": _flag("--root-path"),
        "allowed_origins": lambda value: ["--allowed-origins", json.dumps(value)],
        "access_log": _unless(True, "--disable-uvicorn-access-log"),
    },
)
SGLANG = Engine(
    name="sglang",
    module=("sglang.launch_server", "--model-path"),
    always=("--enable-metrics",),  # off by default in SGLang
    speculation=sglang_options,
    releases=_releases("sglang") | {SLIDING: "0.5.18"},
    speculators=False,
    flags=COMMON
    | {
        "max_num_seqs": _flag("--max-running-requests"),
        "max_model_len": _flag("--context-length"),
        "max_num_batched_tokens": _flag("--chunked-prefill-size"),
        "kv_cache_tokens": _flag("--max-total-tokens"),
        "page_size": _flag("--page-size"),
        "kv_cache_dtype": lambda value: ["--kv-cache-dtype", "fp8_e4m3" if value == "fp8" else value],
        "prefix_cache": _unless(True, "--disable-radix-cache"),
        "sampling_defaults": _flag("--sampling-defaults"),
        "root_path": _flag("--fastapi-root-path"),
        "served_model_name": _one("--served-model-name"),
        "api_server_count": _flag("--tokenizer-worker-num"),
        "tool_call_parser": _named("--tool-call-parser", SGLANG_TOOLS),
        "reasoning_parser": _named("--reasoning-parser", {"qwen3": "qwen3", "deepseek_r1": "deepseek-r1"}),
    },
)
BY_NAME = {engine.name: engine for engine in (VLLM, SGLANG)}
# options that are read here and have no flag of their own
SPECULATION = {"num_speculative_tokens", "draft_sample_method"}  # passed by `Engine.speculation`
READ_HERE = {"target", "drafter", "engine", "engine_python", "threads", "api_key_file", "from_report", *SPECULATION}
READ_HERE |= {"adaptive_verification"}
LEAST_ADAPTIVE = 32  # requests at a time; with fewer, verifying all drafts is faster
# options of vLLM with which it refuses adaptive verification
NOT_ADAPTIVE = {"--enforce-eager", "--enable-lora", "--pipeline-parallel-size", "-pp", "--enable-return-routed-experts"}
# always passed, because the engines' defaults differ
ALWAYS = {"host", "port", "tensor_parallel_size", "data_parallel_size", "allowed_origins"}
# values that need no flag
NOTHING = {"device": ("auto", "cuda"), "draft_dtype": ("auto", "full"), "draft_tree": (None, 0)}


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line at its first `--` into dflash-serve's and the other engine's arguments."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


# ---- suggestions if the built-in engine cannot serve ---------------------------------------------------------------


def vllm_command(config: "ServeConfig", given: Collection[str], gpus: int = 1) -> str:
    """Returns the command that serves the same with vLLM, without API keys."""
    words = ["dflash-serve", "--engine", VLLM.name]
    shown = {"target", "drafter", *SPECULATION, *VLLM.flags} - {"tensor_parallel_size"}
    for key, value in _values(config, given).items():
        name = key.replace("_", "-")
        if key in shown and value is not None:
            if isinstance(value, bool):
                words += [f"--{'' if value else 'no-'}{name}"]
            else:
                words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    gpus = max(gpus, config.external.tensor_parallel_size)
    return shlex.join([*words, *(["--tensor-parallel-size", str(gpus)] if gpus > 1 else [])])


@contextlib.contextmanager
def suggest_vllm(config: "ServeConfig", given: Collection[str]) -> Iterator[None]:
    """Adds the command for vLLM to the error if the built-in engine does not support the target."""
    try:
        yield
    except UnsupportedModel as error:
        raise UserError(f"{error}; to serve it with vLLM: {vllm_command(config, given, error.gpus)}") from error


def check_built_in(config: "ServeConfig", given: Collection[str], passed: Sequence[str]) -> None:
    """Raises UserError for options that only other engines have."""
    external = config.external
    for name, count in (
        ("tensor_parallel_size", external.tensor_parallel_size),
        ("data_parallel_size", external.data_parallel_size),
    ):
        if count > 1:
            command = vllm_command(config, given)
            raise UserError(f"{name} is {count}, but the built-in engine uses one GPU; use vLLM: {command}")
    if external.adaptive_verification is not None:
        raise UserError(
            "adaptive_verification is an option of vllm; remove it: the built-in engine chooses draft lengths itself"
        )
    if python := external.engine_python:
        raise UserError(f"engine_python is {python}, but no other engine is chosen; add --engine vllm or sglang")
    if passed:
        raise UserError(f"{passed[0]!r} after -- is an option of another engine; add --engine vllm or sglang")


# ---- the command -------------------------------------------------------------------------------------------------


def start(config: "ServeConfig", given: Collection[str], passed: Sequence[str]) -> NoReturn:
    """Replaces this process by the other engine's server.

    Args:
        given: keys of the options that the user gave.
        passed: the other engine's own options.

    Raises:
        UserError: the package is missing or too old, it does not support the drafter, the drafter is for another
            target, or the engine lacks an option.
    """
    engine = BY_NAME[config.external.engine]
    python = _python(config.external.engine_python)
    version = installed(python, engine.name)
    words = command(engine, config, given, version, passed)
    environment = given_environment() | _variables(engine, config)
    # the engine's compilers are next to its Python; its environment need not be activated
    environment["PATH"] = os.pathsep.join([str(Path(python).parent), environment.get("PATH", os.defpath)])
    rest = " ..." if passed else ""
    print(f"dflash-serve: {engine.name} {version}: {shlex.join([python, *words])}{rest}", flush=True)
    sys.stderr.flush()
    os.execve(python, [python, *words, *passed], environment)


def _python(name: str | None) -> str:
    found = sys.executable if name is None else shutil.which(name)
    if not found:
        raise UserError(f"engine_python is {name}, which does not exist; give the path of a Python")
    return str(Path(found).absolute())  # not resolved: Python finds its environment by the link


def installed(python: str, package: str) -> str:
    """Returns the release of a package in a Python environment. Raises UserError if it is missing."""
    version: str | None
    if python == sys.executable:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
        version = None
    else:
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        try:
            done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"engine_python is {python}, which does not run ({error}); give another Python") from error
        version = done.stdout.strip() if done.returncode == 0 else None
    if version:
        return version
    least = BY_NAME[package].releases["DFlashDraftModel"]
    raise UserError(
        f"{package} is not installed for {python}; install it with: pip install '{package}>={least}' (in its own "
        f"environment, because it pins torch; then give --engine-python ENVIRONMENT/bin/python)"
    )


def command(
    engine: Engine, config: "ServeConfig", given: Collection[str], version: str, passed: Sequence[str] = ()
) -> list[str]:
    """Returns the arguments of the other engine's Python. Raises UserError, see `start`."""
    if config.port == 0:
        raise UserError(f"port is 0, but {engine.name} does not report the port that it takes; give a number")
    words = ["-m", *engine.module, config.target]
    values = _values(config, {*given} | ALWAYS & engine.flags.keys())
    for key, value in values.items():
        if key in READ_HERE or value is None or value in NOTHING.get(key, ()):
            continue
        if key not in engine.flags:
            raise UserError(
                f"{key} is an option of the built-in engine; remove it, and give {engine.name}'s own options after --"
            )
        words += engine.flags[key](value)
    words += engine.always
    drafted = config.runtime.num_speculative_tokens
    if config.external.adaptive_verification and engine is not VLLM:
        raise UserError(f"adaptive_verification is on, but {engine.name} has none; remove it, or use --engine vllm")
    check_merged(config.target)
    target = read_config("target", config.target)
    if config.drafter is None:
        if drafted:
            raise UserError(f"num_speculative_tokens is {drafted}, but there is no drafter; add --drafter")
    elif drafted != 0:
        draft = read_draft(config.drafter)
        draft.check(engine, version)
        draft.check_fits(target)
        draft.check_served(engine, version, config.target, target)
        check_heads("drafter", draft.raw, config.external.tensor_parallel_size)
        if drafted and drafted >= draft.block_size:
            most = draft.block_size - 1
            raise UserError(f"num_speculative_tokens is {drafted}, but the drafter drafts at most {most}; lower it")
        block_size = drafted + 1 if drafted else draft.block_size
        adaptive = _is_adaptive(engine, config, version, target, passed)
        words += engine.speculation(config.drafter, block_size, config.runtime.draft_sample_method, adaptive)
    check_heads("target", target, config.external.tensor_parallel_size)
    return words


def _is_adaptive(
    engine: Engine, config: "ServeConfig", version: str, target: Mapping[str, Any], passed: Sequence[str]
) -> bool:
    """Whether drafts are verified adaptively: as given, else where vLLM can and it is likely to pay."""
    if config.external.adaptive_verification is not None:
        return config.external.adaptive_verification
    few = config.runtime.max_num_seqs is not None and config.runtime.max_num_seqs < LEAST_ADAPTIVE
    if engine is not VLLM or few or NOT_ADAPTIVE & {word.partition("=")[0].replace("_", "-") for word in passed}:
        return False
    return verifies_adaptively(version, next(iter(target.get("architectures") or ()), ""), _capabilities())


def _capabilities() -> set[str]:
    """Returns the compute capabilities of all GPUs; empty if they cannot be found out."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        return set(subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.split())
    except (OSError, subprocess.SubprocessError):
        return set()


def _values(config: "ServeConfig", given: Collection[str]) -> dict[str, Any]:
    """Returns the given options in the order of their declaration."""
    return {key: value for key, value in to_mapping(config).items() if key in given}


def _variables(engine: Engine, config: "ServeConfig") -> dict[str, str]:
    """Returns the environment variables that the other engine needs."""
    found: dict[str, str] = {}
    if config.threads is not None:
        found["OMP_NUM_THREADS"] = str(config.threads)
    if keys := read_keys(config.api_key_file):
        if engine is SGLANG:  # accepts it only on the command line, and its log shows all options
            raise UserError("sglang would show the API key in its log and to ps; remove it and use a proxy")
        if len(keys) > 1:
            raise UserError(f"{len(keys)} API keys are given, but vllm accepts one; give one")
        found["VLLM_API_KEY"] = keys[0]
    return found
