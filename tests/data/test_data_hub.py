"""Datasets of the hub, read by its real client from a stand-in that speaks the hub's HTTP API on this machine."""

import functools
import hashlib
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from programs import says
from servers import Reply, stand_in

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
    return "".join(json.dumps(row) + "\n" for row in says(*prompts)).encode()


@functools.cache  # not where the module is imported: 80 MB
def files() -> dict[str, bytes]:
    """Lists the dataset's repository."""
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


class Hub:
    """Counts the bytes of each file that it sends."""

    def __init__(self) -> None:
        self.sent = dict.fromkeys(files(), 0)

    def answer(self, request: BaseHTTPRequestHandler, _: bytes) -> Reply:
        path = unquote(urlsplit(request.path).path)
        about, resolve = f"/api/datasets/{NAME}", f"/datasets/{NAME}/resolve/"
        if path in (about, f"{about}/revision/main", f"{about}/revision/{COMMIT}"):
            found = {"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files()]}
            return 200, json.dumps(found).encode(), {}
        if path.startswith(f"{about}/tree/{COMMIT}"):
            return 200, json.dumps(tree(path.removeprefix(f"{about}/tree/{COMMIT}").strip("/"))).encode(), {}
        if not path.startswith(resolve):
            return 401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
        if (name := path.removeprefix(resolve).partition("/")[2]) not in files():
            return 404, b"{}", {"X-Error-Code": "EntryNotFound"}
        status, content = 200, files()[name]
        headers = {"ETag": f'"{digest(name)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if wanted := request.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            status, content = 206, content[start : end + 1]
        if request.command == "GET":
            self.sent[name] += len(content)
        return status, content, headers


def tree(folder: str) -> list[dict[str, object]]:
    """Lists a folder, without its subfolders."""
    start = f"{folder}/" if folder else ""
    below = [file.removeprefix(start) for file in files() if file.startswith(start)]
    folders = sorted({name.partition("/")[0] for name in below if "/" in name})
    inside = [start + name for name in below if "/" not in name]
    return [
        *({"type": "directory", "path": start + name, "oid": COMMIT, "size": 0} for name in folders),
        *({"type": "file", "path": path, "oid": digest(path), "size": len(files()[path])} for path in inside),
    ]


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
    "no split": read(name, "dev"), "no owner": read("no-owner/questions"),
    "whole": [row["prompt"] for row in load_rows(name, name, split="train")],
}))
"""


def test_hub_datasets_are_streamed_and_errors_are_one_line(tmp_path: Path) -> None:
    left_out = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "HF_TOKEN")
    kept, hub = {name: value for name, value in os.environ.items() if name not in left_out}, Hub()
    with stand_in(hub.answer) as url:
        env = kept | {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
        program = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["train"] == found["whole"] == ["a", "b", "c", "d", "e"] and found["test"] == ["f"]
    assert found["shuffled"] == found["again"] != found["train"] and sorted(found["shuffled"]) == found["train"]
    assert found["large"] == ["0", "1", "2", "3", "4"]
    assert 0 < hub.sent["large/all.jsonl"] < len(files()["large/all.jsonl"]) / 2, "five of 8000 rows need a part of it"
    for name, reason in (("no subset", "'small' not found"), ("no split", "dev"), ("no owner", "no-owner/questions")):
        assert reason in found[name] and "\n" not in found[name], found[name]
        assert found[name].endswith("without a network give a file")
