"""A front-end process: HTTP and text. The command's own process is the first; there may be others."""

import asyncio
import contextlib
import gc
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import TYPE_CHECKING

import transformers

from dflash_toolkit.config import UserError
from dflash_toolkit.models.target_files import load_config, load_tokenizer
from dflash_toolkit.runtime import EngineClient
from dflash_toolkit.runtime.wire import Info
from dflash_toolkit.threads import use_threads

from .access import set_up_logs
from .app import create_app
from .defaults import sampling_defaults
from .keys import excluded_keys, read_admin_keys
from .metrics import serve_counts
from .server import Connection, Server, raise_open_files
from .state import ServerState

if TYPE_CHECKING:
    from .config import ServeConfig

MAX_CONNECTIONS = 4096


class Front:
    """Loads what a front-end process needs: the tokenizer and the sampling defaults. Raises UserError."""

    def __init__(self, config: "ServeConfig", keys: Sequence[str]) -> None:
        use_threads(config.threads)
        transformers.utils.logging.disable_progress_bar()  # errors are one line
        load_config(config.target)  # first, for its error if there is no such target
        self._config, self._keys, self._admin_keys = config, keys, read_admin_keys(config.admin_key_file)
        self._excluded = excluded_keys(config.adaptation.adapt_exclude_key_file, keys)
        self._defaults = sampling_defaults(config.target) if config.sampling_defaults == "model" else {}
        self._tokenizer = load_tokenizer(config.target, chat_template=config.chat_template)

    def server(
        self, path: Path, info: Info, number: int, ready: Callable[[], None], drain: Callable[[], None] = lambda: None
    ) -> Server:
        """Creates the server of front-end process `number`.

        Args:
            path: the engine's socket.
            ready, drain: see `Server`.
        """
        config = self._config
        engine = EngineClient(path, info, self._tokenizer, again=config.restart)
        several = config.front_ends > 1
        state = ServerState.of_several(path.parent, config.front_ends, number) if several else ServerState()
        app = create_app(
            engine, config, api_keys=self._keys, admin_keys=self._admin_keys, excluded=self._excluded,
            defaults=self._defaults, state=state,
        )  # fmt: skip
        Connection.limit = min(config.max_connections or MAX_CONNECTIONS, raise_open_files())
        Connection.client_timeout_s = config.client_timeout
        Connection.open = state.connections
        counts_servers: list[asyncio.Future[asyncio.Server]] = []

        def on_ready() -> None:
            if state.own is not None:
                counts_servers.append(asyncio.ensure_future(serve_counts(app.state.metrics, state.own)))
            gc.collect()
            gc.freeze()  # these objects stay; collecting them repeatedly would pause every answer
            ready()

        def on_drain() -> None:
            state.draining = True
            drain()

        return Server(
            app,
            ready=on_ready,
            stop=engine.close,
            drain=on_drain,
            drain_s=config.drain_timeout,
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
        )


def front_main(
    config: "ServeConfig", keys: Sequence[str], bound: socket.socket, path: Path, number: int, control: Pipe
) -> None:
    """Runs a front-end process other than the first, which controls it; drains when the first closes `control`."""
    set_up_logs(config.log_json, config.access_log)
    try:
        front = Front(config, keys)
        control.send("loaded")
        info: Info = control.recv()
    except (UserError, EOFError, OSError):
        return  # the first process has ended, or reports the same error
    server = front.server(path, info, number, ready=lambda: control.send("ready"))

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            control.recv()
        server.should_exit = True

    threading.Thread(target=watch, name="watch", daemon=True).start()
    server.run(sockets=[bound])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as in the engine's process
