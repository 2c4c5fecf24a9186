"""What an engine and those who ask it say to each other, as msgpack over a Unix socket. Without torch.

The engine sends one `Update` a step to everybody who waits for something. Either side notices the other's end at once:
its socket is closed.
"""

import contextlib
import socket
from typing import Any

import msgspec

from ..generation import FinishReason, PromptLogprobs, TokenLogprobs
from ..sampling import SamplingParams
from .request import Capacity

HEADER = 4  # bytes that say how long the message behind them is
CHUNK = 1 << 16


class Ask(msgspec.Struct, tag="ask", array_like=True):
    """Requests that differ in prompt and seed only."""

    numbers: list[int]  # what this side calls them
    prompts: list[list[int]]
    seeds: list[int]
    params: SamplingParams
    key: str = ""  # whose requests they are: turns are fair over keys
    priority: int = 0  # lower is earlier
    name: str = ""  # for the log


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    """Nobody waits for these any more."""

    numbers: list[int]


class Ping(msgspec.Struct, tag="ping", array_like=True):
    """Asks for a `Pong`, which comes between two steps."""


class Compile(msgspec.Struct, tag="compile", array_like=True):
    """Asks for the grammar of requests to come to be read, and for a `Compiled`."""

    number: int
    params: SamplingParams


class Compiled(msgspec.Struct, tag="compiled", array_like=True):
    """A grammar is ready."""

    number: int
    error: str | None  # or cannot be used, and why


class Item(msgspec.Struct, array_like=True):
    """What one step added to one answer."""

    number: int
    tokens: list[int]  # the stop token included
    drafted: int  # -1: the prefill, which verifies nothing
    accepted: int
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs]
    cached_tokens: int  # of the prompt, brought by a prefix hit
    prompt_logprobs: PromptLogprobs | None = None  # with the first token, if the request asked for them
    error: str | None = None  # the request failed, or was refused; nothing more comes


class Update(msgspec.Struct, tag="update", array_like=True):
    """What one step brought."""

    items: list[Item]


class Stats(msgspec.Struct):
    """The engine's counts and what it holds now."""

    running: int = 0
    waiting: int = 0
    cache_used: float = 0.0  # share of the pages that requests hold
    prefix_queries: int = 0  # prompt tokens that were looked up
    prefix_hits: int = 0  # of them, found
    preemptions: int = 0
    draft_lengths: dict[int, int] = {}  # steps by drafted tokens a row
    step_rows: dict[int, int] = {}  # steps by rows that the target read
    tree_rows: dict[int, int] = {}  # of them, those over draft trees
    tree_nodes: list[int] = []  # of draft trees, verified, by their depth
    tree_nodes_accepted: list[int] = []


class Pong(msgspec.Struct, tag="pong", array_like=True):
    """The engine is alive."""

    stats: Stats


class Info(msgspec.Struct, tag="info", array_like=True):
    """The engine takes requests."""

    capacity: Capacity
    max_num_seqs: int  # requests decoded together
    block_size: int  # of the longest draft, its anchor included
    place: str  # what it computes in and on
    draft_sample_method: str  # where a request has a temperature


class Lost(msgspec.Struct, tag="lost", array_like=True):
    """The engine serves nothing any more, and why.

    Attributes:
        gpus: of a target that it does not compute but others may, on how many; 0 where that is not the reason.
    """

    reason: str
    gpus: int = 0


Message = Ask | Cancel | Ping | Update | Pong | Info | Lost | Compile | Compiled
_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


class Channel:
    """Messages over a connected stream socket, which never waits."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.gone = False
        self._came = bytearray()
        self._left = bytearray()  # what the socket did not take yet

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether `flush` has something to do."""
        return bool(self._left)

    def send(self, message: Any) -> None:
        """Raises OSError where the other side has gone."""
        body = _encoder.encode(message)
        self._left += len(body).to_bytes(HEADER, "little") + body
        self.flush()

    def flush(self) -> None:
        """Hand over what the socket takes now. Raises OSError where the other side has gone."""
        with contextlib.suppress(BlockingIOError):
            while self._left:
                del self._left[: self.socket.send(self._left)]

    def receive(self) -> list[Any]:
        """The messages that are there; afterwards `gone` says whether the other side is."""
        with contextlib.suppress(BlockingIOError):
            try:
                while chunk := self.socket.recv(CHUNK):
                    self._came += chunk
                self.gone = True
            except ConnectionError:
                self.gone = True
        found = []
        at = 0
        while len(self._came) - at >= HEADER:
            end = at + HEADER + int.from_bytes(self._came[at : at + HEADER], "little")
            if len(self._came) < end:
                break
            found.append(_decoder.decode(self._came[at + HEADER : end]))
            at = end
        del self._came[:at]
        return found

    def close(self) -> None:
        self.socket.close()
