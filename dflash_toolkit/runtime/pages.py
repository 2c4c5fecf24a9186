"""Pages of the KV cache: who holds them, and which of them hold a prefix that another request may reuse.

Target and drafter keep their keys and values of a token in the same page, so a prefix hit brings both. Page 0 is the
null block: rows of a batch that stand for no request write there.

States of recurrent layers are large, so they are kept behind few pages, and a prefix goes as far as the last of those.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Node:
    """A full page in the prefix tree."""

    id: int  # never used twice, so a child of an evicted page can never be reached again
    page: int
    key: tuple[int, tuple[int, ...]]  # id of the parent node (0: none), the tokens of this page
    state: int = 0  # slot of the recurrent states behind its last token; 0: not kept


class PagePool:
    """Counts references to pages 1..num_pages - 1 and remembers full pages by the tokens up to their end.

    A page is free, held by at least one request, or cached: held by nobody, but kept with its contents until
    the pool needs it (least recently released first).

    Args:
        states: slots for states of prefixes; the one that was used least recently is taken for the next.
    """

    def __init__(self, num_pages: int, page_size: int, states: Sequence[int] = ()) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; a pool needs the null block and at least one more")
        self.page_size = page_size
        self.capacity = num_pages - 1  # in pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders = [0] * num_pages
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._tree: dict[tuple[int, tuple[int, ...]], _Node] = {}
        self._node_of_page: dict[int, _Node] = {}
        self._children: Counter[int] = Counter()  # pages in the tree, by their parent's id
        self._next_id = 1
        self._free_states = list(states)
        self._states: OrderedDict[int, _Node] = OrderedDict()  # by slot, least recently used first
        self.changes = 0  # counts what may make room for a request that found none

    @property
    def available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> float:
        """Share of the pages that requests hold."""
        return 1.0 - self.available / self.capacity

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages held by the caller, or None (and nothing changes) when there are not so many."""
        if count > self.available:
            return None
        pages = []
        for _ in range(count):
            if not self._free:
                page, _ = self._cached.popitem(last=False)
                self._discard(page)
                self._free.append(page)
            pages.append(self._free.pop())
        for page in pages:
            self._holders[page] = 1
        return pages

    def release(self, pages: Sequence[int]) -> list[int]:
        """Give pages back, a request's first page last, so that long prefixes are evicted from their end.

        Returns:
            Those that are free now, which nobody will read before they are written.
        """
        self.changes += bool(pages)
        freed = []
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} released twice"
            if self._holders[page] == 0:
                if page in self._node_of_page:
                    self._cached[page] = None
                else:
                    self._free.append(page)
                    freed.append(page)
        return freed

    def discard(self, pages: Sequence[int]) -> None:
        """Let nobody find these pages any more, which the caller holds."""
        for page in pages:
            if page in self._node_of_page:
                self._discard(page)

    def _discard(self, page: int) -> None:
        node = self._node_of_page.pop(page)
        del self._tree[node.key]
        self._children[node.key[0]] -= 1
        if not self._children[node.key[0]]:
            del self._children[node.key[0]]
        self.drop_state(node.state)

    def unmatch(self, pages: Sequence[int]) -> None:
        """Give back what `match` returned, for which no room was found."""
        changes = self.changes
        self.release(pages)
        self.changes = changes

    def match(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Hold and return the cached pages of the longest known prefix of `tokens`, at most `limit` tokens of it."""
        return self._hold(self._nodes(tokens, limit))

    def match_state(self, tokens: Sequence[int], limit: int) -> tuple[list[int], int, int]:
        """As `match`, as far as the last page behind which states are kept.

        Returns:
            The pages, the slot of the states (0: there is no page), and behind how many tokens, of whole pages, these
            part from others that are known; 0 if they part from none.
        """
        nodes = self._nodes(tokens, limit)
        parting = len(nodes) * self.page_size if nodes and self._children[nodes[-1].id] else 0
        while nodes and not nodes[-1].state:
            nodes.pop()
        if not nodes:
            return [], 0, parting
        state = nodes[-1].state
        self._states.move_to_end(state)
        return self._hold(nodes), state, parting

    def _nodes(self, tokens: Sequence[int], limit: int) -> list[_Node]:
        """Of the longest known prefix."""
        nodes: list[_Node] = []
        for start in range(0, limit - self.page_size + 1, self.page_size):
            parent = nodes[-1].id if nodes else 0
            node = self._tree.get((parent, tuple(tokens[start : start + self.page_size])))
            if node is None:
                break
            nodes.append(node)
        return nodes

    def _hold(self, nodes: Sequence[_Node]) -> list[int]:
        for node in nodes:
            self._holders[node.page] += 1
            self._cached.pop(node.page, None)
        return [node.page for node in nodes]

    def publish(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Make the full pages among `pages` findable; `tokens` are those whose keys and values are written."""
        parent = 0
        for i in range(len(tokens) // self.page_size):
            key = (parent, tuple(tokens[i * self.page_size : (i + 1) * self.page_size]))
            node = self._tree.get(key)
            if node is None:
                if pages[i] in self._node_of_page:  # published before under another parent: that one was evicted
                    return
                node = _Node(self._next_id, pages[i], key)
                self._next_id += 1
                self.changes += 1
                self._tree[key] = node
                self._children[parent] += 1
                self._node_of_page[pages[i]] = node
            parent = node.id

    def keep_state(self, tokens: Sequence[int], pages: Sequence[int]) -> int:
        """A slot for the states behind `tokens`, which end with a page and are published; 0 if they are kept already,
        or nobody could find them."""
        self.publish(tokens, pages)
        nodes = self._nodes(tokens, len(tokens))
        if len(nodes) * self.page_size < len(tokens) or nodes[-1].state:
            return 0
        if not self._free_states:
            self.drop_state(next(iter(self._states)))
        slot = nodes[-1].state = self._free_states.pop()
        self._states[slot] = nodes[-1]
        self.changes += 1
        return slot

    def drop_state(self, slot: int) -> None:
        """Let nobody go on from the states in this slot; 0 is none."""
        if slot:
            self._states.pop(slot).state = 0
            self._free_states.append(slot)

    def drop_states(self, tokens: Sequence[int]) -> None:
        """Let nobody go on from states of a prefix of `tokens`, behind whoever's pages they are kept."""
        for node in self._nodes(tokens, len(tokens)):
            self.drop_state(node.state)

    def check(self) -> None:
        """Raise AssertionError unless every page is exactly one of free, held and cached."""
        held = {page for page, count in enumerate(self._holders) if count > 0}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        assert not (held & free or held & cached or free & cached), "a page is in two states"
        assert held | free | cached == set(range(1, self.capacity + 1)), "a page is lost"
        assert cached <= set(self._node_of_page), "a cached page cannot be found"
        assert {node.page for node in self._tree.values()} == set(self._node_of_page), "the prefix tree is torn"
        assert self._children == Counter(parent for parent, _ in self._tree), "children are miscounted"
        kept = {node.state: node for node in self._tree.values() if node.state}
        assert kept == dict(self._states), "states are kept of no prefix"
        assert len({*self._free_states, *kept}) == len(self._free_states) + len(kept), "a slot has two states"
