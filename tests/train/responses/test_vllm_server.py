"""vLLM's own server, started by dflash-serve: it loads the drafter, and dflash-data asks it."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
import pytest
import torch
from conftest import EOS, MASK, PAD, VOCAB, make_tokenizer
from paths import ROOT
from programs import Program, assistant, user, write
from servers import stand_in
from transformers import AutoModelForCausalLM, Qwen3Config

from dflash_toolkit import Drafter, DrafterConfig, save_drafter

START_S = 240
BLOCK = 8
SMALL = {  # heads as FlashAttention takes them
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random target that writes printable characters alone, which are tokenised as they were written; a drafter."""
    torch.manual_seed(0)
    config = Qwen3Config(
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD, initializer_range=0.1, **SMALL,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        head = model.lm_head.weight
        head[94:EOS], head[EOS + 1 :], head[EOS] = 0, 0, 1.5 * head[EOS]
    target, drafter = (tmp_path_factory.mktemp(name) for name in ("target", "drafter"))
    model.bfloat16().save_pretrained(target)
    make_tokenizer().save_pretrained(target)
    module = Drafter(
        DrafterConfig(
            **SMALL, num_layers=2, num_heads=4, num_kv_heads=2, num_target_layers=4, target_layer_ids=(0, 2),
            mask_token_id=MASK, block_size=BLOCK, rope_theta=1e4,
        )
    )  # fmt: skip
    module.init_weights(torch.Generator().manual_seed(5))
    save_drafter(module.bfloat16(), drafter)
    return target, drafter


@pytest.fixture(scope="module")
def server(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of vLLM's server, which dflash-serve starts."""
    for name in ("vllm", "uvloop", "prometheus_fastapi_instrumentator"):
        pytest.importorskip(name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(
            sys.executable,
            "-m",
            "dflash_toolkit.serve.cli",
            "--engine",
            "vllm",
            "--target",
            str(pair[0]),
            "--drafter",
            str(pair[1]),
        ),
        *("--port", str(port), "--max-model-len", "512", "--max-num-seqs", "4", "--no-prefix-cache"),
        *("--", "--enforce-eager", "--kv-cache-memory-bytes", str(1 << 28)),
    ]
    log = tmp_path_factory.mktemp("vllm") / "log"
    with open(log, "w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + START_S
        while not _answers(url):
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-6000:]
            time.sleep(0.5)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def without_ids(url: str) -> AbstractContextManager[str]:
    """The same server after a proxy that removes token ids."""

    def answer(request: BaseHTTPRequestHandler, content: bytes) -> tuple[int, bytes, dict[str, str]]:
        if request.command == "GET":
            reply = httpx.get(url + request.path)
        else:
            body = {key: value for key, value in json.loads(content).items() if key != "return_token_ids"}
            reply = httpx.post(url + request.path, json=body, timeout=60)
        return reply.status_code, reply.content, {}

    return stand_in(answer)


@pytest.mark.gpu
def test_dflash_data_gets_responses_from_vllm(
    server: str, pair: tuple[Path, Path], dflash_data: Program, tmp_path: Path
) -> None:
    write(tmp_path / "p.jsonl", [{"messages": [user(f"ask {i}"), assistant(""), user("more")]} for i in range(12)])
    dflash_data.target, found = pair[0], {}
    with without_ids(server) as texts:
        for name, url in (("ids", server), ("texts", texts)):
            for api in ("completions", "chat"):
                output = f"{name}-{api}.jsonl"
                said = "".join(dflash_data("--endpoint", url, "--batch-size", 1, f"server.api={api}", output=output))
                assert "unknown tokens" not in said and "asking" not in said, "every field is known there"
                found[name, api] = dflash_data.rows(output)
        sampled = ("temperature=0.8", "top_k=9", "top_p=0.9", "samples=2")
        dflash_data("--endpoint", server, *sampled, output="s.jsonl")
    first = found.pop(("ids", "completions"))
    assert all(rows == first for rows in found.values()), "both ways give the same rows"
    assert {row["finish_reason"] for row in first} >= {"length"} and any(len(row["spans"]) == 2 for row in first)
    assert len(dflash_data.rows("s.jsonl")) >= 12

    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.bfloat16).cuda()  # type: ignore[call-arg]
    for row in first:
        tokens = torch.tensor(row["tokens"], device="cuda")
        with torch.no_grad():
            logits = model(tokens[None]).logits[0].float()
        for start, end in row["spans"]:
            own = logits[start - 1 : end - 1]
            regret = own.max(-1).values - own.gather(1, tokens[start:end, None])[:, 0]
            assert regret.max() < 0.2, "greedy, but for near ties in bf16"
    metrics = httpx.get(f"{server}/metrics").text.splitlines()
    drafts = [float(line.split()[-1]) for line in metrics if line.startswith("vllm:spec_decode_num_drafts_total")]
    assert drafts and drafts[0] > 0, "it drafts with the drafter"
