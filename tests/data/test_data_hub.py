"""Datasets of the hub, read by its real client from a stand-in that speaks the hub's HTTP API on this machine."""

import functools
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("datasets")

NAME, COMMIT = "someone/questions", "a" * 40
CARD = """---
configs:
- config_name: main
  default: true
  data_files: [{split: train, path: "main/train-*"}, {split: test, path: "main/test-*"}]
- config_name: large
  data_files: [{split: train, path: "large/*"}]
---
"""
LARGE = 8000


def lines(*prompts: str) -> bytes:
    return "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts).encode()


@functools.cache  # not where the module is imported: 80 MB
def files() -> dict[str, bytes]:
    """What is in the dataset's repository."""
    return {
        "README.md": CARD.encode(),
        "main/train-00000-of-00002.jsonl": lines("a", "b"),
        "main/train-00001-of-00002.jsonl": lines("c", "d", "e"),
        "main/test-00000-of-00001.jsonl": lines("f"),
        "large/all.jsonl": lines(*(str(i) + " " * 10_000 for i in range(LARGE))),
    }


@functools.cache
def digest(name: str) -> str:
    return hashlib.sha1(files()[name]).hexdigest()


class Hub(ThreadingHTTPServer):
    """Counts the bytes of each file that it sends."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.sent = dict.fromkeys(files(), 0)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        """Nobody reads what was asked."""

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        about, resolve = f"/api/datasets/{NAME}", f"/datasets/{NAME}/resolve/"
        if path in (about, f"{about}/revision/main", f"{about}/revision/{COMMIT}"):
            found = {"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files()]}
            self.answer(200, json.dumps(found).encode(), {})
        elif path.startswith(f"{about}/tree/{COMMIT}"):
            self.answer(200, json.dumps(tree(path.removeprefix(f"{about}/tree/{COMMIT}").strip("/"))).encode(), {})
        elif not path.startswith(resolve):
            self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif (file := path.removeprefix(resolve).partition("/")[2]) in files():
            self.file(file)
        else:
            self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def file(self, name: str) -> None:
        content = files()[name]
        headers = {"ETag": f'"{digest(name)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        status, wanted = 200, self.headers.get("Range")
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            status, content = 206, content[start : end + 1]
        if self.command == "GET":
            self.server.sent[name] += len(content)
        self.answer(status, content, headers)


def tree(folder: str) -> list[dict[str, object]]:
    """What is in a folder, not below it."""
    start = f"{folder}/" if folder else ""
    below = [file.removeprefix(start) for file in files() if file.startswith(start)]
    folders = sorted({name.partition("/")[0] for name in below if "/" in name})
    found: list[dict[str, object]] = [
        {"type": "directory", "path": start + n, "oid": COMMIT, "size": 0} for n in folders
    ]
    for name in below:
        if "/" not in name:
            path = start + name
            found.append({"type": "file", "path": path, "oid": digest(path), "size": len(files()[path])})
    return found


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


PROGRAM = """
import json
from itertools import islice
from dflash_toolkit import UserError
from dflash_toolkit.data.sources import Source, load_rows

def read(name, *args):
    try:
        return [row.asked.strip() for row in islice(Source(name).read(*args), 5)]
    except UserError as error:
        return str(error)

name = "someone/questions"
print(json.dumps({
    "train": read(name), "test": read(name, "test"), "shuffled": read(name, "train", 100, 1),
    "again": read(name, "train", 100, 1), "large": read(name + ":large"), "no subset": read(name + ":small"),
    "no split": read(name, "dev"), "nobody's": read("nobody/questions"),
    "whole": [row["prompt"] for row in load_rows(name, name, split="train")],
}))
"""


def test_datasets_of_the_hub_are_streamed_and_what_is_missing_is_one_line(hub: Hub, tmp_path: Path) -> None:
    changed = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
    left_out = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "HF_TOKEN")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=kept | changed, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["train"] == found["whole"] == ["a", "b", "c", "d", "e"] and found["test"] == ["f"]
    assert found["shuffled"] == found["again"] != found["train"] and sorted(found["shuffled"]) == found["train"]
    assert found["large"] == ["0", "1", "2", "3", "4"]
    assert 0 < hub.sent["large/all.jsonl"] < len(files()["large/all.jsonl"]) / 2, "five of 8000 rows need a part of it"
    for name, reason in (("no subset", "'small' not found"), ("no split", "dev"), ("nobody's", "nobody/questions")):
        assert reason in found[name] and "\n" not in found[name], found[name]
        assert found[name].endswith("without a network give a file")
