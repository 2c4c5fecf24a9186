"""Messages between an engine and its front ends, as msgpack over a Unix socket. Without torch.

The engine sends one `Update` per step to every front end that waits for results. When one side ends, the socket closes
and the other side notices at once.
"""

import contextlib
import socket
from typing import Any, Literal

import msgspec

from ..generation import FinishReason, PromptLogprobs, TokenLogprobs
from ..sampling import SamplingParams
from .request import Capacity

HEADER = 4  # bytes before a message that hold its length
CHUNK = 1 << 16


class Ask(msgspec.Struct, tag="ask", array_like=True):
    """Requests that differ in prompt and seed only."""

    numbers: list[int]  # identify them to the front end
    prompts: list[list[int]]
    seeds: list[int]
    params: SamplingParams
    key: str = ""  # API key; turns are fair between keys
    priority: int = 0  # lower is earlier
    name: str = ""  # for the log
    cache_salt: str = ""  # separates cached prefixes
    store: bool = True  # whether a trainer may keep the tokens


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    """Ends requests that the front end does not wait for any more."""

    numbers: list[int]


class Ping(msgspec.Struct, tag="ping", array_like=True):
    """Asks for a `Pong`, which comes between two steps."""


class Compile(msgspec.Struct, tag="compile", array_like=True):
    """Asks the engine to compile the grammar of future requests; `Compiled` is the reply. `Cancel` ends it."""

    number: int
    params: SamplingParams
    key: str = ""  # API key; each may have some grammars at a time


class Compiling(msgspec.Struct, tag="compiling", array_like=True):
    """A grammar is compiled from now on, or waits for others."""

    number: int
    waits: bool


class Compiled(msgspec.Struct, tag="compiled", array_like=True):
    """A grammar is compiled, or cannot be used."""

    number: int
    error: str | None  # why it cannot be used
    busy: bool = False  # it can be used later: too many others are compiled


class ReplaceWeights(msgspec.Struct, tag="replace_weights", array_like=True):
    """Asks the engine to use the weights of a directory; `Replaced` is the reply."""

    number: int
    folder: str
    part: Literal["target", "drafter"]


class Replaced(msgspec.Struct, tag="replaced", array_like=True):
    """The weights of a directory are in use, or could not be used."""

    number: int
    error: str | None  # why they could not be used
    versions: tuple[int, int]  # target and drafter, see `Engine.versions`


class RollBack(msgspec.Struct, tag="roll_back", array_like=True):
    """Asks for the drafter before the current one; `Replaced` is the reply."""

    number: int


class SaveDrafter(msgspec.Struct, tag="save_drafter", array_like=True):
    """Asks for the served drafter in a directory; `Replaced` is the reply."""

    number: int
    folder: str | None  # None: the one that the server was started with


class Item(msgspec.Struct, array_like=True):
    """The tokens that one step added to one answer."""

    number: int
    tokens: list[int]  # the stop token included
    drafted: int  # -1: the prefill, which verifies nothing
    accepted: int
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs]
    cached_tokens: int  # prompt tokens from a prefix hit
    prompt_logprobs: PromptLogprobs | None = None  # with the first token, if the request asked for them
    error: str | None = None  # the request failed, or was refused; nothing more comes
    versions: tuple[int, int] = (0, 0)  # target and drafter, see `Engine.versions`


class Update(msgspec.Struct, tag="update", array_like=True):
    """The results of one step."""

    items: list[Item]


class Adaptation(msgspec.Struct):
    """The state of a trainer that follows the traffic."""

    steps: int = 0
    requests: int = 0  # in its memory
    bytes: int = 0
    learnt_from: int = 0  # requests until the served version
    held_out_acceptance_length: float | None = None
    live_acceptance_length: float | None = None
    promotions: int = 0
    rollbacks: int = 0
    busy_share: float = 0.0  # share of the last minute in which it worked
    error: str | None = None  # why it has ended


class Stats(msgspec.Struct):
    """The engine's counts, and how full it is now."""

    running: int = 0
    waiting: int = 0
    cache_used: float = 0.0  # share of the pages that requests hold
    prefix_queries: int = 0  # prompt tokens that were looked up
    prefix_hits: int = 0  # prompt tokens that were found
    preemptions: int = 0
    draft_lengths: dict[int, int] = {}  # steps by drafted tokens a row
    step_rows: dict[int, int] = {}  # steps by rows that the target read
    tree_rows: dict[int, int] = {}  # the same for steps over draft trees only
    tree_nodes: list[int] = []  # verified nodes of draft trees, by depth
    tree_nodes_accepted: list[int] = []
    versions: tuple[int, int] = (0, 0)  # target and drafter
    by_version: dict[int, tuple[int, int]] = {}  # steps and their tokens, by the drafter's version
    adaptation: Adaptation | None = None  # None: nothing is trained


class Pong(msgspec.Struct, tag="pong", array_like=True):
    """The engine is alive."""

    stats: Stats


class Info(msgspec.Struct, tag="info", array_like=True):
    """The engine accepts requests."""

    capacity: Capacity
    max_num_seqs: int  # requests decoded together
    block_size: int  # tokens of the longest draft, its anchor included
    place: str  # dtype and device
    draft_sample_method: str  # how drafts of requests with a temperature are chosen
    kv_cache_dtype: str  # fp8, or auto for that of the model


class Lost(msgspec.Struct, tag="lost", array_like=True):
    """The engine has failed, and why.

    Attributes:
        gpus: number of GPUs that an external engine needs for the target; 0 if that is not the reason.
    """

    reason: str
    gpus: int = 0


Message = (
    Ask | Cancel | Ping | Update | Pong | Info | Lost | Compile | Compiling | Compiled
    | ReplaceWeights | Replaced | RollBack | SaveDrafter
)  # fmt: skip
_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


class Channel:
    """Sends and receives messages over a connected stream socket, without blocking."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.gone = False
        self._came = bytearray()
        self._left = bytearray()  # bytes that the socket has not accepted yet

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether `flush` has anything to send."""
        return bool(self._left)

    def send(self, message: Any) -> None:
        """Sends a message. Raises OSError if the other side has closed."""
        body = _encoder.encode(message)
        self._left += len(body).to_bytes(HEADER, "little") + body
        self.flush()

    def flush(self) -> None:
        """Sends as much as the socket accepts now. Raises OSError if the other side has closed."""
        with contextlib.suppress(BlockingIOError):
            while self._left:
                del self._left[: self.socket.send(self._left)]

    def receive(self) -> list[Any]:
        """Returns the messages that have arrived. Afterwards `gone` is whether the other side has closed."""
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
