"""The command lines of `dflash-serve --engine`, read by the other engines' own parsers: `make test-peers`.

DFLASH_PEERS_SITE is a folder with the packages vllm 0.33 and sglang 0.5.23, and what their parsers import.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from other_engines import DFLASH, DFLASH2, SPECULATORS, TARGET, command, folder
from paths import ROOT

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]


def parsed(engine: str, *lines: list[str]) -> list[dict[str, Any]]:
    """Parses command lines with the engine's own parser."""
    site = os.environ.get("DFLASH_PEERS_SITE")
    if not site:
        pytest.skip("DFLASH_PEERS_SITE is not set: run `make test-peers`")
    words = [line[3:] if engine == "vllm" else line[2:] for line in lines]  # without the module and its command
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/peers/parse.py"), engine],
        input=json.dumps(words), env={**os.environ, "PYTHONPATH": str(ROOT / site)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("models")
    models = {"target": TARGET, "dflash": DFLASH, "dflash2": DFLASH2, "speculators": SPECULATORS}
    return {name: folder(path / name, values) for name, values in models.items()}


# option of dflash-serve -> names and values of the other engine
SHARED: list[tuple[list[str], dict[str, Any], dict[str, Any]]] = [
    (["--host", "0.0.0.0", "--port", "8123"], {"host": "0.0.0.0", "port": 8123}, {"host": "0.0.0.0", "port": 8123}),
    (["--dtype", "float16"], {"dtype": "float16"}, {"dtype": "float16"}),
    (["--dtype", "float32"], {"dtype": "float32"}, {"dtype": "float32"}),
    (["--served-model-name", "mine"], {"served_model_name": ["mine"]}, {"served_model_name": "mine"}),
    (["--max-num-seqs", "9"], {"max_num_seqs": 9}, {"max_running_requests": 9}),
    (["--max-model-len", "512"], {"max_model_len": 512}, {"context_length": 512}),
    (["--max-num-batched-tokens", "1024"], {"max_num_batched_tokens": 1024}, {"chunked_prefill_size": 1024}),
    (["--page-size", "32"], {"block_size": 32}, {"page_size": 32}),
    (["--kv-cache-dtype", "fp8"], {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}),
    (["--ssl-keyfile", "k", "--ssl-certfile", "c"], *[{"ssl_keyfile": "k", "ssl_certfile": "c"}] * 2),
    (["--root-path", "/a"], {"root_path": "/a"}, {"fastapi_root_path": "/a"}),
    (["--no-prefix-cache"], {"enable_prefix_caching": False}, {"disable_radix_cache": True}),
    (["--prefix-cache"], {"enable_prefix_caching": True}, {"disable_radix_cache": False}),
    (["--sampling-defaults", "openai"], {"generation_config": "vllm"}, {"sampling_defaults": "openai"}),
    (["--sampling-defaults", "model"], {"generation_config": "auto"}, {"sampling_defaults": "model"}),
    (["--reasoning-parser", "qwen3"], {"reasoning_parser": "qwen3"}, {"reasoning_parser": "qwen3"}),
    (["--reasoning-parser", "deepseek_r1"], {"reasoning_parser": "deepseek_r1"}, {"reasoning_parser": "deepseek-r1"}),
    (
        ["--tool-call-parser", "llama3_json"],
        {"tool_call_parser": "llama3_json", "enable_auto_tool_choice": True},
        {"tool_call_parser": "llama3"},
    ),
    *(
        (["--tool-call-parser", name], {"tool_call_parser": name}, {"tool_call_parser": name})
        for name in ("hermes", "qwen3_coder", "mistral")
    ),
    (
        ["--tensor-parallel-size", "4", "--data-parallel-size", "2"],
        {"tensor_parallel_size": 4, "data_parallel_size": 2},
        {"tp_size": 4, "dp_size": 2},
    ),
]
ALONE = {
    "vllm": [
        (["--gpu-memory-utilization", "0.8"], {"gpu_memory_utilization": 0.8}),
        (["--uds", "/tmp/s"], {"uds": "/tmp/s"}),
        (["--allowed-origins", "http://a", "http://b"], {"allowed_origins": ["http://a", "http://b"]}),
        (["--no-access-log"], {"disable_uvicorn_access_log": True}),
        (["--served-model-name", "m"], {"allowed_origins": []}),
        (["--drain-timeout", "20"], {"shutdown_timeout": 20}),
        (["--tool-call-parser", "qwen3_xml"], {"tool_call_parser": "qwen3_xml"}),
        (["--tool-call-parser", "llama4_json"], {"tool_call_parser": "llama4_json"}),
    ],
    "sglang": [(["--kv-cache-tokens", "4096"], {"max_total_tokens": 4096})],
}
# after --, on the second of two nodes
NODES = {
    "vllm": ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--headless"],
    "sglang": ["--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.1:5000"],
}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_other_engines_parsers_accept_our_flags(engine: str, folders: dict[str, str]) -> None:
    drafters = ["dflash", "dflash2", *(["speculators"] if engine == "vllm" else [])]
    pair = [["--engine", engine, "--target", folders["target"], "--drafter", folders[name]] for name in drafters]
    cases = [(option, values[engine == "sglang"]) for option, *values in SHARED] + ALONE[engine]
    lines = [*map(tuple, pair), *((*pair[0], *option) for option, _ in cases)]
    found = parsed(engine, *(command(*line) for line in lines), [*command(*pair[0]), *NODES[engine]])

    for name, options in zip(drafters, found[: len(drafters)], strict=True):
        block = 16 if name == "dflash" else 8
        if engine == "vllm":
            speculative = {"method": "dflash", "model": folders[name], "num_speculative_tokens": block - 1}
            assert options["speculative_config"] == speculative and options["model_tag"] == folders["target"]
        else:
            assert options["model_path"] == folders["target"] and options["enable_metrics"] is True
            assert options["speculative_algorithm"] == "DFLASH"
            assert options["speculative_draft_model_path"] == folders[name]
            assert options["speculative_num_draft_tokens"] == block
        assert {"DFlashDraftModel", "DFlash2DraftModel"} <= set(options["drafters"])
    for (option, expected), options in zip(cases, found[len(drafters) : -1], strict=True):
        assert {key: options[key] for key in expected} == expected, option
    assert (found[-1]["nnodes"], found[-1]["node_rank"]) == (2, 1)
