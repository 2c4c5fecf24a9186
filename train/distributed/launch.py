"""Starts a command in several processes of this machine, as torchrun does, without torch."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

POLL_S = 0.1
PATIENCE_S = 10.0  # for the other processes to end by themselves after one has failed


def launch(module: str, argv: Sequence[str], count: int) -> int:
    """Runs `python -m module argv` in `count` processes, one for each GPU.

    If one fails, the others end too. Each process finds its rank in the environment.

    Returns:
        the exit code: 0, or the first other one.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    running: list[subprocess.Popen[bytes]] = []
    failed, since = 0, 0.0
    try:
        for rank in range(count):
            own = {key: str(value) for key, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            running.append(subprocess.Popen([sys.executable, "-m", module, *argv], env=os.environ | own))
        while running:
            time.sleep(POLL_S)
            codes = [code for process in running if (code := process.poll())]
            if codes and not failed:
                failed, since = codes[0] if codes[0] > 0 else 128 - codes[0], time.monotonic()
            if failed and time.monotonic() - since > PATIENCE_S:
                _end(running)
            running = [process for process in running if process.poll() is None]
    except KeyboardInterrupt:  # the terminal has sent it to all of them
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_S)
        raise
    finally:
        _end(running)
    return failed


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
