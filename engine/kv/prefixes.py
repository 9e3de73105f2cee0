"""What finished sequences leave for those that begin alike: a tree over pages of tokens, with snapshots of states."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import numpy.typing as npt

from lazyio.engine.kv.pool import PAGE, Pages, Pool

Tokens = npt.NDArray[np.int64]

# What stands behind the last token of a page that is not full. It is no token.
_NOTHING = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class Match:
    """What is kept of the beginning of a prompt.

    Of `matched` equal tokens the first `tokens` need not be computed again: they lie in the full pages `pages` and, if
    they end within one, at the beginning of the page `partial`. `run` is the state after them, None without one.
    """

    matched: int = 0
    tokens: int = 0
    pages: tuple[int, ...] = ()
    partial: int | None = None
    run: Pages | None = None


@dataclass(eq=False, slots=True)
class _Node:
    """A page, the tokens in it, and the states after so many of them; only the root has no page."""

    tokens: Tokens
    page: int
    parent: _Node | None
    used: int = 0
    snapshots: dict[int, Pages] = field(default_factory=dict)
    whole: dict[bytes, _Node] = field(default_factory=dict)  # those with all tokens of a page, by their bytes
    part: list[_Node] = field(default_factory=list)
    below: tuple[list[_Node], Tokens] | None = None  # all of these, and their tokens: [children, PAGE]

    def children(self) -> Iterator[_Node]:
        yield from self.whole.values()
        yield from self.part

    def nearest(self, tokens: Tokens) -> tuple[int, _Node]:
        """The child that begins with the most of up to a page of tokens, and how many; this node and 0 for none."""
        if self.below is None:
            nodes = list(self.children())
            rows = np.full((len(nodes), PAGE), _NOTHING, np.int64)
            for row, node in zip(rows, nodes, strict=True):
                row[: len(node.tokens)] = node.tokens
            self.below = nodes, rows
        nodes, rows = self.below
        if not nodes:
            return 0, self
        equal = rows[:, : len(tokens)] == tokens
        counts = np.where(equal.all(1), len(tokens), equal.argmin(1))
        best = int(counts.argmax())
        return int(counts[best]), nodes[best] if counts[best] else self


class Prefixes:
    """The kept prefixes. Each page and each run that the tree has is held once by it.

    With `stateful`, a sequence can be resumed only where there is a snapshot, else wherever tokens are equal. A page
    or run is *inactive* where only the tree holds it: then it can be evicted.
    """

    def __init__(self, pool: Pool, *, stateful: bool) -> None:
        self._pool, self._stateful = pool, stateful
        self._root = _Node(np.empty(0, np.int64), -1, None)
        self._clock = count(1)
        self._mine = np.zeros(len(pool) + 1, np.bool_)  # pages that the tree holds

    def match(self, tokens: Sequence[int] | Tokens, most: int) -> Match:
        """What can be resumed of a sequence that begins with `tokens`: at most the first `most` of them."""
        wanted = np.asarray(tokens, np.int64)
        path, matched = self._walk(wanted)
        end = min(matched, most)
        place = self._last_snapshot(path, end) if self._stateful else end
        if not place:
            return Match(matched)
        full, rest = divmod(place, PAGE)
        tick = next(self._clock)
        for node in path:
            node.used = tick
        run = path[-(-place // PAGE) - 1].snapshots[rest or PAGE] if self._stateful else None
        pages = tuple(node.page for node in path[:full])
        return Match(matched, place, pages, path[full].page if rest else None, run)

    def keep(self, tokens: Sequence[int] | Tokens, pages: Pages, run: Pages | None) -> None:
        """Keep a sequence, which lies in `pages`, and the state after it, whose `run` is the tree's from now on.

        Pages that the tree does not have yet are held once more. The last one may be partly filled if nobody writes to
        it any more.
        """
        known = np.asarray(tokens, np.int64)
        node, tick = self._root, next(self._clock)
        for page, start in zip(pages, range(0, len(known), PAGE), strict=True):
            node = self._child(node, known[start : start + PAGE], int(page))
            node.used = tick
        if run is None:
            return
        place = len(known) - (len(pages) - 1) * PAGE
        if place in node.snapshots or not len(known):
            self._pool.give_back(run)
        else:
            node.snapshots[place] = run
            self._mine[run] = True

    @property
    def pages(self) -> int:
        """Pages that the tree holds, those of snapshots among them."""
        return int(np.count_nonzero(self._mine))

    @property
    def inactive(self) -> int:
        """Those of them that nobody else holds."""
        return self._pool.held_once(self._mine)

    def evict(self, enough: Callable[[], bool]) -> None:
        """Give back what is inactive, what was used longest ago first, until `enough()` or nothing is left."""
        # Ends of branches go first, and then, of branches in use, the snapshots on the way.
        number = count()
        heap = [(node.used, next(number), node) for node in self._nodes() if self._is_evictable(node)]
        heapq.heapify(heap)
        while heap and not enough():
            _, _, node = heapq.heappop(heap)
            parent = self._drop(node)
            if self._is_evictable(parent):
                heapq.heappush(heap, (parent.used, next(number), parent))
        for node in sorted(self._nodes(), key=lambda node: node.used):
            for place, run in list(node.snapshots.items()):
                if enough():
                    return
                if self._idle(run):
                    self._let_go(node.snapshots.pop(place))

    def clear(self) -> None:
        """Give back all that is inactive."""
        self.evict(lambda: False)

    def _walk(self, tokens: Tokens) -> tuple[list[_Node], int]:
        """The nodes that `tokens` lead to, the last perhaps with its first tokens alone, and how many were equal."""
        node = self._root
        path: list[_Node] = []
        for start in range(0, len(tokens), PAGE):
            chunk = tokens[start : start + PAGE]
            found = node.whole.get(chunk.tobytes())
            if found is None:
                equal, best = node.nearest(chunk)
                return ([*path, best], start + equal) if equal else (path, start)
            path.append(found)
            node = found
        return path, len(tokens)

    def _last_snapshot(self, path: Sequence[_Node], end: int) -> int:
        """The last position up to `end` on the path at which there is a snapshot, 0 without one."""
        for number in reversed(range(len(path))):
            places = [number * PAGE + place for place in path[number].snapshots if number * PAGE + place <= end]
            if places:
                return max(places)
        return 0

    def _child(self, node: _Node, tokens: Tokens, page: int) -> _Node:
        """The child with these tokens at its beginning, a new one with that page if there is none."""
        found = node.whole.get(tokens.tobytes())
        if found is not None:
            return found
        if len(tokens) < PAGE:
            equal, longer = node.nearest(tokens)
            if equal == len(tokens):
                return longer
        self._pool.share([page])
        self._mine[page] = True
        new = _Node(tokens.copy(), page, node)
        node.below = None
        for shorter in [each for each in node.part if np.array_equal(each.tokens, tokens[: len(each.tokens)])]:
            # The new page has all that the shorter one has.
            new.snapshots |= shorter.snapshots
            node.part.remove(shorter)
            self._let_go([shorter.page])
        if len(tokens) == PAGE:
            node.whole[tokens.tobytes()] = new
        else:
            node.part.append(new)
        return new

    def _drop(self, node: _Node) -> _Node:
        """Take the end of a branch out of the tree; its parent."""
        parent = node.parent
        assert parent is not None
        parent.below = None
        for run in node.snapshots.values():
            self._let_go(run)
        self._let_go([node.page])
        if len(node.tokens) == PAGE:
            del parent.whole[node.tokens.tobytes()]
        else:
            parent.part.remove(node)
        return parent

    def _let_go(self, pages: Pages | Sequence[int]) -> None:
        self._pool.give_back(pages)
        self._mine[pages] = False

    def _nodes(self) -> Iterator[_Node]:
        waiting = list(self._root.children())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children())

    def _is_evictable(self, node: _Node) -> bool:
        is_end = node.parent is not None and not node.whole and not node.part
        return is_end and self._is_inactive(node) and all(map(self._idle, node.snapshots.values()))

    def _is_inactive(self, node: _Node) -> bool:
        return self._pool.holders(node.page) == 1

    def _idle(self, run: Pages) -> bool:
        return self._pool.holders(int(run[0])) == 1
