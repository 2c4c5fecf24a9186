"""Runs the whole toolkit on a CPU with real weights: fetches a target, trains a drafter for it, measures it, serves it.

    make demo        (or: python scripts/demo/demo.py, in an environment with the `demo` and `dev` extras)

Every stage is one of the toolkit's own commands, printed before it runs. Finished stages are skipped and interrupted
ones resume, so you can stop the demo with `Ctrl-C` and run it again.
"""

import argparse
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "demo"
REPORT = "scripts/demo/prompts/count_report.jsonl"
QUESTION = "Write the numbers from 204 to 216, separated by commas."


def command(name: str, *arguments: str) -> list[str]:
    """One of the toolkit's programs, run by this interpreter's environment."""
    return [str(Path(sys.executable).parent / name), *arguments]


def stage(title: str, line: list[str]) -> None:
    """Run a command, showing it; a failure ends the demo with the command's own message and exit code."""
    print(f"\n== {title}\n$ {shlex.join([Path(line[0]).name, *line[1:]])}", flush=True)
    started = time.perf_counter()
    code = subprocess.run(line, cwd=ROOT, check=False).returncode
    if code:
        raise SystemExit(code)
    print(f"   {time.perf_counter() - started:.0f} s", flush=True)


@contextlib.contextmanager
def server(target: str, drafter: str, *words: str) -> Iterator[str]:
    """dflash-serve on a free port; its base URL. It is stopped when the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    line = command(
        "dflash-serve", "--target", target, "--drafter", drafter, "--port", str(port), "--no-access-log", *words
    )
    print(f"\n== serve\n$ {shlex.join([Path(line[0]).name, *line[1:]])}", flush=True)
    process = subprocess.Popen(line, cwd=ROOT)
    try:
        url = f"http://127.0.0.1:{port}"
        while process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=1) as answer:
                if answer.status == 200:
                    break
            time.sleep(0.2)
        else:
            raise SystemExit(process.returncode or 1)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)


def chat(url: str) -> None:
    """One streamed request through the real OpenAI client."""
    from openai import OpenAI

    print(f"\n> {QUESTION}", flush=True)
    chunks = OpenAI(base_url=f"{url}/v1", api_key="none").chat.completions.create(
        model="demo/target",
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage:
            print(f"\n\nusage: {chunk.usage.model_dump(exclude_none=True)}", flush=True)


def build() -> None:
    """Fetches the target and trains the drafter, unless they are there."""
    stage("target", [sys.executable, "scripts/demo/fetch_target.py", "demo/target"])
    stage("train", command("dflash-train", "--config", "configs/demo.yaml"))


def main() -> None:
    """Four stages and a summary."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    started = time.perf_counter()
    build()
    report, weights = DEMO / "report" / "report.json", DEMO / "drafter" / "model.safetensors"
    if not report.exists() or report.stat().st_mtime < weights.stat().st_mtime:
        stage(
            "report",
            command(
                "dflash-eval", "--target", "demo/target", "--drafter", "demo/drafter", "--prompts",
                f"counting={REPORT}", "--max-tokens", "48", "--output", "demo/report",
            ),
        )  # fmt: skip
    with server("demo/target", "demo/drafter") as url:
        chat(url)
    print(f"\ndone in {time.perf_counter() - started:.0f} s")
    for what, path in (("target", "target"), ("drafter", "drafter"), ("report", "report/report.html")):
        print(f"  {what:<8} demo/{path}")
    print("to chat and see the drafter at work, start")
    print("  .venv/bin/dflash-serve --target demo/target --drafter demo/drafter")
    print("and open http://127.0.0.1:8000/")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        main()
    except KeyboardInterrupt:
        print("\ninterrupted; `make demo` resumes", file=sys.stderr)
        raise SystemExit(130) from None
