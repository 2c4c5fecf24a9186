"""States of recurrent layers: those of requests, and those that are kept for prefixes.

The next turn of a conversation begins with a prompt and most often its answer, which the chat template may render
differently. So states are kept near the end of each prompt, near the end of its answer, where two prompts diverge, and,
while slots are free, within long prompts. They are kept after whole pages only.
"""

from collections.abc import Sequence

from .device import Device
from .pages import PagePool
from .prefill_job import PrefillJob
from .request import Request

ANSWER_PAGES = 4  # the states of an answer are kept after a multiple of this many pages
PROMPT_PAGES = 16  # within a long prompt, states are kept at most once in this many pages


class RecurrentStates:
    """Allocates slots, copies states between requests and kept prefixes, and rebuilds states after a fault.

    The slots of requests that do not run are used for prefixes.

    Args:
        slots: number of requests that may hold states.
        recurrent: whether the target has such layers. Without them a prefix is pages alone.
        prefix_cache: whether requests continue from prefixes of others.
    """

    def __init__(self, device: Device, pool: PagePool, slots: int, *, recurrent: bool, prefix_cache: bool) -> None:
        self._device, self._pool = device, pool
        self.recurrent, self._prefix_cache = recurrent, prefix_cache
        self._room = pool.free_slots  # for snapshots: every request must find a slot
        pool.give_slots(range(slots, 0, -1))

    def find_prefix(self, request: Request, ids: Sequence[int], limit: int) -> tuple[list[int], int, int]:
        """Returns the pages, the slot and the parting of the longest known prefix, see `PagePool.match_state`."""
        if not self._prefix_cache or request.scores_prompt:
            return [], 0, 0
        if not self.recurrent:
            return self._pool.match(ids, limit, request.cache_salt), 0, 0
        return self._pool.match_state(ids, limit, request.cache_salt)

    def assign(self, request: Request, initial: int, parting: int, limit: int) -> None:
        """Gives a request a slot, and plans where its prefill keeps states for others.

        Args:
            initial: slot that its states are copied from; 0: they start empty.
            parting: tokens after which its prompt differs from a known one.
            limit: tokens of its prompt that a prefix may cover.
        """
        request.state, request.initial_state = self._pool.take_slot(), initial
        if self._prefix_cache and self.recurrent:
            # other prompts may differ where this one does; templates render the last tokens of a prompt differently in
            # the next one
            page = self._pool.page_size
            request.keep_states_at = tuple(sorted({parting, (limit - page // 8) // page * page} - {0}))

    def release(self, request: Request) -> None:
        self.drop_snapshot(request)
        if request.state:
            self._pool.give_slots([request.state])
        request.state, request.initial_state, request.keep_states_at, request.answer_state = 0, 0, (), None

    def begin(self, request: Request) -> None:
        """Copies the states that a request continues from into its slot, once."""
        if request.initial_state:
            slot, request.initial_state = request.initial_state, 0
            self._device.copy_states(slot, request.state)

    def reached(self, request: Request, ids: Sequence[int], tokens: int) -> None:
        """Keeps the states after a chunk of `tokens` tokens of a prompt `ids`, if they are useful."""
        at, page = request.prefilled, self._pool.page_size
        if at in request.keep_states_at:
            self.keep(request, ids[:at])
        elif self._prefix_cache and self.recurrent and at % page == 0:
            every = PROMPT_PAGES * page
            if (at - tokens) // every < at // every:
                self.keep(request, ids[:at], replaceable=True)

    def keep(self, request: Request, ids: Sequence[int], *, replaceable: bool = False) -> None:
        """Keeps the states after the tokens `ids` for other requests, unless they are kept already.

        Args:
            replaceable: only while slots are free.
        """
        node = self._pool.node_without_state(ids, request.pages, request.cache_salt)
        if node is None or not (slot := self._pool.take_slot(free=replaceable)):
            return
        try:
            self._device.copy_states(request.state, slot)
        except Exception:
            self._pool.give_slots([slot])
            raise
        self._pool.keep_state(node, slot, replaceable=replaceable)

    # ---- answers ---------------------------------------------------------------------------------------

    def snapshot(self, requests: Sequence[Request]) -> None:
        """Copies the states after some rows of blocks in flight, if they end a page after which states are kept.

        The device has the states before the newest block, and its rows. It is not yet known whether these are
        committed, see `keep_snapshot`. The next step may change the states.
        """
        if not (self._prefix_cache and self.recurrent):
            return
        every = ANSWER_PAGES * self._pool.page_size
        for request in requests:
            if len(request.blocks_in_flight) != 1 or request.snapshot is not None or not self._room:
                continue
            tokens = (request.length // every + 1) * every
            rows = tokens - request.length
            if rows > request.blocks_in_flight[0] or tokens >= len(request.prompt_ids) + request.limit:
                continue
            if not self._pool.free_slots:  # rather than states of others
                self._drop_answer_state(request)
            if slot := self._pool.take_slot():
                request.snapshot = slot, tokens
                self._room -= 1
                self._device.copy_states(request.state, slot, rows)

    def keep_snapshot(self, request: Request) -> None:
        """Keeps the snapshot for other requests if its rows were committed, instead of an earlier one of the answer."""
        if request.snapshot is None:
            return
        slot, tokens = request.snapshot
        node = None
        if tokens <= request.length and not request.poisoned:
            ids = request.known_ids[:tokens]
            node = self._pool.node_without_state(ids, request.pages, request.cache_salt)
        if node is None:
            self.drop_snapshot(request)
            return
        request.snapshot = None
        self._room += 1
        self._pool.keep_state(node, slot)
        self._drop_answer_state(request)
        request.answer_state = node

    def _drop_answer_state(self, request: Request) -> None:
        if request.answer_state is not None:
            self._pool.drop_state(request.answer_state.state)
            request.answer_state = None

    def drop_snapshot(self, request: Request) -> None:
        if request.snapshot is not None:
            self._pool.give_slots(request.snapshot[:1])
            request.snapshot = None
            self._room += 1

    def rebuild(self, request: Request, tokens: int, chunk: int) -> None:
        """Computes the states after the first `tokens` tokens again, as a fault leaves them undefined."""
        ids = request.known_ids[:tokens] if self.recurrent else []
        for start in range(0, len(ids), chunk):
            job = PrefillJob(ids[start : start + chunk], start, request.pages, request.state)
            self._device.start_prefill([job]).run()
