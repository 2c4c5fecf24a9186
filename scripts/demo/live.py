"""Shows a drafter that learns while it serves: its acceptance rises on a kind of question that it was not trained for.

    make demo-live        (or: python scripts/demo/live.py, in an environment with the `demo` and `dev` extras)

The pair is that of `make demo`, which is built first if it is absent. The server is the toolkit's own, with --adapt.
"""

import argparse
import itertools
import json
import os
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.demo.demo import build, server

FORMS = (
    "Write the letters of the alphabet, starting with {}, one per line.",
    "Continue the alphabet from {}, separated by commas.",
    "Write the alphabet from {} to Z.",
)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
RISE = 1.3  # growth of tokens per step at which the demo ends
SHOWN_S = 5.0
TOGETHER = 8  # requests


def call(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Sends a request and returns the JSON of the answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def ask(url: str, target: str, max_tokens: int, ended: threading.Event) -> list[threading.Thread]:
    """Starts clients that send one question after the other until `ended`."""
    questions = itertools.cycle([form.format(letter) for letter in LETTERS for form in FORMS])

    def client() -> None:
        while not ended.is_set():
            message = {"role": "user", "content": next(questions)}
            body = {"model": target, "messages": [message], "temperature": 0, "max_tokens": max_tokens}
            call(f"{url}/v1/chat/completions", body)

    threads = [threading.Thread(target=client, daemon=True) for _ in range(TOGETHER)]
    for thread in threads:
        thread.start()
    return threads


def watch(url: str, seconds: float) -> tuple[float, float, float]:
    """Prints the state until acceptance has risen; returns tokens per step before and after, and the seconds."""
    began, shown = time.perf_counter(), 0.0
    while True:
        time.sleep(0.2)
        passed, state = time.perf_counter() - began, call(f"{url}/v1/drafter")
        versions = state["versions"]
        if not versions:
            continue
        before, after = (versions[i]["tokens_per_step"] for i in (0, -1))
        risen = after > RISE * before and versions[-1]["steps"] >= 50
        if risen or passed - shown >= SHOWN_S or passed > seconds:
            shown = passed
            print(f"{passed:5.0f} s  {state['summary']}; {state['training']['steps']} training steps", flush=True)
        if risen or passed > seconds:
            return before, after, passed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="another target (default: that of `make demo`)")
    parser.add_argument("--drafter", help="its drafter")
    parser.add_argument("--seconds", type=float, default=600.0, help="longest time (default: 600)")
    parser.add_argument("--max-tokens", type=int, default=24, help="tokens of an answer (default: 24)")
    parser.add_argument("--share", type=float, default=1.0, help="--adapt-share of the server (default: 1)")
    parser.add_argument("--rate", type=float, default=3e-3, help="--adapt-learning-rate of the server (default: 3e-3)")
    args = parser.parse_args(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if args.target is None:
        build()
    target, drafter = args.target or "demo/target", args.drafter or "demo/drafter"
    # one thread for the engine, and the other core for the trainer
    words = f"--threads 1 --adapt --adapt-share {args.share} --adapt-learning-rate {args.rate}".split()
    ended = threading.Event()
    with server(target, drafter, *words) as url:
        print(f"\n> {FORMS[0].format('A')}  (and others)", flush=True)
        threads = ask(url, target, args.max_tokens, ended)
        before, after, seconds = watch(url, args.seconds)
        ended.set()
        for thread in threads:
            thread.join()
    rose = "rose" if after > RISE * before else "did not rise enough"
    print(f"\nacceptance {rose}: {before:.2f} tokens per step at first, {after:.2f} after {seconds:.0f} s of serving")
    return 0 if after > RISE * before else 1


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
