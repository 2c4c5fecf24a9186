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

from packaging.version import Version

from dflash_toolkit.checkpoint.reader import check_merged
from dflash_toolkit.config import UnsupportedModel, UserError, to_mapping
from dflash_toolkit.models.dflash.architecture import DFLASH, architectures, named
from dflash_toolkit.models.dflash.serving import (
    READ,
    SERVED,
    block_scale,
    served_elsewhere,
    sglang_options,
    vllm_options,
)
from dflash_toolkit.network import unreachable
from dflash_toolkit.threads import given_environment

from .keys import read_keys

if TYPE_CHECKING:
    from .config import ServeConfig

SPECULATORS = {each.kind: each.names[0] for each in architectures()}  # speculators_model_type -> architecture
SLIDING = "sliding layers or is_causal"  # of DFlashDraftModel; older releases silently ignore them

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
    speculation: Callable[[str, int, str], list[str]]  # flags for a drafter, its block size and a draft sample method
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
READ_HERE = {"target", "drafter", "engine", "engine_python", "threads", "api_key_file", *SPECULATION}
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
    words = command(engine, config, given, version)
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


def command(engine: Engine, config: "ServeConfig", given: Collection[str], version: str) -> list[str]:
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
    check_merged(config.target)
    target = _read("target", config.target)
    if config.drafter is None:
        if drafted:
            raise UserError(f"num_speculative_tokens is {drafted}, but there is no drafter; add --drafter")
    elif drafted != 0:
        draft = read_draft(config.drafter)
        draft.check(engine, version)
        draft.check_fits(target)
        draft.check_served(engine, version, config.target, target)
        _check_heads("drafter", draft.raw, config.external.tensor_parallel_size)
        if drafted and drafted >= draft.block_size:
            most = draft.block_size - 1
            raise UserError(f"num_speculative_tokens is {drafted}, but the drafter drafts at most {most}; lower it")
        block_size = drafted + 1 if drafted else draft.block_size
        words += engine.speculation(config.drafter, block_size, config.runtime.draft_sample_method)
    _check_heads("target", target, config.external.tensor_parallel_size)
    return words


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


# ---- the checkpoint ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draft:
    """Holds the parts of a drafter's config.json that other engines need."""

    name: str
    architecture: str
    speculators: bool  # a checkpoint of the speculators library
    block_size: int
    raw: Mapping[str, Any]  # the part with hidden_size and the like

    def check(self, engine: Engine, version: str) -> None:
        """Raises UserError unless this release supports the drafter."""
        if self.architecture not in engine.releases:
            known = ", ".join(name for name in engine.releases if name != SLIDING)
            raise UserError(
                f"drafter {self.name}: dflash-serve cannot start {engine.name} with architecture "
                f"{self.architecture!r}, only with {known}{served_elsewhere(self.architecture)}"
            )
        if self.speculators and not engine.speculators:
            raise UserError(
                f"drafter {self.name}: {engine.name} does not read the speculators format; convert it: python -c "
                f"\"from dflash_toolkit import *; save_drafter(load_drafter('{self.name}'), 'OUT')\""
            )
        drafting = named(self.architecture) or DFLASH
        if part := drafting.part_lacking(engine.name, self.raw.get("dflash_config") or {}):
            raise UserError(
                f"drafter {self.name}: it has no {part}, which {engine.name} needs for a {drafting.title} drafter; "
                f"use the built-in engine (remove --engine)"
            )
        for what in (self.architecture, *([SLIDING] if self._sliding else [])):
            if Version(version) < Version(least := engine.releases[what]):
                raise UserError(
                    f"drafter {self.name}: {engine.name} {version} does not support {what}; "
                    f"install a newer release: pip install '{engine.name}>={least}'"
                )

    @property
    def _sliding(self) -> bool:
        nested = self.raw.get("dflash_config") or {}
        causal = self.raw.get("is_causal") is True or nested.get("causal") is True
        return causal or "sliding_attention" in (self.raw.get("layer_types") or ())

    def check_served(self, engine: Engine, version: str, name: str, target: Mapping[str, Any]) -> None:
        """Raises UserError if this release serves the target without drafters, or scales embeddings differently."""
        architecture = next(iter(target.get("architectures") or ()), "none")
        if Version(version) > Version(READ[engine.name]):
            return
        others = [f"use --engine {other}" for other in SERVED.get(architecture, ()) if other != engine.name]
        if architecture in SERVED and engine.name not in SERVED[architecture]:
            raise UserError(
                f"target {name}: {engine.name} {version} passes no hidden states of {architecture} to a DFlash "
                "drafter; " + " or ".join([*others, "remove --drafter"])
            )
        if (drafting := named(self.architecture)) and engine.name in drafting.scaled_by:
            return
        fed = block_scale(engine.name, architecture, target.get("hidden_size") or 1)
        nested = self.raw.get("dflash_config") or {}
        trained = nested.get("input_embedding_scale") or self.raw.get("input_embedding_scale") or 1.0
        if not math.isclose(trained, fed, rel_tol=0.01):
            raise UserError(
                f"drafter {self.name}: its input_embedding_scale is {trained:g}, but {engine.name} {version} scales "
                f"its blocks by {fed:.4g} for {architecture}, so few drafts would be accepted; "
                + " or ".join([*others, "remove --drafter"])
            )

    def check_fits(self, target: Mapping[str, Any]) -> None:
        """Raises UserError if the drafter was trained for another target."""
        for key, target_key, what in (
            ("hidden_size", "hidden_size", "hidden size"),
            ("vocab_size", "vocab_size", "vocabulary"),
            ("num_target_layers", "num_hidden_layers", "number of target layers"),
        ):
            value, expected = self.raw.get(key), target.get(target_key)
            if None not in (value, expected) and value != expected:
                raise UserError(
                    f"the drafter's {what} is {value}, the target's {expected}; give a drafter that was trained for "
                    "this target"
                )


def read_draft(name: str) -> Draft:
    """Reads a drafter's config.json. Raises UserError if it cannot be read or its block size is invalid."""
    raw = _read("drafter", name)
    nested, kind = raw.get("dflash_config") or {}, raw.get("speculators_model_type")
    architecture = SPECULATORS.get(str(kind), str(kind)) if kind else next(iter(raw.get("architectures") or ()), "none")
    size = next((group["block_size"] for group in (nested, raw) if group.get("block_size") is not None), 16)
    if not isinstance(size, int) or size < 2:
        raise UserError(f"drafter {name}: config.json: 'block_size' is {size!r}; expected a whole number above 1")
    return Draft(name, architecture, bool(kind), size, raw.get("transformer_layer_config") or raw)


def _read(what: str, name: str) -> dict[str, Any]:
    """Reads config.json from a directory or the hub; returns the text part of a multimodal target's."""
    from huggingface_hub import hf_hub_download

    try:
        here = os.path.isdir(name)
        if not here and name.count("/") != 1:
            raise UserError(f"{what} {name}: no such directory; give a directory or an id of the hub (OWNER/NAME)")
        path = os.path.join(name, "config.json") if here else hf_hub_download(name, "config.json")
        found = json.loads(Path(path).read_bytes())
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        if unreachable(error):
            line = f"{what} {name}: no such directory, and the hub cannot be reached; give the directory of a {what}"
            raise UserError(line) from error
        raise UserError(f"{what} {name}: cannot read its config.json ({' '.join(str(error).split())})") from error
    text = found.get("text_config")
    return text | {"architectures": found.get("architectures")} if text else found


def _check_heads(what: str, raw: Mapping[str, Any], gpus: int) -> None:
    """Raises UserError if the number of GPUs does not divide the attention heads."""
    heads = raw.get("num_attention_heads")
    if isinstance(heads, int) and heads % gpus:
        message = f"tensor_parallel_size is {gpus}, which does not divide the {what}'s {heads} attention heads"
        raise UserError(f"{message}; give a divisor")
