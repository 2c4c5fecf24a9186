"""dflash-serve: put a target and its drafter behind an OpenAI-compatible endpoint."""

import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_toolkit import Target, UserError, load_drafter
from dflash_toolkit.checkpoint import check_fits
from dflash_toolkit.config import knob, parse_cli, run_command


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """One server."""

    target: str = knob(help="Hugging Face id or directory of the model to serve")
    drafter: str | None = knob(None, "its DFlash drafter; without one the target decodes plainly")
    host: str = knob("127.0.0.1", "address to listen on")
    port: int = knob(8000, "port; 0 takes a free one")
    device: str = knob("auto", "auto, cpu, cuda, cuda:1, ...")
    dtype: str = knob("auto", "compute type", choices=("auto", "bfloat16", "float16", "float32"))
    api_key: str | None = knob(None, "clients must send it as a bearer token")
    served_model_name: str | None = knob(None, "the name clients use (default: the target's)")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; it must be in 0..65535")


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Exit codes: 0 stopped, 2 a mistake (one line)."""
    description = "Serve TARGET, drafted by DRAFTER, behind OpenAI's API. The output is the target's own."
    return run_command(lambda: serve(parse_cli(ServeConfig, argv, "dflash-serve", description)))


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. Raises UserError: port in use, no such host, not allowed."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --port or --host"
        ) from error
    return listener


def serve(config: ServeConfig) -> int:
    """Bind, load, serve until interrupted."""
    try:
        import uvicorn

        from .app import create_app
        from .engine import Engine
    except ImportError as error:
        raise UserError(f"dflash-serve needs {error.name}: pip install 'dflash-toolkit[serve]'") from error

    listener = bind(config.host, config.port)  # before the weights: a port in use should not cost a minute
    target = Target.load(config.target, config.device, config.dtype)
    drafter = None
    if config.drafter is not None:
        drafter = load_drafter(config.drafter, target.device, target.dtype)
        check_fits(drafter.config, target.config, target.embedding.num_embeddings)
    name = config.served_model_name or config.target
    app = create_app(Engine(target, drafter), name, config.api_key)
    host, port = listener.getsockname()[:2]
    block = f"drafter {config.drafter}, block {drafter.config.block_size}" if drafter else "no drafter"
    dtype = str(target.dtype).removeprefix("torch.")
    print(f"serving {name} on http://{host}:{port}/v1 ({target.device}, {dtype}, {block})", file=sys.stderr, flush=True)
    try:
        uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)).run(sockets=[listener])
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
