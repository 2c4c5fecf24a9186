"""`dflash-serve --engine`: command lines, errors before the start, and suggestions of the built-in engine.

Their own argument parsers read these command lines in `tests/serve/test_serve_peers.py`.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import make_tokenizer
from forked import fork_processes
from other_engines import BOTH, DFLASH, DFLASH2, NEWEST, SPECULATORS, TARGET, command, folder, parse
from paths import ROOT

from dflash_toolkit.config import UserError
from dflash_toolkit.serve import cli, external
from dflash_toolkit.serve.external import SGLANG, VLLM
from dflash_toolkit.serve.keys import VARIABLE

SLIDING = DFLASH | {"layer_types": ["sliding_attention"]}
SCALED = DFLASH | {"dflash_config": {"block_size": 16, "input_embedding_scale": 8.0}}


@pytest.fixture
def target(tmp_path: Path) -> str:
    return folder(tmp_path / "the target", TARGET)


@pytest.fixture
def drafter(tmp_path: Path) -> str:
    return folder(tmp_path / "drafter", DFLASH)


def after(words: Sequence[str], flag: str) -> str:
    assert words.count(flag) == 1, words
    return words[words.index(flag) + 1]


# ---- command lines -----------------------------------------------------------------------------------------------


def test_vllm_flag_counts_drafted_tokens(target: str, drafter: str) -> None:
    words = command("--engine", "vllm", "--target", target, "--drafter", drafter, "--tensor-parallel-size", "4")
    assert words[:4] == ["-m", "vllm.entrypoints.cli.main", "serve", target]
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": 15}
    assert json.loads(after(words, "--speculative-config")) == speculative
    assert after(words, "--tensor-parallel-size") == "4" and after(words, "--data-parallel-size") == "1"
    assert (after(words, "--host"), after(words, "--port")) == ("127.0.0.1", "8000"), "its own default is every host"
    assert after(words, "--allowed-origins") == "[]", "every site is the default of older releases"


def test_sglang_flag_includes_the_anchor(target: str, drafter: str) -> None:
    words = command("--engine", "sglang", "--target", target, "--drafter", drafter, "--data-parallel-size", "2")
    assert words[:4] == ["-m", "sglang.launch_server", "--model-path", target]
    assert after(words, "--speculative-algorithm") == "DFLASH"
    assert after(words, "--speculative-draft-model-path") == drafter
    assert after(words, "--speculative-num-draft-tokens") == "16"
    assert after(words, "--data-parallel-size") == "2" and "--enable-metrics" in words
    assert after(words, "--port") == "8000", "its own default is 30000"


@pytest.mark.parametrize(("drafted", "vllm", "sglang"), [("7", 7, "8"), ("15", 15, "16")])
def test_num_speculative_tokens_is_passed(drafted: str, vllm: int, sglang: str, target: str, drafter: str) -> None:
    common = ("--target", target, "--drafter", drafter, "--num-speculative-tokens", drafted)
    speculative = json.loads(after(command("--engine", "vllm", *common), "--speculative-config"))
    assert speculative["num_speculative_tokens"] == vllm
    assert after(command("--engine", "sglang", *common), "--speculative-num-draft-tokens") == sglang


def test_draft_sample_method_is_passed(target: str, drafter: str) -> None:
    common = ("--target", target, "--drafter", drafter, "--draft-sample-method")
    for method in ("greedy", "probabilistic"):
        vllm = json.loads(after(command("--engine", "vllm", *common, method), "--speculative-config"))
        assert vllm.get("draft_sample_method", "greedy") == method
        sglang = command("--engine", "sglang", *common, method)
        assert ("--speculative-use-rejection-sampling" in sglang) == (method == "probabilistic")


@pytest.mark.parametrize(
    ("architecture", "capability", "version", "more", "adaptive"),
    [
        ("Qwen3ForCausalLM", "9.0", "0.33.0", [], True),
        ("Qwen3ForCausalLM", "9.0", "0.33.0", ["--max-num-seqs", "32"], True),
        ("Qwen3ForCausalLM", "9.0", "0.33.0", ["--max-num-seqs", "31"], False),
        ("Qwen3ForCausalLM", "9.0", "0.33.0", ["--no-adaptive-verification"], False),
        ("Qwen3ForCausalLM", "9.0", "0.32.1", [], False),
        ("Qwen3ForCausalLM", "8.0", "0.33.0", [], False),
        ("Qwen3ForCausalLM", "8.0", "0.33.0", ["--adaptive-verification"], True),
        ("Qwen3_5ForConditionalGeneration", "9.0", "0.33.0", [], False),
        ("NeverHeardOfForCausalLM", "9.0", "0.33.0", [], False),
        ("Qwen3ForCausalLM", "9.0\\n8.6", "0.33.0", [], False),
        ("Qwen3ForCausalLM", "", "0.33.0", [], False),
    ],
)
def test_vllm_verifies_adaptively_where_it_can(
    architecture: str, capability: str, version: str, more: list[str], adaptive: bool,
    drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`nvidia-smi` reports the compute capability of every GPU; a machine without GPUs has none."""
    if capability:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{capability}\\n'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=None)
    target = folder(tmp_path / "t", TARGET | {"architectures": [architecture]})
    argv = ("--engine", "vllm", "--target", target, "--drafter", drafter, *more)
    speculative = json.loads(after(command(*argv, version=version), "--speculative-config"))
    assert speculative.get("enable_adaptive_verification", False) is adaptive
    passed = json.loads(after(command(*argv, version=version, passed=("--enforce-eager",)), "--speculative-config"))
    assert passed.get("enable_adaptive_verification", False) is ("--adaptive-verification" in more)


def test_adaptive_verification_is_an_option_of_vllm(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="but sglang has none"):
        command("--engine", "sglang", "--target", target, "--adaptive-verification")
    assert cli.main(["--target", target, "--adaptive-verification"]) == 2
    assert "the built-in engine chooses draft lengths itself" in capsys.readouterr().err


@pytest.mark.parametrize("engine", NEWEST)
def test_no_drafts_passes_no_speculative_flags(engine: str, target: str, drafter: str) -> None:
    none = command("--engine", engine, "--target", target)
    zero = command("--engine", engine, "--target", target, "--drafter", drafter, "--num-speculative-tokens", "0")
    assert none == zero and "speculative" not in " ".join(none)


@pytest.mark.parametrize(
    ("option", "vllm", "sglang"),
    [
        (["--host", "0.0.0.0"], ["--host", "0.0.0.0"], ["--host", "0.0.0.0"]),
        (["--dtype", "bfloat16"], ["--dtype", "bfloat16"], ["--dtype", "bfloat16"]),
        (["--served-model-name", "m"], ["--served-model-name", "m"], ["--served-model-name", "m"]),
        (["--chat-template", "t"], ["--chat-template", "t"], ["--chat-template", "t"]),
        (["--api-server-count", "2"], ["--api-server-count", "2"], ["--tokenizer-worker-num", "2"]),
        (["--max-num-seqs", "9"], ["--max-num-seqs", "9"], ["--max-running-requests", "9"]),
        (["--max-model-len", "99"], ["--max-model-len", "99"], ["--context-length", "99"]),
        (["--max-num-batched-tokens", "99"], ["--max-num-batched-tokens", "99"], ["--chunked-prefill-size", "99"]),
        (["--gpu-memory-utilization", "0.9"], ["--gpu-memory-utilization", "0.9"], None),
        (["--kv-cache-tokens", "99"], None, ["--max-total-tokens", "99"]),
        (["--page-size", "32"], ["--block-size", "32"], ["--page-size", "32"]),
        (["--kv-cache-dtype", "fp8"], ["--kv-cache-dtype", "fp8"], ["--kv-cache-dtype", "fp8_e4m3"]),
        (["--no-prefix-cache"], ["--no-enable-prefix-caching"], ["--disable-radix-cache"]),
        (["--prefix-cache"], ["--enable-prefix-caching"], []),
        (["--sampling-defaults", "openai"], ["--generation-config", "vllm"], ["--sampling-defaults", "openai"]),
        (["--sampling-defaults", "model"], ["--generation-config", "auto"], ["--sampling-defaults", "model"]),
        (["--tool-call-parser", "hermes"], ["--tool-call-parser", "hermes"], ["--tool-call-parser", "hermes"]),
        (["--tool-call-parser", "llama3_json"], ["--enable-auto-tool-choice"], ["--tool-call-parser", "llama3"]),
        (["--tool-call-parser", "none"], [], []),
        (["--tool-call-parser", "auto"], None, None),
        (["--reasoning-parser", "deepseek_r1"], ["--reasoning-parser", "deepseek_r1"], ["deepseek-r1"]),
        (["--drain-timeout", "2.5"], ["--shutdown-timeout", "3"], None),
        (["--ssl-keyfile", "k", "--ssl-certfile", "c"], *[["--ssl-keyfile k", "--ssl-certfile c"]] * 2),
        (["--root-path", "/a"], ["--root-path /a"], ["--fastapi-root-path /a"]),
        (["--allowed-origins", "http://a", "http://b"], ['--allowed-origins ["http://a", "http://b"]'], None),
        (["--uds", "s"], ["--uds s"], None),
        (["--scheduling-policy", "fair"], ["--scheduling-policy fcfs"], None),
        (["--no-access-log"], ["--disable-uvicorn-access-log"], None),
        (["--max-queue", "3"], None, None),
        (["--restart"], None, None),
        (["--draft-dtype", "full"], [], []),
        (["--draft-dtype", "fp8"], None, None),
        (["--device", "cuda"], [], []),
        (["--device", "cuda:1"], None, None),
        (["--device", "cpu"], None, None),
    ],
    ids=lambda value: value[0].lstrip("-") if value else "",
)
def test_option_is_translated_or_refused(
    option: list[str], vllm: list[str] | None, sglang: list[str] | None, target: str
) -> None:
    for engine, expected in (("vllm", vllm), ("sglang", sglang)):
        argv = ("--engine", engine, "--target", target, *option)
        if expected is None:
            with pytest.raises(UserError, match=f"built-in engine; .*({engine}|choose from)"):
                command(*argv)
            continue
        words = " ".join(command(*argv))
        assert " ".join(expected) in words
        if not expected:
            assert words == " ".join(command("--engine", engine, "--target", target))


def test_every_option_is_translated_or_refused_for_other_engines() -> None:
    """New options are then refused with another engine, never ignored."""
    config, _ = parse("--target", "t")
    every = external._values(config, external.to_mapping(config))
    for engine in (VLLM, SGLANG):
        assert engine.flags.keys() <= every.keys()
    assert every.keys() >= external.READ_HERE | external.NOTHING.keys() | external.ALWAYS


def test_arguments_after_two_dashes_are_split_off() -> None:
    assert external.split(["--a", "1", "--", "--b", "--", "c"]) == (["--a", "1"], ["--b", "--", "c"])
    assert external.split(["--a"]) == (["--a"], [])


# ---- checks before the start -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "values", "too_old", "first"),
    [
        ("vllm", DFLASH, "0.19.1", "0.20.0"),
        ("vllm", SLIDING, "0.27.1", "0.28.0"),
        ("vllm", DFLASH | {"is_causal": True}, "0.27.1", "0.28.0"),
        ("vllm", DFLASH2, "0.27.1", "0.28.0"),
        ("vllm", SPECULATORS, "0.19.1", "0.20.0"),
        ("sglang", DFLASH, "0.5.10.post1", "0.5.11"),
        ("sglang", SLIDING, "0.5.17", "0.5.18"),
        ("sglang", DFLASH2, "0.5.18", "0.5.19"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_too_old_release_for_a_drafter_is_refused(
    engine: str, values: dict[str, Any], too_old: str, first: str, target: str, tmp_path: Path
) -> None:
    argv = ("--engine", engine, "--target", target, "--drafter", folder(tmp_path / "d", values))
    with pytest.raises(UserError, match=rf"{engine} {too_old} .*'{engine}>={first}'"):
        command(*argv, version=too_old)
    assert command(*argv, version=first)
    assert command(*argv, version=f"{first}.post1+cu130")


@pytest.mark.parametrize(
    ("engine", "values", "more", "expected"),
    [
        ("vllm", DFLASH | {"hidden_size": 32}, [], "hidden size is 32, the target's 64"),
        ("vllm", DFLASH | {"vocab_size": 500}, [], "vocabulary is 500, the target's 512"),
        ("sglang", DFLASH | {"num_target_layers": 36}, [], "target layers is 36, the target's 40"),
        (
            "vllm",
            DFLASH | {"architectures": ["EagleModel"]},
            [],
            "'EagleModel', only with DFlashDraft.*DFlash2DraftModel$",
        ),
        ("vllm", DFLASH | {"architectures": ["LingDSparkModel"]}, [], "; start sglang 0.5.23 directly to serve it$"),
        ("vllm", {}, [], "architecture 'none'"),
        ("sglang", SPECULATORS, [], "speculators format"),
        ("vllm", DFLASH | {"block_size": 1, "dflash_config": {}}, [], "'block_size' is 1; expected"),
        ("vllm", DFLASH, ["--num-speculative-tokens", "16"], "is 16, .* at most 15"),
        ("vllm", DFLASH, ["--tensor-parallel-size", "3"], "is 3, which does not divide the drafter's 8"),
        ("vllm", DFLASH, ["--tensor-parallel-size", "8"], "is 8, which does not divide the target's 12"),
        ("vllm", DFLASH2 | {"dflash_config": {"selector_rank": 256}}, [], "no convolution, which vllm needs"),
        ("sglang", DFLASH2 | {"dflash_config": {"conv_kernel_size": 2}}, [], "no selector, which sglang needs"),
        ("sglang", DFLASH, ["--port", "0"], "port is 0, but sglang"),
    ],
)
def test_unsupported_drafter_is_refused(
    engine: str, values: dict[str, Any], more: list[str], expected: str, target: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=expected):
        command("--engine", engine, "--target", target, "--drafter", folder(tmp_path / "d", values), *more)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_other_engines_get_no_target_with_an_adapter(engine: str, target: str) -> None:
    (Path(target) / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="adapter_config"):
        command("--engine", engine, "--target", target)


@pytest.mark.parametrize(
    ("engine", "architecture", "error"),
    [
        ("vllm", "Gemma3ForCausalLM", "Gemma3ForCausalLM .*; remove --drafter"),
        (
            "sglang",
            "Qwen2ForCausalLM",
            "Qwen2ForCausalLM .*; use --engine vllm or remove --drafter",
        ),
        ("vllm", "Qwen3_5MoeForConditionalGeneration", None),
        ("sglang", "Qwen3_5MoeForConditionalGeneration", None),
        ("vllm", "NeverHeardOfForCausalLM", None),
    ],
)
def test_release_without_hidden_states_of_a_target_is_refused(
    engine: str, architecture: str, error: str | None, tmp_path: Path, drafter: str
) -> None:
    argv = ("--engine", engine, "--target", folder(tmp_path / "t", TARGET | {"architectures": [architecture]}))
    assert command(*argv), "without a drafter this does not matter"
    if error is None:
        assert command(*argv, "--drafter", drafter)
        return
    with pytest.raises(UserError, match=f"{engine} {NEWEST[engine]} .* of {error}$"):
        command(*argv, "--drafter", drafter)
    assert command(*argv, "--drafter", drafter, version="9.0"), "later releases are not checked"


@pytest.mark.parametrize(
    ("engine", "architecture", "values", "error"),
    [
        ("vllm", "Gemma4ForConditionalGeneration", DFLASH, None),  # neither engine scales the embeddings
        ("sglang", "Gemma4ForConditionalGeneration", DFLASH, "is 1, but sglang .* by 8 for .*; use --engine vllm or"),
        ("sglang", "Gemma4ForCausalLM", SCALED, None),
        ("vllm", "Gemma4ForCausalLM", SCALED, "is 8, but vllm .* by 1 for .*; use --engine sglang or"),
        ("vllm", "Gemma4ForCausalLM", DFLASH2 | {"dflash_config": BOTH | {"input_embedding_scale": 8.0}}, None),
        ("sglang", "Qwen3ForCausalLM", SCALED, "is 8, but sglang .* by 1 for"),
    ],
)
def test_other_embedding_scale_than_trained_is_refused(
    engine: str, architecture: str, values: dict[str, Any], error: str | None, tmp_path: Path
) -> None:
    target = folder(tmp_path / "t", TARGET | {"architectures": [architecture]})
    argv = ("--engine", engine, "--target", target, "--drafter", folder(tmp_path / "d", values))
    if error is None:
        assert command(*argv)
        return
    with pytest.raises(UserError, match=f"input_embedding_scale {error}"):
        command(*argv)


def test_suggested_conversion_of_speculators_checkpoint_loads(
    target_dir: Path, drafter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from conftest import make_drafter, make_target

    from dflash_toolkit.models.dflash.speculators import save_speculators

    tiny = make_target()
    save_speculators(make_drafter(tiny), tmp_path / "theirs", tiny.config, tiny.embedding.weight, tiny.head_weight)
    monkeypatch.chdir(tmp_path)
    argv = ("--engine", "sglang", "--target", str(target_dir), "--drafter")
    with pytest.raises(UserError) as refused:
        command(*argv, "theirs")
    words = shlex.split(str(refused.value).partition("convert it: ")[2])
    assert words[:2] == ["python", "-c"] and len(words) == 3
    exec(words[2], {})
    assert after(command(*argv, "OUT"), "--speculative-num-draft-tokens") == "8"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--engine", "vllm", "--target", "/no/where"], "target /no/where: no such directory"),
        (["--engine", "tgi", "--target", "t"], "'tgi' is not one of dflash, vllm, sglang"),
        (["--tensor-parallel-size", "0", "--target", "t"], "--tensor-parallel-size is 0; it must be >= 1"),
        (["--engine-python", "python3", "--target", "t"], "add --engine vllm or sglang"),
        (["--target", "t", "--", "--enforce-eager"], "'--enforce-eager' after --"),
        (
            ["--engine", "vllm", "--engine-python", "./none", "--target", "t"],
            "--engine-python is ./none, which does not exist",
        ),
        (["--engine", "vllm", "--engine-python", "false", "--target", "t"], "vllm is not installed for "),
        (
            ["--data-parallel-size", "2", "--target", "my model"],
            "dflash-serve --engine vllm --target 'my model' --data-parallel-size 2",
        ),
    ],
)
def test_bad_input_prints_one_line(
    argv: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(external, "installed", _installed(external.installed))
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and expected in err, err


def _installed(real: Any) -> Any:
    """Reports every package as installed for this Python, and queries other Pythons."""
    return lambda python, package: NEWEST[package] if python == sys.executable else real(python, package)


@pytest.mark.parametrize(("engine", "least"), [("vllm", "0.20.0"), ("sglang", "0.5.11")])
def test_missing_package_error_names_what_to_install(engine: str, least: str) -> None:
    with pytest.raises(UserError, match=f"^{engine} is not installed for .*: pip install '{engine}>={least}' "):
        external.installed(sys.executable, engine)


def test_api_key_for_sglang_is_refused(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "secret")
    config, _ = parse("--engine", "sglang", "--target", target)
    with pytest.raises(UserError, match=r"sglang .* API key") as refused:
        external._variables(SGLANG, config)
    assert "secret" not in str(refused.value)


# ---- suggestions of the built-in engine --------------------------------------------------------------------------


def test_unsupported_target_suggests_vllm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "secret")
    target = folder(tmp_path / "other one", {"model_type": "gpt2", "vocab_size": 300, "n_embd": 8})
    make_tokenizer().save_pretrained(target)
    fork_processes(monkeypatch)
    argv = ["--target", target, "--drafter", "d/d", "--max-num-seqs", "4", "--no-prefix-cache", "--draft-dtype", "fp8"]
    assert cli.main([*argv, "--port", "0", "--allowed-origins", "http://a", "http://b"]) == 2
    err = capsys.readouterr().err
    error, _, line = err.splitlines()[-1].partition("; to serve it with vLLM: ")
    assert "'gpt2'" in error and "secret" not in err
    program, *words = shlex.split(line)
    config, given = parse(*words)
    assert program == "dflash-serve" and config.external.engine == "vllm"
    assert (config.target, config.drafter, config.runtime.max_num_seqs) == (target, "d/d", 4)
    assert config.allowed_origins == ("http://a", "http://b")
    assert config.runtime.prefix_cache is False and "draft_dtype" not in given, "options that vllm lacks are omitted"


def test_error_of_the_engine_process_suggests_vllm(
    target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "t"
    shutil.copytree(target_dir, target)
    values = json.loads((target / "config.json").read_text()) | {"mlp_bias": True}
    (target / "config.json").write_text(json.dumps(values))
    fork_processes(monkeypatch)
    assert cli.main(["--target", str(target), "--port", "0", "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert "mlp_bias" in err and f": dflash-serve --engine vllm --target {target}" in err


# ---- the process -------------------------------------------------------------------------------------------------

STAND_IN = """
import json, os, signal, sys
def ended(*_):
    print("ended", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, ended)
shown = ("VLLM_API_KEY", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "PATH")
print("a line of its log", file=sys.stderr, flush=True)
print(json.dumps([os.getpid(), sys.argv[1:], {k: os.environ.get(k) for k in shown}]), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("python", [None, "another"])
def test_process_executes_the_other_engine(python: str | None, target: str, drafter: str, tmp_path: Path) -> None:
    """Uses a package that prints its arguments, because vllm itself needs a GPU."""
    site = tmp_path / "site"
    package = site / "vllm/entrypoints/cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(STAND_IN)
    (site / "vllm-0.33.0.dist-info").mkdir()
    (site / "vllm-0.33.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n")
    more = []
    if python:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/python").symlink_to(sys.executable)
        more = ["--engine-python", str(tmp_path / "bin/python")]
    command = [
        sys.executable, "-m", "dflash_toolkit.serve.cli", "--engine", "vllm", "--target", target,
        "--drafter", drafter, *more, "--threads", "3", "--", "--enforce-eager", "--nnodes", "2",
    ]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{site}", VARIABLE: "secret"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            line = process.stdout.readline()
            assert line.startswith("dflash-serve: vllm 0.33.0: ") and line.endswith(" ...\n"), process.stderr.read()
            pid, argv, variables = json.loads(process.stdout.readline())
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (pid, process.returncode, out, err) == (process.pid, 7, "ended\n", "a line of its log\n")
    assert argv[:2] == ["serve", target] and argv[-3:] == ["--enforce-eager", "--nnodes", "2"]
    runs = more[-1] if more else sys.executable
    assert shlex.split(line)[3:] == [runs, "-m", "vllm.entrypoints.cli.main", *argv[:-3], "..."]
    assert "secret" not in line and not any("secret" in word for word in argv)
    assert variables["VLLM_API_KEY"] == "secret" and variables["OMP_NUM_THREADS"] == "3"
    assert variables["OMP_WAIT_POLICY"] is variables["GOMP_SPINCOUNT"] is None, "how our own threads wait is not theirs"
    folder_of_python = tmp_path / "bin" if python else Path(sys.executable).parent
    assert variables["PATH"].split(os.pathsep)[0] == str(folder_of_python)
