"""README's commands and example, run as installed (`make test-newest`).

The models of `make demo` stand in for Qwen3-8B, or tiny random ones if the demo has not run.
"""

import contextlib
import json
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import free_port
from paths import ROOT

pytestmark = [pytest.mark.newest, pytest.mark.timeout(600)]
README = (ROOT / "README.md").read_text()
SMALL = (
    "drafter.layers=1 drafter.taps=2 drafter.block_size=4 optim.steps=2 optim.batch_size=2 responses.max_tokens=16 "
    "prompts.held_out=2 run.evaluate_tokens=8"
)
EXTRA = {"dflash-train": shlex.split(SMALL), "dflash-eval": ["--max-tokens", "8"]}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.M | re.S)


@pytest.fixture(scope="module")
def names(target_dir: Path, drafter_dir: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Maps each name in README to the model, file or folder that replaces it."""
    output, demo = tmp_path_factory.mktemp("readme") / "mine", ROOT / "demo"
    trained = (demo / "drafter" / "model.safetensors").exists()
    target, drafter = (demo / "target", demo / "drafter") if trained else (target_dir, drafter_dir)
    return {
        "Qwen/Qwen3-8B": str(target),
        "z-lab/Qwen3-8B-DFlash-b16": str(drafter),
        "prompts.jsonl": str(data),
        "out/mine": str(output),
    }


def replaced(text: str, names: dict[str, str]) -> str:
    for name, own in sorted(names.items(), key=lambda pair: -len(pair[0])):
        text = re.sub(rf"(?<![\w/.-]){re.escape(name)}(?![\w/-])", own, text)
    return text


def installed(words: list[str]) -> list[str]:
    """The command as pip installed it next to this interpreter."""
    command = Path(sys.executable).parent / words[0]
    assert command.exists(), f"{words[0]} is not installed"
    return [str(command), *words[1:], *EXTRA.get(words[0], [])]


@contextlib.contextmanager
def serving(words: list[str], folder: Path) -> Iterator[str]:
    url = f"http://127.0.0.1:{free_port()}"
    log = folder / "server.log"
    with log.open("w") as said:
        command = [*installed(words), "--port", url.rpartition(":")[2]]
        process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=1) as reply:
                if reply.status == 200:
                    break
            time.sleep(0.1)
        assert process.poll() is None, log.read_text()
        yield url
        assert "Traceback" not in log.read_text()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def test_readmes_commands_work_as_installed(names: dict[str, str], tmp_path: Path) -> None:
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("dflash-")]
    assert [line.split()[0] for line in lines] == ["dflash-serve", "dflash-eval", "dflash-train", "dflash-serve"]
    for line in lines:
        words = shlex.split(replaced(line, names))
        if words[0] == "dflash-serve":
            with serving(words, tmp_path) as url:
                body = {"model": names["Qwen/Qwen3-8B"], "messages": [{"role": "user", "content": "say 3"}]}
                request = urllib.request.Request(
                    f"{url}/v1/chat/completions",
                    json.dumps(body | {"max_tokens": 4}).encode(),
                    {"Content-Type": "application/json"},
                )
                with urllib.request.urlopen(request, timeout=120) as reply:
                    assert json.load(reply)["usage"]["completion_tokens"] > 0
                with urllib.request.urlopen(f"{url}/", timeout=60) as page:
                    assert b"<html" in page.read()
        else:
            done = subprocess.run(installed(words), cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
    assert (Path(names["out/mine"]) / "model.safetensors").exists()


def test_readmes_python_example_works(names: dict[str, str], tmp_path: Path) -> None:
    (example,) = blocks("python")
    program = replaced(example, names).replace("max_tokens=256", "max_tokens=8")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"(\d\.\d+|None)$", done.stdout.strip())
