"""The prefix cache: full KV pages, found again by the tokens they hold.

Owns the tree from token prefixes to pages and its eviction order; the pages themselves are counted
by `server.kv.pages`. Knows nothing of requests or torch.

A node is one full page: its key is that page's `page_size` token ids, its path from the root the
whole prefix, since KV depends on every token before it.

Who owns the pages of a prompt of n tokens, m of which were matched (m a multiple of the page size):

    interval                  before insert                   after insert(prompt, pages)
    [0, m)                    cache, and request by its lock  the same
    [m, full)  not cached     request                         request and cache, a reference each
    [m, full)  cached since   request (a duplicate)           request; the cache keeps its own
    [full, n)  partial page   request                         request

with full = n - n % page_size. `insert` changes no reference of the caller's: the request releases
its pages when it is done with them, exactly as it would without a cache, and unlocks its match.
A lock is held under the request's own tag, so that a page tells which requests share it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from server.errors import IntegrityError
from server.kv.pages import PageAllocator

OWNER = "radix"


@dataclass(slots=True, kw_only=True, eq=False)
class RadixNode:
    """One cached page. The root holds no page (-1) and an empty key."""

    key: tuple[int, ...]
    page: int
    parent: RadixNode | None
    last_used: int
    children: dict[tuple[int, ...], RadixNode] = field(default_factory=dict)
    queued: bool = False  # has an entry in the eviction heap


@dataclass(slots=True, kw_only=True, eq=False)
class Match:
    """A cached prefix. `pages` may be read only between `lock` and `unlock`.

    pages        pages of the prefix, in order; num_tokens = len(pages) * page_size
    node         deepest node of the prefix; the root for an empty match
    locked_by    owner tag of the lock, while there is one
    """

    pages: tuple[int, ...]
    num_tokens: int
    node: RadixNode
    locked_by: str | None = None


class RadixCache:
    """Prefix cache over the pages of one allocator. Not thread-safe: it belongs to one scheduler.

    The cache holds one reference (owner `OWNER`) on each of its pages and a lock one more (owner:
    whoever locks); a page is evictable while nobody but the cache holds it.
    """

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}, expected at least 1")
        self._allocator = allocator
        self._page_size = page_size
        self._clock = 0
        self._root = RadixNode(key=(), page=-1, parent=None, last_used=0)
        self._by_page: dict[int, RadixNode] = {}
        self._leaves: list[tuple[int, int, RadixNode]] = []  # a heap: (last_used, page, leaf)

    @property
    def num_pages(self) -> int:
        """Pages in the cache, evictable or not."""
        return len(self._by_page)

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could free at this instant."""
        return self._allocator.num_held_only_by(OWNER)

    def match(self, token_ids: Sequence[int], max_tokens: int) -> Match:
        """The longest cached prefix of `token_ids` of at most `max_tokens` tokens.

        Pass `len(prompt) - 1` so that a token is left to compute: logits come from a forward
        pass. Counts as a use for the eviction order; reserves nothing until `lock`.
        """
        now = self._tick()
        node = self._root
        pages: list[int] = []
        limit = max(0, min(max_tokens, len(token_ids)))
        for key in self._keys(token_ids, limit):
            child = node.children.get(key)
            if child is None:
                break
            child.last_used = now
            pages.append(child.page)
            node = child
        return Match(pages=tuple(pages), num_tokens=len(pages) * self._page_size, node=node)

    def lock(self, match: Match, owner: str) -> None:
        """Keep the pages of `match` for `owner` until `unlock`.

        Call it before anything that may evict: raises IntegrityError when the match is locked
        already or its pages have left the cache since.
        """
        if match.locked_by is not None:
            raise IntegrityError(f"match of pages {match.pages} is locked twice")
        node: RadixNode | None = match.node
        while node is not None and node is not self._root:
            if self._by_page.get(node.page) is not node:
                raise IntegrityError(f"lock of page {node.page}: it was evicted after the match")
            node = node.parent
        self._allocator.retain(match.pages, owner)
        match.locked_by = owner

    def unlock(self, match: Match) -> None:
        """Undo `lock`. Raises IntegrityError when the match is not locked."""
        if match.locked_by is None:
            raise IntegrityError(f"match of pages {match.pages} is unlocked but was not locked")
        self._allocator.release(match.pages, match.locked_by)
        match.locked_by = None

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> int:
        """Remember the full pages of `token_ids`, whose KV lies in `pages` in order.

        Returns how many pages the cache took a reference on; a prefix that is cached already
        keeps its page. The tail that fills no page is left out, so `pages` may be longer.
        Raises IntegrityError, with nothing changed, when `pages` is too short, not allocated, or
        holds a page that the cache knows under another prefix.
        """
        num_full = len(token_ids) // self._page_size
        if len(pages) < num_full:
            raise IntegrityError(
                f"insert of {len(token_ids)} tokens needs {num_full} pages, got {len(pages)}"
            )
        keys = list(self._keys(token_ids, len(token_ids)))
        path: list[RadixNode] = []
        node = self._root
        for key in keys:
            child = node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        num_cached = len(path)
        fresh = list(pages[num_cached:num_full])
        for page in fresh:
            if page in self._by_page:
                raise IntegrityError(f"insert of page {page}: it is cached under another prefix")
        self._allocator.retain(fresh, OWNER)
        now = self._tick()
        for known in path:
            known.last_used = now
        for key, page in zip(keys[num_cached:], fresh, strict=True):
            child = RadixNode(key=key, page=page, parent=node, last_used=now)
            node.children[key] = child
            self._by_page[page] = child
            node = child
        self._queue(node)
        return len(fresh)

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages, the least recently used leaves first.

        Returns how many pages became free: less than asked for only when `num_evictable` was.
        Pages that others hold stay cached unless they keep a freeable ancestor from going, which
        happens where a request inserted below a page that duplicated its own.
        """
        target = min(num_pages, self.num_evictable)
        num_freed = 0
        held: list[RadixNode] = []
        while num_freed < target:
            leaf = self._pop_oldest_leaf()
            if leaf is not None:
                if self._allocator.held_only_by(leaf.page, OWNER):
                    self._remove(leaf)
                    num_freed += 1
                else:
                    held.append(leaf)
                continue
            index = next(i for i, node in enumerate(held) if self._blocks_freeable(node))
            self._remove(held.pop(index))
        for leaf in held:
            self._queue(leaf)
        return num_freed

    def check_integrity(self) -> None:
        """Raises IntegrityError unless tree, page index, heap and allocator agree."""
        seen: dict[int, RadixNode] = {}
        queued = [node for _, _, node in self._leaves]
        if len({id(node) for node in queued}) != len(queued):
            raise IntegrityError("a leaf is twice in the eviction heap")
        for node in self._nodes():
            if node.page in seen:
                raise IntegrityError(f"page {node.page} is cached twice")
            seen[node.page] = node
            if len(node.key) != self._page_size:
                raise IntegrityError(f"page {node.page} has a key of {len(node.key)} tokens")
            parent = node.parent
            if parent is None or parent.children.get(node.key) is not node:
                raise IntegrityError(f"page {node.page} is not a child of its parent")
            if parent is not self._root and parent.last_used < node.last_used:
                raise IntegrityError(f"page {node.page} was used after its parent {parent.page}")
            if not node.children and not node.queued:
                raise IntegrityError(f"leaf {node.page} is not in the eviction heap")
        if seen != self._by_page:
            raise IntegrityError(
                f"tree has pages {sorted(seen)}, index has {sorted(self._by_page)}"
            )
        for node in queued:
            if not node.queued:
                raise IntegrityError(f"page {node.page} is in the heap but not marked so")
        held = self._allocator.pages_by_owner().get(OWNER, [])
        if held != sorted(seen):
            raise IntegrityError(f"cache holds pages {held}, its tree has {sorted(seen)}")

    def _keys(self, token_ids: Sequence[int], limit: int) -> Iterator[tuple[int, ...]]:
        size = self._page_size
        for start in range(0, limit - size + 1, size):
            yield tuple(token_ids[start : start + size])

    def _nodes(self) -> Iterator[RadixNode]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _queue(self, node: RadixNode) -> None:
        if node is not self._root and not node.children and not node.queued:
            heapq.heappush(self._leaves, (node.last_used, node.page, node))
            node.queued = True

    def _pop_oldest_leaf(self) -> RadixNode | None:
        # Entries are not updated on use: a stale one is put back with its true time when it
        # surfaces, so a use costs nothing and a pop O(log n) amortised.
        while self._leaves:
            last_used, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if node.children:
                continue  # it is queued again when its last child goes
            if node.last_used != last_used:
                self._queue(node)
                continue
            return node
        return None

    def _blocks_freeable(self, node: RadixNode) -> bool:
        parent = node.parent
        while parent is not None and parent is not self._root:
            if self._allocator.held_only_by(parent.page, OWNER):
                return True
            parent = parent.parent
        return False

    def _remove(self, leaf: RadixNode) -> None:
        parent = leaf.parent
        assert parent is not None and not leaf.children and not leaf.queued
        del parent.children[leaf.key]
        del self._by_page[leaf.page]
        self._allocator.release([leaf.page], OWNER)
        self._queue(parent)
