"""dflash-serve: an OpenAI-compatible server for a target and its drafter."""

import contextlib
import importlib.util
import math
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_toolkit.checkpoint.readahead import read_ahead
from dflash_toolkit.config import UserError, from_mapping, given_values, option, options, run_command
from dflash_toolkit.models.published import named_for
from dflash_toolkit.options import ModelOptions
from dflash_toolkit.runtime.options import EngineOptions

from .external import OWN, ExternalOptions, check_own, offered, split, start
from .parsing.choice import REASONING_PARSERS, TOOL_CALL_PARSERS
from .pasted import in_our_words

PROG = "dflash-serve"
DESCRIPTION = """\
Serve a target over OpenAI's API, with a drafter that makes it faster and changes nothing else. Without a drafter
the same server decodes plainly. Requests are decoded together and come and go at every step."""
EXTRA = ("fastapi", "pydantic", "uvicorn", "prometheus_client", "httptools")  # what `dflash-toolkit[serve]` installs


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig(ModelOptions):
    """The options of `dflash-serve`."""

    drafter: str | None = option(None, "the drafter: Hugging Face id or directory (default: decode plainly)")
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is every IPv4 interface")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    external: ExternalOptions = options(ExternalOptions, flat=True)
    runtime: EngineOptions = options(EngineOptions, flat=True)
    api_server_count: int = option(1, "processes of HTTP and text; more help where one is too slow for all clients")
    uds: str | None = option(None, "listen on a Unix socket at this path instead")
    ssl_keyfile: str | None = option(None, "serve https with this key")
    ssl_certfile: str | None = option(None, "and this certificate chain")
    root_path: str = option("", "the path under which a proxy shows this server")
    allowed_origins: tuple[str, ...] = option((), "sites whose pages may ask from a browser; * is every site")
    api_key_file: str | None = option(
        None,
        "clients must send one of its lines as their API key; so with those in $DFLASH_API_KEY, separated by commas",
    )
    max_queue: int = option(1024, "answers that may wait for a place in the batch; more are refused with a 429")
    scheduling_policy: str = option(
        "fair",
        "whose turn it is: fair over API keys and requests, or priority, by what requests say (lower is earlier)",
        choices=("fair", "priority"),
    )
    request_timeout: float | None = option(None, "seconds after which an answer is given up (default: never)")
    client_timeout: float = option(
        30.0, "seconds that a client has to send a header, then a body, and to take an answer"
    )
    max_connections: int | None = option(None, "clients connected at a time (default: what the system's limit leaves)")
    log_json: bool = option(False, "write the log as JSON, one object a line")
    access_log: bool = option(True, "write a line for every request")
    restart: bool = option(False, "start the engine again when it has ended by itself")
    sampling_defaults: str = option(
        "model",
        "where a request does not say: model has what the target's generation_config.json says, openai temperature 1",
        choices=("model", "openai"),
    )
    tool_call_parser: str = option(
        "auto",
        "how the target writes tool calls; auto goes by its chat template, none leaves tools out",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = option(
        "auto",
        "how the target marks its reasoning, which becomes reasoning_content; auto goes by its chat template",
        choices=REASONING_PARSERS,
    )
    per_request_spec_decode_metrics: str = option(
        "none",
        "what an answer says of its drafts beside `usage`: nothing, a summary, or every step too",
        choices=("none", "summary", "detailed"),
    )
    drain_timeout: float = option(25.0, "seconds that open answers get to finish when the server is told to stop")
    served_model_name: tuple[str, ...] = option(
        (), "the names clients ask for; answers have the first (default: the target, as given)"
    )
    chat_template: str | None = option(None, "a file with the chat template to use instead of the target's own")

    def __post_init__(self) -> None:
        ModelOptions.__post_init__(self)
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; it must be in 0..65535")
        for name in ("host", "uds", "api_key_file", "chat_template"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is empty")
        if "" in self.served_model_name:
            raise ValueError("served_model_name is empty")
        if self.per_request_spec_decode_metrics != "none" and self.drafter is None:
            raise ValueError("per_request_spec_decode_metrics needs a drafter")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("https needs both ssl_keyfile and ssl_certfile")
        for name, least in (("max_queue", 0), ("max_connections", 1), ("api_server_count", 1), ("drain_timeout", 0)):
            if (value := getattr(self, name)) is not None and not value >= least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        for name in ("request_timeout", "client_timeout"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be more than 0 seconds")

    @property
    def models(self) -> tuple[str, ...]:
        """The names clients ask for; answers have the first."""
        return self.served_model_name or (self.target,)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_command(lambda: _dispatch(sys.argv[1:] if argv is None else argv))


def _dispatch(argv: Sequence[str]) -> int:
    if any(re.match(r"(--api-key|api_key)(=|$)", word) for word in argv):
        raise UserError(
            "api_key: whoever lists this machine's processes would see it; put it into a file (--api-key-file) or into "
            "the environment ($DFLASH_API_KEY)"
        )
    own, passed = split(argv)
    if not any(re.match(r"(--)?engine(=|$)", word) for word in own):
        own = in_our_words(own)
    given, source = given_values(ServeConfig, own, PROG, DESCRIPTION)
    if isinstance(name := given.get("served_model_name"), str):  # of a file, where a list of one is seldom written
        given["served_model_name"] = [name]
    config = from_mapping(ServeConfig, given, source)
    if config.drafter is None and (names := named_for(config.target)):
        line = f"{PROG}: no drafter is given, so it decodes plainly; published for {config.target}: {names} (--drafter)"
        print(line, file=sys.stderr)
    if config.external.engine != OWN:
        start(config, given, passed)
    check_own(config, given, passed)
    with offered(config, given):
        return _run(config)


def _run(config: ServeConfig) -> int:
    _require_extra()
    from .access import set_up_logs
    from .keys import read_keys
    from .processes import EngineProcess, Fronts
    from .server import bind, bind_path, url_of

    read_ahead(config.drafter, config.target)  # into the system's cache, for the engine's process
    keys = read_keys(config.api_key_file)
    set_up_logs(config.log_json, config.access_log)
    several = config.api_server_count > 1
    bound = bind(config.host, config.port, several) if config.uds is None else bind_path(config.uds)
    with contextlib.ExitStack() as stack:
        stack.enter_context(bound)
        process = stack.enter_context(contextlib.closing(EngineProcess(config)))
        process.start()
        fronts = stack.enter_context(contextlib.closing(Fronts(config, keys, bound, process.path)))
        # not above: this imports torch and transformers, seconds in which the engine's process does the same
        from .front import Front

        front = Front(config, keys)
        info = process.ready()
        process.watch(config.restart)
        drafting = f"drafter {config.drafter}" if config.drafter else "no drafter"
        address = url_of(bound, https=config.ssl_certfile is not None)
        line = f"{PROG}: {address}/v1 serves {config.models[0]} ({drafting}, {info.place})"
        server = front.server(process.path, info, 0, ready=lambda: say(line), drain=fronts.drain)
        fronts.ready(info, server)
        # these are how a server is stopped; uvicorn ends open answers first and then raises them again
        signal.signal(signal.SIGTERM, lambda *_: None)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[bound])
        if config.uds is not None:
            Path(config.uds).unlink(missing_ok=True)
        fronts.close()
        return 1 if fronts.failed else 0


def say(line: str) -> None:
    """Print a line; where stdout takes none (a full disk, a closed pipe), nothing goes there any more."""
    try:
        print(line, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _require_extra() -> None:
    """Raises UserError unless everything that only the server needs is installed."""
    for package in EXTRA:
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{package} is not installed; install it with: pip install 'dflash-toolkit[serve]'")


if __name__ == "__main__":
    raise SystemExit(main())
