"""Slots for the states of recurrent layers: one for each request, and some for prefixes."""

from collections.abc import Sequence

from .device import Device
from .pages import PagePool
from .prefill_job import PrefillJob
from .request import Request


class RecurrentStates:
    """Allocates slots, copies states between requests and kept prefixes, and rebuilds states after a fault.

    Args:
        slots: number of requests that may hold states.
        recurrent: whether the target has such layers. Without them a prefix is pages alone.
        prefix_cache: whether requests continue from prefixes of others.
    """

    def __init__(self, device: Device, pool: PagePool, slots: int, *, recurrent: bool, prefix_cache: bool) -> None:
        self._device, self._pool = device, pool
        self.recurrent, self._prefix_cache = recurrent, prefix_cache
        self.free = list(range(slots, 0, -1))

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
        request.state, request.initial_state = self.free.pop(), initial
        if self._prefix_cache and self.recurrent:
            # other prompts may differ where this one does, and a continuation can use all of its pages
            whole = limit // self._pool.page_size * self._pool.page_size
            request.keep_states_at = tuple(sorted({parting, whole} - {0}))

    def release(self, request: Request) -> None:
        if request.state:
            self.free.append(request.state)
        request.state, request.initial_state, request.keep_states_at = 0, 0, ()

    def begin(self, request: Request) -> None:
        """Copies the states that a request continues from into its slot, once."""
        if request.initial_state:
            slot, request.initial_state = request.initial_state, 0
            self._device.copy_states(slot, request.state)

    def keep(self, request: Request, ids: list[int]) -> None:
        """Keeps the states after the tokens `ids` for other requests, unless they are kept already."""
        slot = self._pool.keep_state(ids, request.pages, request.cache_salt)
        if slot:
            try:
                self._device.copy_states(request.state, slot)
            except Exception:
                self._pool.drop_state(slot)
                raise

    def rebuild(self, request: Request, tokens: int, chunk: int) -> None:
        """Computes the states after the first `tokens` tokens again, as a fault leaves them undefined."""
        ids = request.known_ids[:tokens] if self.recurrent else []
        for start in range(0, len(ids), chunk):
            job = PrefillJob(ids[start : start + chunk], start, request.pages, request.state)
            self._device.start_prefill([job]).run()
