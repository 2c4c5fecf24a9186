"""The page at `/`, and what the API gives it to show."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from test_serve_api import serving
from test_serve_engine import LATE_S, make_engine

from dflash_toolkit import Drafter, Target
from dflash_toolkit.runtime import AsyncEngine
from dflash_toolkit.serve.app import create_app
from dflash_toolkit.serve.page import FILES, FOLDER

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
ASK: dict[str, Any] = {
    "model": "m", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 40, "ignore_eos": True,
    "temperature": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(target: Target, drafter: Drafter) -> AsyncEngine:
    return make_engine(target, drafter)


def chunks(client: TestClient, **more: Any) -> list[dict[str, Any]]:
    lines = client.post("/v1/chat/completions", json=ASK | {"stream": True} | more).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("more", [{}, {"stop": ["never there"]}, {"max_tokens": 1}])
def test_steps_of_a_stream_hold_its_whole_text(engine: AsyncEngine, more: dict[str, Any]) -> None:
    client = TestClient(create_app(engine, "m"))
    plain = client.post("/v1/chat/completions", json=ASK | more).json()
    found = chunks(client, stream_options={"include_dflash": True, "include_usage": True}, **more)
    steps = [step for chunk in found for choice in chunk["choices"] for step in choice.get("dflash", ())]
    assert "".join("".join(step["text"]) for step in steps) == plain["choices"][0]["message"]["content"]
    usage = found[-1]["usage"]
    assert sum(step["tokens"] for step in steps) == usage["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert sum(step["accepted"] for step in steps) == usage["dflash"]["accepted"]
    assert sum(step["drafted"] for step in steps) == usage["dflash"]["drafted"]
    assert all(bool(step["text"][0]) <= bool(step["accepted"]) for step in steps)
    assert not any("dflash" in choice for chunk in chunks(client, **more) for choice in chunk["choices"])


def test_a_request_can_do_without_the_drafter(engine: AsyncEngine) -> None:
    client = TestClient(create_app(engine, "m"))
    drafted = client.post("/v1/chat/completions", json=ASK).json()
    plain = client.post("/v1/chat/completions", json=ASK | {"speculative": {"num_speculative_tokens": 0}}).json()
    assert plain["choices"][0]["message"] == drafted["choices"][0]["message"]
    assert drafted["usage"]["dflash"]["drafted"] > 0 == plain["usage"]["dflash"]["drafted"]
    refused = client.post("/v1/chat/completions", json=ASK | {"speculative": {"num_speculative_tokens": 3}})
    assert refused.status_code == 400 and "speculative.num_speculative_tokens" in refused.json()["error"]["message"]


def test_the_page_and_its_files_come_from_here_alone(engine: AsyncEngine) -> None:
    with serving(engine, api_keys=["secret"]) as url:
        for path in FILES:
            reply = httpx.get(f"{url}{path}", timeout=LATE_S)
            assert reply.status_code == 200 and "default-src 'none'" in reply.headers["content-security-policy"]
            assert not re.search(r"https?://|//[a-z]+\.|innerHTML|insertAdjacentHTML|document\.write", reply.text)
    page = (FOLDER / "page.html").read_text()
    asked = set(re.findall(r'\$\("(\w+)"\)', (FOLDER / "page.js").read_text()))
    assert asked <= set(re.findall(r'id="(\w+)"', page)), "every element that the script looks for"
    assert set(re.findall(r'(?:href|src)="([\w.]+)"', page)) <= {name for name, _ in FILES.values()}


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_runs_the_page(engine: AsyncEngine, tmp_path: Path) -> None:
    """It asks for the model, and nothing that it does is against its own policy."""
    with serving(engine) as url:
        command = [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
            "--enable-logging=stderr", "--virtual-time-budget=4000", "--dump-dom", url,
        ]  # fmt: skip
        run = subprocess.run(command, capture_output=True, text=True, timeout=LATE_S)
    assert '<span id="model" class="model">org/tiny</span>' in run.stdout
    assert 'id="stop" type="button" hidden' in run.stdout and "data-theme=" in run.stdout
    assert not re.search(r"Content Security Policy|Uncaught", run.stderr), run.stderr
