"""Drives headless Chromium through its debugging pipe: two file descriptors, no port and no further package."""

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
LATE_S = 60.0  # limit of a wait; not a measure of speed
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
]  # fmt: skip
# Chromium reads commands from descriptor 3 and writes replies to 4
PLUMBING = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for number, end in zip((3, 4), ends):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Page:
    """One tab. `console` collects what it reports as errors, `urls` and `bodies` what it requests."""

    def __init__(self, commands: int, replies: int) -> None:
        self._commands, self._replies, self._rest, self._number, self._session = commands, replies, b"", 0, ""
        self.console: list[str] = []
        self.urls: list[str] = []
        self.bodies: list[str] = []
        tab = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Returns the result of a command of the DevTools protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == self._number:
                assert "error" not in reply, (method, reply["error"])
                return reply["result"]
            self._note(reply)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._replies], [], [], LATE_S)[0], "Chromium does not answer"
            read = os.read(self._replies, 1 << 20)
            assert read, "Chromium has ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])
            self.bodies.append(params["request"].get("postData", ""))
        elif event["method"] == "Runtime.exceptionThrown":
            self.console.append(json.dumps(params["exceptionDetails"]))
        elif event["method"] == "Runtime.consoleAPICalled":
            self.console.append(str([one.get("value") for one in params["args"]]))
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.console.append(params["entry"]["text"])

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && document.getElementById('model')?.title")

    def run(self, script: str) -> Any:
        """Returns the value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        """Returns as soon as the expression is true."""
        end = time.monotonic() + LATE_S
        while not self.run(f"!!({script})"):
            assert time.monotonic() < end, f"never true: {script}; {self.text('body')}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def visible(self, selector: str) -> bool:
        return self.run(f"!!document.querySelector({json.dumps(selector)})?.checkVisibility()")

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        code = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32}[key]
        more = {"text": {"Enter": "\r", " ": " "}[key]} if key in ("Enter", " ") else {}
        known = {
            "key": key,
            "code": "Space" if key == " " else key,
            "windowsVirtualKeyCode": code,
            "modifiers": modifiers,
        }
        self.call("Input.dispatchKeyEvent", type="keyDown", **known, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", **known)

    def size(self, width: int, height: int, scale: float = 1.0) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 500,
        )


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A new tab of a new Chromium."""
    command_end, commands = os.pipe()
    replies, reply_end = os.pipe()
    ends = [str(command_end), str(reply_end)]
    words = [sys.executable, "-c", PLUMBING, *ends, str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(words, pass_fds=(command_end, reply_end), stderr=subprocess.DEVNULL)
    os.close(command_end)
    os.close(reply_end)
    try:
        page = Page(commands, replies)
        yield page
    finally:
        os.close(commands)  # Chromium ends when its pipe does
        os.close(replies)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
