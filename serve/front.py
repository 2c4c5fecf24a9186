"""A process of HTTP and text. The server's first is the command's own; `--api-server-count` puts others beside it."""

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
from dflash_toolkit.models.target import load_config, load_tokenizer
from dflash_toolkit.runtime import EngineClient
from dflash_toolkit.runtime.wire import Info
from dflash_toolkit.threads import use_threads

from .access import set_up_logs
from .app import create_app
from .defaults import sampling_defaults
from .metrics import tell
from .server import Connection, Server, raise_open_files
from .state import ServerState

if TYPE_CHECKING:
    from .config import ServeConfig

MOST_CONNECTIONS = 4096


class Front:
    """What it needs of the target. Raises UserError."""

    def __init__(self, config: "ServeConfig", keys: Sequence[str]) -> None:
        use_threads(config.threads)
        transformers.utils.logging.disable_progress_bar()  # errors are one line
        load_config(config.target)  # says first if there is no such target
        self._config, self._keys = config, keys
        self._defaults = sampling_defaults(config.target) if config.sampling_defaults == "model" else {}
        self._tokenizer = load_tokenizer(config.target)
        if config.chat_template is not None:
            try:
                self._tokenizer.chat_template = Path(config.chat_template).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"chat_template {config.chat_template}: cannot be read ({error})") from error

    def server(
        self, path: Path, info: Info, number: int, ready: Callable[[], None], drain: Callable[[], None] = lambda: None
    ) -> Server:
        """The server of front `number`.

        Args:
            path: the engine's socket.
            ready, drain: as `Server` takes them.
        """
        config = self._config
        engine = EngineClient(path, info, self._tokenizer, again=config.restart)
        several = config.api_server_count > 1
        state = ServerState.of_several(path.parent, config.api_server_count, number) if several else ServerState()
        app = create_app(
            engine,
            config.models[0],
            self._keys,
            self._defaults,
            config.tool_call_parser,
            config.reasoning_parser,
            state=state,
            max_queue=config.max_queue,
            request_timeout_s=config.request_timeout,
            root_path=config.root_path,
            allowed_origins=config.allowed_origins,
            scheduling_policy=config.scheduling_policy,
            aliases=config.models[1:],
            per_request_spec_decode_metrics=config.per_request_spec_decode_metrics,
        )
        Connection.limit = min(config.max_connections or MOST_CONNECTIONS, raise_open_files())
        Connection.client_timeout_s = config.client_timeout
        Connection.open = state.connections
        telling: list[asyncio.Future[asyncio.Server]] = []

        def on_ready() -> None:
            if state.own is not None:
                telling.append(asyncio.ensure_future(tell(app.state.metrics, state.own)))
            gc.collect()
            gc.freeze()  # what is here stays; to look through it again and again stops every answer
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
    """The process of every front but the first, which says when to go on; when it closes `control`, this one drains."""
    set_up_logs(config.log_json, config.access_log)
    try:
        front = Front(config, keys)
        control.send("loaded")
        info: Info = control.recv()
    except (UserError, EOFError, OSError):
        return  # the first has gone, or meets the same and says it
    server = front.server(path, info, number, ready=lambda: control.send("ready"))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            control.recv()
        server.should_exit = True

    threading.Thread(target=watch, name="watch", daemon=True).start()
    server.run(sockets=[bound])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as the engine's process
