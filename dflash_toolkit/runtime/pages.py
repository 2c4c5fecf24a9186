"""Pages of the KV cache: the requests that hold them, and the prefix tree of pages that other requests may reuse.

Target and drafter keep the keys and values of a token in the same page, so a prefix hit serves both. Page 0 is the null
block: rows without a request write to it.

A prefix belongs to its cache salt: requests with other salts never find it.

States of recurrent layers are large, so they are kept after few pages. A prefix ends at the last page with states.
Requests and prefixes share the slots for states.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class PageNode:
    """A full page in the prefix tree."""

    id: int  # never used twice, so a child of an evicted page cannot be found again
    page: int
    key: tuple[int | str, tuple[int, ...]]  # id of the parent node (first page: the salt), its tokens
    state: int = 0  # slot of the recurrent states after its last token; 0: not kept


class PagePool:
    """Counts references to pages 1..num_pages - 1 and remembers full pages by the tokens up to their end.

    A page is free, held by at least one request, or cached. A cached page is held by no request and keeps its contents
    until the pool needs it (least recently released first).

    Args:
        states: slots for states that only prefixes use.
    """

    def __init__(self, num_pages: int, page_size: int, states: Sequence[int] = ()) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; a pool needs the null block and at least one more")
        self.page_size = page_size
        self.capacity = num_pages - 1  # in pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders = [0] * num_pages
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._tree: dict[tuple[int | str, tuple[int, ...]], PageNode] = {}
        self._node_of_page: dict[int, PageNode] = {}
        self._children: Counter[int | str] = Counter()  # pages in the tree, by their parent's id or their salt
        self._next_id = 1
        self._free_states = list(states)
        self._states: OrderedDict[int, PageNode] = OrderedDict()  # by slot, in the order in which they are replaced
        self.changes = 0  # counts events that may make room for a request

    @property
    def available(self) -> int:
        """Number of pages that `allocate` could return now."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> float:
        """Share of the pages that requests hold."""
        return 1.0 - self.available / self.capacity

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """Returns `count` pages, which the caller holds, or None without any change if there are too few."""
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
        """Gives pages back, a request's first page last, so that long prefixes are evicted from their end.

        Returns:
            The pages that are free now; they are written before they are read again.
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
        """Removes pages, which the caller holds, from the prefix tree."""
        for page in pages:
            if page in self._node_of_page:
                self._discard(page)

    def clear(self) -> None:
        """Forgets all prefixes: the cached pages are free, and pages that requests hold are never found again."""
        for page in list(self._node_of_page):
            self._discard(page)
        self._free += self._cached
        self._cached.clear()
        self.changes += 1

    def _discard(self, page: int) -> None:
        node = self._node_of_page.pop(page)
        del self._tree[node.key]
        self._children[node.key[0]] -= 1
        if not self._children[node.key[0]]:
            del self._children[node.key[0]]
        self.drop_state(node.state)

    def unmatch(self, pages: Sequence[int]) -> None:
        """Gives back the pages that `match` returned, when the request finds too few others."""
        changes = self.changes
        self.release(pages)
        self.changes = changes

    def match(self, tokens: Sequence[int], limit: int, salt: str = "") -> list[int]:
        """Holds and returns the cached pages of the longest known prefix of `tokens`, of at most `limit` tokens."""
        return self._hold(self._nodes(tokens, limit, salt))

    def match_state(self, tokens: Sequence[int], limit: int, salt: str = "") -> tuple[list[int], int, int]:
        """Does the same as `match`, up to the last page after which states are kept.

        Returns:
            The pages, the slot of the states (0: there is no page), and after how many tokens, in whole pages, `tokens`
            differ from other known ones (0: nowhere).
        """
        nodes = self._nodes(tokens, limit, salt)
        parting = len(nodes) * self.page_size if nodes and self._children[nodes[-1].id] else 0
        while nodes and not nodes[-1].state:
            nodes.pop()
        if not nodes:
            return [], 0, parting
        state = nodes[-1].state
        self._states.move_to_end(state)
        return self._hold(nodes), state, parting

    def _nodes(self, tokens: Sequence[int], limit: int, salt: str) -> list[PageNode]:
        """Returns the nodes of the longest known prefix."""
        nodes: list[PageNode] = []
        parent: int | str = salt
        for start in range(0, limit - self.page_size + 1, self.page_size):
            node = self._tree.get((parent, tuple(tokens[start : start + self.page_size])))
            if node is None:
                break
            nodes.append(node)
            parent = node.id
        return nodes

    def _hold(self, nodes: Sequence[PageNode]) -> list[int]:
        for node in nodes:
            self._holders[node.page] += 1
            self._cached.pop(node.page, None)
        return [node.page for node in nodes]

    def publish(self, tokens: Sequence[int], pages: Sequence[int], salt: str = "") -> PageNode | None:
        """Adds the full pages to the prefix tree; `tokens` are the ones with keys and values in `pages`.

        Returns:
            The node of the last full page. None: there is no full page, or this one cannot be found.
        """
        parent: int | str = salt
        node = None
        for i in range(len(tokens) // self.page_size):
            key = (parent, tuple(tokens[i * self.page_size : (i + 1) * self.page_size]))
            node = self._tree.get(key)
            if node is None:
                if pages[i] in self._node_of_page:  # published before under another parent: that one was evicted
                    return None
                node = PageNode(self._next_id, pages[i], key)
                self._next_id += 1
                self.changes += 1
                self._tree[key] = node
                self._children[parent] += 1
                self._node_of_page[pages[i]] = node
            parent = node.id
        return node

    # ---- states ----------------------------------------------------------------------------------------

    def take_slot(self, *, free: bool = False) -> int:
        """Returns a slot for states, which the caller holds, or 0. May drop the states of a prefix unless `free`."""
        if not self._free_states and self._states and not free:
            self.drop_state(next(iter(self._states)))
        return self._free_states.pop() if self._free_states else 0

    @property
    def free_slots(self) -> int:
        return len(self._free_states)

    def give_slots(self, slots: Iterable[int]) -> None:
        self._free_states.extend(slots)

    def node_without_state(self, tokens: Sequence[int], pages: Sequence[int], salt: str = "") -> PageNode | None:
        """Publishes `tokens`, which end with a page, and returns the node of this page.

        Returns None if the states after it are kept already, or could not be found.
        """
        node = self.publish(tokens, pages, salt)
        return None if node is None or node.state else node

    def keep_state(self, node: PageNode, slot: int, *, replaceable: bool = False) -> None:
        """Keeps the states in a slot, which the caller holds, for the prefix that ends with a page.

        Args:
            replaceable: they are replaced before all others, until a request uses them.
        """
        node.state, self._states[slot] = slot, node
        if replaceable:
            self._states.move_to_end(slot, last=False)
        self.changes += 1

    def drop_state(self, slot: int) -> None:
        """Frees a slot, so that no request continues from its states; 0 is no slot."""
        if slot:
            self._states.pop(slot).state = 0
            self._free_states.append(slot)

    def drop_states(self, tokens: Sequence[int], salt: str = "") -> None:
        """Frees the slots of all prefixes of `tokens`."""
        for node in self._nodes(tokens, len(tokens), salt):
            self.drop_state(node.state)

    def check(self) -> None:
        """Raises AssertionError unless every page is exactly one of free, held and cached."""
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
