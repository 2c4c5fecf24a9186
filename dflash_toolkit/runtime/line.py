"""Whose prompt is computed next: a fair order over keys, over what was asked for together, and over requests.

Lower priorities come first. Of the keys with equal ones that comes first which was given the fewest tokens (Sheng et
al. 2024, "Fairness in Serving Large Language Models": virtual token counters). Of a key's requests those come first
that ask for the fewest tokens, with what their group was given counted in: what was asked for together waits for its
kind. Besides, in every turn the oldest request of one key, in rotation, is due, and goes on whatever others ask for;
where there is room for one more, it starts at every second chance. So a large one is not kept waiting by small ones.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request import Request

ANSWER_WEIGHT = 2  # of an answer's token beside a prompt's, as in that paper
LOOKS = 8  # requests that wait and are passed over in a turn, before the rest of the line waits with them
SLACK = 64  # entries of requests that are gone, which a heap may hold beside as many as there are others


@dataclass(slots=True, eq=False)
class _Group:
    """Requests that were asked for together; they start one after the other."""

    name: object
    waiting: "deque[Request]" = field(default_factory=deque)
    given: int = 0  # tokens, as of a key
    first: "Request | None" = None  # which may start or has, and the others wait for


@dataclass(slots=True, eq=False)
class _Key:
    given: int  # tokens, see `Line.charge`
    due: int  # the turn in which its oldest request last went on
    groups: dict[object, _Group] = field(default_factory=dict)
    by_size: "list[tuple[int, int, int, Request]]" = field(default_factory=list)  # priority, tokens, order: a heap
    by_age: "list[tuple[int, int, Request]]" = field(default_factory=list)  # priority, order: a heap
    waiting: int = 0
    members: int = 0  # in line or decoding


@dataclass(slots=True, eq=False)
class Place:
    """A request's, from its arrival to its end."""

    order: int  # of arrival
    key: _Key
    group: _Group
    size: int = 0  # tokens that it and those of its group before it ask for
    waits: bool = True  # it has no pages
    aside: bool = False  # it was passed over in this turn
    overtaken: int = 0  # by how many, while it found no pages
    looked: int = -1  # the state of the pool in which it found none


class Line:
    """Requests that wait, and those that have started with their prompts. Its length is that of the former."""

    def __init__(self) -> None:
        self.started: list[Request] = []
        self._keys: dict[str, _Key] = {}
        self._arrivals, self._turn, self._waiting = itertools.count(), 0, 0
        self._aside: list[Request] = []

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> "Iterator[Request]":
        """Those that wait, key by key."""
        return (r for key in self._keys.values() for group in key.groups.values() for r in group.waiting)

    # ---- coming and going --------------------------------------------------------------------------------

    def add(self, request: "Request") -> None:
        """A new request, or one that gave way and keeps its place."""
        key = self._keys.setdefault(request.key, _Key(0, self._turn))
        if not key.groups:  # it begins where the others are: nobody saves up for later
            key.given = max(key.given, min((k.given for k in self._keys.values() if k is not key), default=0))
        if request.place is None:
            name: object = (request.priority, request.group) if request.group else request
            group = key.groups.setdefault(name, _Group(name))
            request.place = Place(next(self._arrivals), key, group)
            key.members += 1
        else:
            group = request.place.group = key.groups[request] = _Group(request)
            request.place.waits = True
        group.waiting.append(request)
        key.waiting += 1
        self._waiting += 1
        heapq.heappush(key.by_age, (request.priority, request.place.order, request))
        if group.first is None:
            self._next_of(key, group)

    def start(self, request: "Request") -> None:
        """It has its pages."""
        self._no_longer_waits(request)
        self.started.append(request)

    def leave(self, request: "Request", *, ended: bool = False) -> None:
        """It waits for no turn any more: it decodes, gives way (and is added again) or has `ended`."""
        place = self.place(request)
        key, group = place.key, place.group
        if place.waits:
            self._no_longer_waits(request)
        elif request in self.started:
            self.started.remove(request)
        if group.first is request:
            group.first = None
            self._next_of(key, group)
        if ended:
            request.place = None
            key.members -= 1
            if not key.members:
                del self._keys[request.key]

    def place(self, request: "Request") -> Place:
        assert request.place is not None, "a request that is not in line"
        return request.place

    def _no_longer_waits(self, request: "Request") -> None:
        place = self.place(request)
        place.group.waiting.remove(request)
        place.waits = False
        place.key.waiting -= 1
        self._waiting -= 1
        key = place.key
        if len(key.by_age) > 2 * key.waiting + SLACK:
            key.by_age = [entry for entry in key.by_age if _waits(entry[-1])]
            heapq.heapify(key.by_age)
        if len(key.by_size) > 2 * len(key.groups) + SLACK:
            key.by_size = [entry for entry in key.by_size if _waits(entry[-1])]
            heapq.heapify(key.by_size)

    def _next_of(self, key: _Key, group: _Group) -> None:
        """The first of a group that waits may start; a group of nobody is gone."""
        if not group.waiting:
            key.groups.pop(group.name, None)
            return
        request = group.first = group.waiting[0]
        self.place(request).size = group.given + len(request.prompt_ids) + len(request.tokens)
        self._offer(request)

    def _offer(self, request: "Request") -> None:
        place = self.place(request)
        heapq.heappush(place.key.by_size, (request.priority, place.size, place.order, request))

    # ---- turns -------------------------------------------------------------------------------------------

    def charge(self, request: "Request", prompt: int = 0, answer: int = 0) -> None:
        """A request was given the computation of so many tokens of its prompt, and so many of its answer."""
        place, tokens = self.place(request), prompt + ANSWER_WEIGHT * answer
        place.group.given += tokens
        place.key.given += tokens

    def begin(self) -> None:
        """A turn."""
        self._turn += 1
        aside, self._aside = self._aside, []
        for request in aside:
            if request.place is not None and request.place.aside:
                request.place.aside = False
                if request.place.waits:
                    self._offer(request)

    def due(self, may_start: bool) -> "Request | None":
        """Whose turn it is whatever others ask for: the oldest of the key that has waited longest to be asked."""
        oldest: dict[_Key, tuple[int, int, Request]] = {}
        for request in self.started:
            place = self.place(request)
            entry = (request.priority, place.order, request)
            oldest[place.key] = min(oldest.get(place.key, entry), entry)
        if may_start:
            for key in self._keys.values():
                while key.by_age and not _waits(key.by_age[0][-1]):
                    heapq.heappop(key.by_age)
                if key.by_age:
                    oldest[key] = min(oldest.get(key, key.by_age[0]), key.by_age[0])
        if not oldest:
            return None
        return oldest[min(oldest, key=lambda key: (oldest[key][0], key.due, oldest[key][1]))][-1]

    def went(self, request: "Request") -> None:
        """Who was due has gone on; of another key the oldest is next."""
        self.place(request).key.due = self._turn

    def next(self, may_start: bool) -> "Request | None":
        """Who comes next of those not passed over; only of those that have started unless another may."""
        best: tuple[int, int, int, int, Request] | None = None
        for request in self.started:
            place = self.place(request)
            if not place.aside:
                found = (request.priority, place.key.given, place.size, place.order, request)
                best = min(best or found, found)
        if may_start and sum(_waits(request) for request in self._aside) < LOOKS:
            for key in self._keys.values():
                while key.by_size and not _may_start(key.by_size[0][-1]):
                    heapq.heappop(key.by_size)
                if key.by_size:
                    priority, size, order, request = key.by_size[0]
                    found = (priority, key.given, size, order, request)
                    best = min(best or found, found)
        return best[-1] if best else None

    def pass_over(self, request: "Request") -> None:
        """It cannot go on in this turn."""
        self.place(request).aside = True
        self._aside.append(request)

    def go_on(self, request: "Request") -> None:
        """One that has started and was passed over can."""
        self.place(request).aside = False


def _waits(request: "Request") -> bool:
    return request.place is not None and request.place.waits


def _may_start(request: "Request") -> bool:
    place = request.place
    return place is not None and place.waits and not place.aside and place.group.first is request
