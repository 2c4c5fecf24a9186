"""dflash-serve: an OpenAI-compatible server for a target and its drafter."""

import contextlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_toolkit.config import UserError, from_mapping, given_values, option, options, run_command
from dflash_toolkit.options import ModelOptions
from dflash_toolkit.runtime.options import EngineOptions

from .external import OWN, ExternalOptions, check_own, offered, split, start
from .parsing.choice import REASONING_PARSERS, TOOL_CALL_PARSERS

PROG = "dflash-serve"
DESCRIPTION = """\
Serve a target over OpenAI's API, with a drafter that makes it faster and changes nothing else. Without a drafter
the same server decodes plainly. Requests are decoded together and come and go at every step."""
EXTRA = ("fastapi", "pydantic", "uvicorn", "prometheus_client", "msgspec")  # what `dflash-toolkit[serve]` installs


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig(ModelOptions):
    """The options of `dflash-serve`."""

    drafter: str | None = option(None, "the drafter: Hugging Face id or directory (default: decode plainly)")
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is every IPv4 interface")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    external: ExternalOptions = options(ExternalOptions, flat=True)
    runtime: EngineOptions = options(EngineOptions, flat=True)
    api_key: str | None = option(None, "clients must send this as their API key (default: none is asked for)")
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
    drain_timeout: float = option(25.0, "seconds that open answers get to finish when the server is told to stop")
    served_model_name: str | None = option(None, "the name clients ask for (default: the target, as given)")

    def __post_init__(self) -> None:
        ModelOptions.__post_init__(self)
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; it must be in 0..65535")
        for name in ("host", "api_key", "served_model_name"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is empty")

    @property
    def model(self) -> str:
        """The name clients ask for."""
        return self.served_model_name or self.target


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_command(lambda: _dispatch(sys.argv[1:] if argv is None else argv))


def _dispatch(argv: Sequence[str]) -> None:
    own, passed = split(argv)
    given, source = given_values(ServeConfig, own, PROG, DESCRIPTION)
    config = from_mapping(ServeConfig, given, source)
    if config.external.engine != OWN:
        start(config, given, passed)
    check_own(config, given, passed)
    with offered(config, given):
        _run(config)


def _run(config: ServeConfig) -> None:
    _require_extra()
    from .processes import EngineProcess
    from .server import Server, bind, url_of

    with bind(config.host, config.port) as bound, contextlib.closing(EngineProcess(config)) as process:
        process.start()
        # not above: this imports torch and transformers, seconds in which the engine's process does the same
        import transformers

        from dflash_toolkit.models.target import load_config, load_tokenizer
        from dflash_toolkit.runtime import EngineClient

        from .app import create_app
        from .defaults import sampling_defaults

        transformers.utils.logging.disable_progress_bar()  # errors are one line
        load_config(config.target)  # says first if there is no such target
        defaults = sampling_defaults(config.target) if config.sampling_defaults == "model" else {}
        tokenizer = load_tokenizer(config.target)
        info = process.ready()
        engine = EngineClient(process.path, info, tokenizer)
        drafting = f"drafter {config.drafter}" if config.drafter else "no drafter"
        line = f"{PROG}: {url_of(bound)}/v1 serves {config.model} ({drafting}, {info.place})"
        parsers = (config.tool_call_parser, config.reasoning_parser)
        app = create_app(engine, config.model, config.api_key, defaults, *parsers)
        server = Server(app, ready=lambda: print(line, flush=True), stop=engine.close, drain_s=config.drain_timeout)
        # Ctrl-C is how a server is stopped; uvicorn ends open answers first and then raises it again
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[bound])


def _require_extra() -> None:
    """Raises UserError unless everything that only the server needs is installed."""
    for package in EXTRA:
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{package} is not installed; install it with: pip install 'dflash-toolkit[serve]'")


if __name__ == "__main__":
    raise SystemExit(main())
