"""The queue of requests that wait for their prefill: fair between API keys, between groups, and between requests.

Lower priorities come first. Among keys with equal priority, the key that has used the fewest tokens comes first (Sheng
et al. 2024, "Fairness in Serving Large Language Models": virtual token counters). Within a key, the smallest requests
come first. The size of a request includes the tokens that its group has used; once its prompt has started, tokens that
are computed or cached do not count. Requests of one group run one after the other.

Small requests cannot delay a large one for ever: in every turn, the oldest request of one key always advances; keys
take turns. If there is a free row, it starts at every second opportunity.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from .request import Request

ANSWER_WEIGHT = 2  # cost of an answer's token in tokens of a prompt, as in the paper
MAX_SKIPPED = 8  # waiting requests skipped in a turn before all others also wait
HEAP_SLACK = 64  # a heap is rebuilt if it has this many more stale entries than valid ones


@dataclass(slots=True, eq=False)
class _Group:
    """Requests that were sent together; they start one after the other."""

    name: object
    waiting: deque[Request] = field(default_factory=deque)
    given: int = 0  # tokens, see `WaitQueue.charge`
    first: Request | None = None  # the one that may start or has started; the others wait for it


@dataclass(slots=True, eq=False)
class _Key:
    given: int  # tokens, see `WaitQueue.charge`
    turn: int  # turn in which its oldest request was last guaranteed to advance
    groups: dict[object, _Group] = field(default_factory=dict)
    by_size: list[tuple[int, int, int, Request]] = field(default_factory=list)  # priority, tokens, order: a heap
    by_age: list[tuple[int, int, Request]] = field(default_factory=list)  # priority, order: a heap
    waiting: int = 0
    members: int = 0  # requests in the queue or decoding


@dataclass(slots=True, eq=False)
class QueueEntry:
    """The queue's data about a request, from its arrival to its end."""

    order: int  # order of arrival
    key: _Key
    group: _Group
    size: int = 0  # tokens of it and of earlier requests of its group
    waits: bool = True  # it has no pages
    skipped: bool = False  # skipped in this turn
    overtaken: int = 0  # number of requests that overtook it while it found too few pages
    failed_at: int = -1  # `PagePool.changes` when it last found too few pages


class WaitQueue:
    """Requests that wait, and requests with partly computed prompts (`started`). Its length counts the former."""

    def __init__(self) -> None:
        self.started: list[Request] = []
        self._entries: dict[Request, QueueEntry] = {}
        self._keys: dict[str, _Key] = {}
        self._arrivals, self._turn, self._waiting = itertools.count(), 0, 0
        self._skipped: list[Request] = []

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[Request]:
        """Yields the requests that wait, key by key."""
        return (r for key in self._keys.values() for group in key.groups.values() for r in group.waiting)

    def __contains__(self, request: Request) -> bool:
        """Returns whether the request was added and has not ended; it may be decoding."""
        return request in self._entries

    def entry(self, request: Request) -> QueueEntry:
        return self._entries[request]

    # ---- adding and removing ---------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Adds a new request, or a preempted one, which keeps its order."""
        key = self._keys.setdefault(request.key, _Key(0, self._turn))
        if not key.groups:  # a new key starts at the level of the others, so that keys cannot save up tokens
            key.given = max(key.given, min((k.given for k in self._keys.values() if k is not key), default=0))
        entry = self._entries.get(request)
        if entry is None:
            name: object = (request.priority, request.group) if request.group else request
            group = key.groups.setdefault(name, _Group(name))
            entry = self._entries[request] = QueueEntry(next(self._arrivals), key, group)
            key.members += 1
        else:
            group = entry.group = key.groups[request] = _Group(request)
            entry.waits = True
        group.waiting.append(request)
        key.waiting += 1
        self._waiting += 1
        heapq.heappush(key.by_age, (request.priority, entry.order, request))
        if group.first is None:
            self._offer_next(key, group)

    def start(self, request: Request) -> None:
        """Moves a request that has its pages to those that have started."""
        self._stop_waiting(request)
        self.started.append(request)

    def remove(self, request: Request, *, ended: bool = False) -> None:
        """Removes a request that decodes, is preempted (and added again) or has `ended`."""
        entry = self._entries[request]
        key, group = entry.key, entry.group
        if entry.waits:
            self._stop_waiting(request)
        elif request in self.started:
            self.started.remove(request)
        if group.first is request:
            group.first = None
            self._offer_next(key, group)
        if ended:
            del self._entries[request]
            key.members -= 1
            if not key.members:
                del self._keys[request.key]

    def _stop_waiting(self, request: Request) -> None:
        entry = self._entries[request]
        entry.group.waiting.remove(request)
        entry.waits = False
        key = entry.key
        key.waiting -= 1
        self._waiting -= 1
        if len(key.by_age) > 2 * key.waiting + HEAP_SLACK:
            key.by_age = [item for item in key.by_age if self._waits(item[-1])]
            heapq.heapify(key.by_age)
        if len(key.by_size) > 2 * len(key.groups) + HEAP_SLACK:
            key.by_size = [item for item in key.by_size if self._waits(item[-1])]
            heapq.heapify(key.by_size)

    def _offer_next(self, key: _Key, group: _Group) -> None:
        """Lets the first waiting request of a group start; removes an empty group."""
        if not group.waiting:
            key.groups.pop(group.name, None)
            return
        request = group.first = group.waiting[0]
        self._entries[request].size = group.given + len(request.prompt_ids) + len(request.tokens)
        self._offer(request)

    def _offer(self, request: Request) -> None:
        entry = self._entries[request]
        heapq.heappush(entry.key.by_size, (request.priority, entry.size, entry.order, request))

    # ---- turns -----------------------------------------------------------------------------------------

    def charge(self, request: Request, prompt: int = 0, answer: int = 0) -> None:
        """Counts computed tokens of a request's prompt and answer."""
        entry, tokens = self._entries[request], prompt + ANSWER_WEIGHT * answer
        entry.group.given += tokens
        entry.key.given += tokens

    def begin_turn(self) -> None:
        self._turn += 1
        skipped, self._skipped = self._skipped, []
        for request in skipped:
            entry = self._entries.get(request)
            if entry is not None and entry.skipped:
                entry.skipped = False
                if entry.waits:
                    self._offer(request)

    def guaranteed(self, may_start: bool) -> Request | None:
        """Returns the request that always advances in this turn.

        It is the oldest request of the key with the least recent guarantee.
        """
        oldest: dict[_Key, tuple[int, int, Request]] = {}
        for request in self.started:
            entry = self._entries[request]
            item = (request.priority, entry.order, request)
            oldest[entry.key] = min(oldest.get(entry.key, item), item)
        if may_start:
            for key in self._keys.values():
                while key.by_age and not self._waits(key.by_age[0][-1]):
                    heapq.heappop(key.by_age)
                if key.by_age:
                    oldest[key] = min(oldest.get(key, key.by_age[0]), key.by_age[0])
        if not oldest:
            return None
        return oldest[min(oldest, key=lambda key: (oldest[key][0], key.turn, oldest[key][1]))][-1]

    def use_guarantee(self, request: Request) -> None:
        """Records that the guaranteed request has advanced; the next guarantee goes to another key."""
        self._entries[request].key.turn = self._turn

    def next(self, may_start: bool) -> Request | None:
        """Returns the next request that was not skipped; unless `may_start`, only one that has started."""
        best: tuple[int, int, int, int, Request] | None = None
        for request in self.started:
            entry = self._entries[request]
            if not entry.skipped:
                left = entry.size - request.prefilled
                found = (request.priority, entry.key.given, left, entry.order, request)
                best = min(best or found, found)
        if may_start and sum(self._waits(request) for request in self._skipped) < MAX_SKIPPED:
            for key in self._keys.values():
                while key.by_size and not self._may_start(key.by_size[0][-1]):
                    heapq.heappop(key.by_size)
                if key.by_size:
                    priority, size, order, request = key.by_size[0]
                    found = (priority, key.given, size, order, request)
                    best = min(best or found, found)
        return best[-1] if best else None

    def skip(self, request: Request) -> None:
        """Skips a request for the rest of this turn."""
        self._entries[request].skipped = True
        self._skipped.append(request)

    def unskip(self, request: Request) -> None:
        """Lets a started request that was skipped continue in this turn."""
        self._entries[request].skipped = False

    def _waits(self, request: Request) -> bool:
        entry = self._entries.get(request)
        return entry is not None and entry.waits

    def _may_start(self, request: Request) -> bool:
        entry = self._entries.get(request)
        return entry is not None and entry.waits and not entry.skipped and entry.group.first is request
