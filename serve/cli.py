"""dflash-serve: an OpenAI-compatible server for a target and its drafter."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import transformers

from dflash_toolkit.checkpoint import check_fits, load_drafter
from dflash_toolkit.config import UserError, knob, parse_cli, run_command
from dflash_toolkit.drafter import Drafter
from dflash_toolkit.target import Target, load_config

PROG = "dflash-serve"
DESCRIPTION = """\
Serve a target over OpenAI's API, with a drafter that makes it faster and changes nothing else. Without a drafter
the same server decodes plainly. Requests are answered one at a time, in the order of arrival."""
EXTRA = ("fastapi", "pydantic", "uvicorn", "prometheus_client")  # what `dflash-toolkit[serve]` installs


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """The knobs of `dflash-serve`."""

    target: str = knob(help="the target: Hugging Face id or directory")
    drafter: str | None = knob(None, "the drafter: Hugging Face id or directory (default: decode plainly)")
    host: str = knob("127.0.0.1", "address to listen on; 0.0.0.0 is every IPv4 interface")
    port: int = knob(8000, "port to listen on; 0 takes a free one")
    device: str = knob("auto", "auto, cpu or cuda")
    dtype: str = knob("auto", "auto, bfloat16, float16 or float32")
    api_key: str | None = knob(None, "clients must send this as their API key (default: none is asked for)")
    served_model_name: str | None = knob(None, "the name clients ask for (default: the target, as given)")

    def __post_init__(self) -> None:
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
    transformers.utils.logging.disable_progress_bar()  # errors are one line
    return run_command(lambda: _run(parse_cli(ServeConfig, argv, PROG, DESCRIPTION)))


def _run(config: ServeConfig) -> None:
    _require_extra()
    from .app import create_app
    from .engine import Engine
    from .server import Server, listen, url_of

    try:
        # what can be wrong is looked at before the target's weights, which take longest
        with listen(config.host, config.port) as listener:
            target, drafter = _load(config)
            engine = Engine(target, drafter)
            drafting = f"drafter {config.drafter}" if config.drafter else "no drafter"
            place = f"{str(target.dtype).removeprefix('torch.')} on {target.device}"
            line = f"{PROG}: {url_of(listener)}/v1 serves {config.model} ({drafting}, {place})"
            app = create_app(engine, config.model, config.api_key)
            Server(app, ready=lambda: print(line, flush=True), stop=engine.close).run(sockets=[listener])
    except KeyboardInterrupt:
        pass  # Ctrl-C is how a server is stopped; uvicorn ends open answers first and then raises it again


def _require_extra() -> None:
    """Raises UserError unless everything that only the server needs is installed."""
    for package in EXTRA:
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{package} is not installed; install it with: pip install 'dflash-toolkit[serve]'")


def _load(config: ServeConfig) -> tuple[Target, Drafter | None]:
    if config.drafter is None:
        return Target.load(config.target, config.device, config.dtype), None
    drafter = load_drafter(config.drafter)
    check_fits(drafter.config, load_config(config.target))
    target = Target.load(config.target, config.device, config.dtype)
    return target, drafter.to(target.device, target.dtype)


if __name__ == "__main__":
    raise SystemExit(main())
