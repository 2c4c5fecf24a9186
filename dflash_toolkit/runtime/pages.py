"""Pages of the KV cache: who holds them, and which of them hold a prefix that another request may reuse.

Target and drafter keep their keys and values of a token in the same page, so a prefix hit brings both. Page 0 is the
null block: rows of a batch that stand for no request write there.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Node:
    """A full page in the prefix tree."""

    id: int  # never used twice, so a child of an evicted page can never be reached again
    page: int
    key: tuple[int, tuple[int, ...]]  # id of the parent node (0: none), the tokens of this page


class PagePool:
    """Counts references to pages 1..num_pages - 1 and remembers full pages by the tokens up to their end.

    A page is free, held by at least one request, or cached: held by nobody, but kept with its contents until
    the pool needs it (least recently released first).
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; a pool needs the null block and at least one more")
        self.page_size = page_size
        self.capacity = num_pages - 1  # in pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders = [0] * num_pages
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._tree: dict[tuple[int, tuple[int, ...]], _Node] = {}
        self._node_of_page: dict[int, _Node] = {}
        self._next_id = 1
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
                del self._tree[self._node_of_page.pop(page).key]
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

    def forget(self, pages: Sequence[int]) -> None:
        """Let nobody find these pages any more, which the caller holds."""
        for page in pages:
            node = self._node_of_page.pop(page, None)
            if node is not None:
                del self._tree[node.key]

    def unmatch(self, pages: Sequence[int]) -> None:
        """Give back what `match` returned, for which no room was found."""
        changes = self.changes
        self.release(pages)
        self.changes = changes

    def match(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Hold and return the cached pages of the longest known prefix of `tokens`, at most `limit` tokens of it."""
        pages: list[int] = []
        parent = 0
        for start in range(0, limit - self.page_size + 1, self.page_size):
            node = self._tree.get((parent, tuple(tokens[start : start + self.page_size])))
            if node is None:
                break
            parent = node.id
            pages.append(node.page)
        for page in pages:
            self._holders[page] += 1
            self._cached.pop(page, None)
        return pages

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
                self._node_of_page[pages[i]] = node
            parent = node.id

    def check(self) -> None:
        """Raise AssertionError unless every page is exactly one of free, held and cached."""
        held = {page for page, count in enumerate(self._holders) if count > 0}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        assert not (held & free or held & cached or free & cached), "a page is in two states"
        assert held | free | cached == set(range(1, self.capacity + 1)), "a page is lost"
        assert cached <= set(self._node_of_page), "a cached page cannot be found"
        assert {node.page for node in self._tree.values()} == set(self._node_of_page), "the prefix tree is torn"
