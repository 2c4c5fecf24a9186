"""`dflash-serve` as a command: its errors, its output and its end."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest
from forked import Command
from openai import APIError, OpenAI

from dflash_toolkit.command_line import given_values
from dflash_toolkit.config import from_mapping
from dflash_toolkit.serve import cli, config
from dflash_toolkit.serve.config import ServeConfig
from dflash_toolkit.serve.processes import EngineProcess
from dflash_toolkit.serve.server import check_certificate
from dflash_toolkit.serve.vllm_flags import translate_vllm_flags


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Returns the line that the command prints, without its prefix."""
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    *before, last = err.splitlines()
    assert last.startswith("error: ") and len(before) <= 1, err
    assert not before or before[0].startswith("dflash-serve: loads target ")
    return last.removeprefix("error: ")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "target is required; give --target"),
        (["--target", "./nowhere"], "./nowhere: no such directory"),
        (["--target", "x", "--port", "70000"], "port is 70000; it must be in 0..65535"),
        (["--target", "x", "--port", "http"], "--port: expected a whole number, got 'http'"),
        (["--target", "x", "--api-key", "secret"], "put it into a file (--api-key-file)"),
        (["--target", "x", "--api-key-file", "nowhere"], "--api-key-file nowhere: cannot be read"),
        (["--target", "x", "--prefix-cache-per-key"], "--prefix-cache-per-key needs API keys; give --api-key-file"),
        (["--target", "x", "--ssl-keyfile", "k"], "https needs both --ssl-keyfile and --ssl-certfile"),
        (["--target", "x", "--max-queue", "-1"], "--max-queue is -1; it must be >= 0"),
        (["--target", "x", "--scheduling-policy", "fcfs"], "--scheduling-policy: 'fcfs' is not one of fair, priority"),
        (["--target", "x", "--per-request-spec-decode-metrics", "summary"], "needs a drafter"),
        (["--target", "x", "--uds", "/no/such/folder/s"], "--uds /no/such/folder/s: cannot listen"),
        (["--target", "x", "--host", "no.such.host.invalid"], "host 'no.such.host.invalid' cannot be resolved"),
        (["--target", "x", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1 port 8000"),
        (["--target", "x", "--root-path", "v"], "--root-path is 'v'; it must begin with /"),
        (["--target", "x", "--num-speculative-tokens", "7"], "--num-speculative-tokens is 7, but there is no drafter"),
        (
            ["--target", "x", "--max-model-len", "9", "--kv-cache-tokens", "8"],
            "--kv-cache-tokens is 8, less than --max-model-len, 9",
        ),
        (
            ["--target", "x", "--ssl-keyfile", "k", "--ssl-certfile", "c"],
            "--ssl-certfile c and --ssl-keyfile k: cannot be used (No such file or directory)",
        ),
        (["--target", "x", "--draft-dtype", "int4"], "--draft-dtype: 'int4' is not one of auto, fp8, full"),
        (["--target", "x", "--draft-dtype", "fp8", "prot=1"], "did you mean `port`?"),
        (["x", "--tokenizer", "y"], "--tokenizer y is not supported"),
        (["x", "--revision=abc"], "--revision abc is not supported: run `hf download"),
        (["x", "--enforce-eager"], "--enforce-eager is not supported"),
        (["x", "--enable_log_requests"], "--enable-log-requests is not supported"),
        (["x", "--generation-config", "dir"], "--generation-config dir is not supported"),
        (["x", "--speculative-config", "{"], "--speculative-config {: must be"),
        (["x", "--speculative-config", '{"model": "d", "method": "eagle3"}'], "method eagle3 is not supported"),
        (["x", "--speculative-config", '{"model": "d", "quantization": "fp8"}'], "quantization is not supported"),
        (["x", "--max-log-len"], "--max-log-len has no value"),
    ],
)
def test_bad_input_prints_one_line(argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    port = [] if "--port" in argv or "192.0.2.1" in argv else ["--port", "0"]
    assert expected in refusal(capsys, *argv, *port)


@pytest.mark.parametrize(
    ("flags", "translated", "unneeded"),
    [
        (["org/m", "--port", "1"], ["--target", "org/m", "--port", "1"], 0),
        (["--model=m", "port=1"], ["--target", "m", "port=1"], 0),
        (["m", "--served-model-name", "a", "b"], ["--target", "m", "--served-model-name", "a", "b"], 0),
        (["m", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--disable_log_requests"],
         ["--target", "m", "--tool-call-parser", "hermes"], 2),
        (["m", "--enable-prefix-caching", "--disable-log-stats", "--max-log-len", "9", "--trust-remote-code"],
         ["--target", "m"], 4),
        (["m", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"],
         ["--target", "m", "--no-prefix-cache", "--no-access-log"], 0),
        (["m", "--max-model-len", "auto", "--max-num-seqs", "4"], ["--target", "m", "--max-num-seqs", "4"], 1),
        (["m", "--max_model_len=-1"], ["--target", "m"], 1),
        (["m", "--max-model-len=4096"], ["--target", "m", "--max-model-len", "4096"], 0),
        (["m", "--uvicorn-log-level", "warning"], ["--target", "m", "--no-access-log"], 0),
        (["m", "--uvicorn-log-level", "info"], ["--target", "m"], 1),
        (["m", "--generation-config", "vllm", "--revision", "main"], ["--target", "m", "--sampling-defaults", "openai"],
         0),
        (["m", "--allowed-origins", '["http://a", "*"]', "--root-path", "/v"],
         ["--target", "m", "--allowed-origins", "http://a", "*", "--root-path", "/v"], 0),
        (["m", "--speculative-config", '{"method": "dflash", "model": "d", "num_speculative_tokens": 7}'],
         ["--target", "m", "--drafter", "d", "--num-speculative-tokens", "7"], 0),
        (["m", "--speculative-config", '{"model": "d", "enable_adaptive_verification": true}'],
         ["--target", "m", "--drafter", "d"], 1),
        (["m", "--speculative-config", '{"model": "d", "draft_sample_method": "probabilistic"}'],
         ["--target", "m", "--drafter", "d", "--draft-sample-method", "probabilistic"], 0),
    ],
)  # fmt: skip
def test_vllm_flags_are_translated_or_refused(
    flags: list[str], translated: list[str], unneeded: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert translate_vllm_flags(flags) == translated
    assert capsys.readouterr().err.count("is not needed") == unneeded
    values, source = given_values(ServeConfig, translated, "dflash-serve", "")
    assert from_mapping(ServeConfig, values, source).target in ("m", "org/m")


def test_port_in_use_is_reported_before_loading(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refusal(capsys, "--target", "./nowhere", "--port", port)
    assert line == f"cannot listen on 127.0.0.1 port {port} (Address already in use); give another --host or --port"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes keys with openssl")
def test_unusable_tls_files_are_refused_before_loading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, locked, certificate, other = (str(tmp_path / name) for name in ("key", "locked", "cert", "other"))
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-subj", "/CN=x"]
    for words in (["-nodes", "-keyout", key, "-out", certificate],
                  ["-passout", "pass:secret", "-keyout", locked, "-out", other]):  # fmt: skip
        subprocess.run([*new, *words], check=True, capture_output=True)
    check_certificate(certificate, key)
    for wrong, said in ((locked, "the key is encrypted; give one without a password"), (certificate, "cannot be used")):
        argv = ["--target", "x", "--port", "0", "--ssl-keyfile", wrong, "--ssl-certfile", certificate]
        assert said in refusal(capsys, *argv)


def test_long_tmpdir_is_refused_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    said = refusal(capsys, "--target", "x", "--port", "0")
    assert said == f"TMPDIR is {long}, too long for the path of a socket; set a shorter one"
    assert list(long.iterdir()) == []


@pytest.mark.parametrize("package", cli.EXTRA)
def test_a_missing_package_names_the_extra(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    line = refusal(capsys, "--target", "x")
    assert line == f"{package} is not installed; install it with: pip install 'dflash-toolkit[serve]'"


def test_served_name_is_the_target_or_the_given_name() -> None:
    assert ServeConfig(target="demo/target").models == ("demo/target",)
    assert ServeConfig(target="demo/target", served_model_name=("mine", "b")).models == ("mine", "b")


def test_ctrl_c_while_loading_exits_with_130(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineProcess, "ready", interrupted)
    assert cli.main(["--target", str(target_dir), "--port", "0"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_whole_run_from_the_first_line_to_ctrl_c(target_dir: Path, drafter_dir: Path, tmp_path: Path) -> None:
    words = ["--target", str(target_dir), "--drafter", str(drafter_dir), "--port", "0", "--device", "cpu"]
    words += ["--served-model-name", "tiny", "--max-num-seqs", "1", "--drain-timeout", "0.2", "--no-access-log"]
    process = Command("dflash_toolkit.serve.cli", words, tmp_path)
    try:
        line = process.line()
        match = re.fullmatch(r"dflash-serve: (http://127.0.0.1:\d+)/v1 serves tiny \(.*, float32 on cpu\)", line)
        assert match, line
        assert urllib.request.urlopen(f"{match[1]}/health", timeout=60).status == 200

        # Ctrl-C while an answer runs: the client gets an error, the server does not wait for the end
        client = OpenAI(base_url=f"{match[1]}/v1", api_key="none", max_retries=0, timeout=60)
        answer = client.completions.create(
            model="tiny", prompt=["hello"] * 40, max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(answer))
        os.kill(process.pid, signal.SIGINT)
        with pytest.raises(APIError, match="shutting down"):
            list(answer)
        assert process.end(60) == 0
    finally:
        process.kill()
    assert process.out.read_text() == f"{line}\n"
    (first,) = process.err.read_text().splitlines()
    assert first.startswith(
        f"dflash-serve: loads target {target_dir}, drafter {drafter_dir} on cpu; will listen on http"
    )


@pytest.mark.parametrize(
    ("cores", "options", "expected"),
    [
        (2, [], 1),
        (16, [], 4),
        (32, [], 8),
        (128, [], 8),
        (128, ["--max-num-seqs", "40"], 3),
        (128, ["--max-num-seqs", "1"], 1),
        (128, ["--device", "cpu"], 1),
        (2, ["--api-server-count", "3"], 3),
    ],
)
def test_front_ends_follow_cores_and_requests(
    monkeypatch: pytest.MonkeyPatch, cores: int, options: list[str], expected: int
) -> None:
    monkeypatch.setattr(config, "usable_cores", lambda: cores)
    given, source = given_values(ServeConfig, ["--target", "x", *options], cli.PROG, "", "")
    assert from_mapping(ServeConfig, given, source).front_ends == expected
