"""Which blocks of keys the queries of block-sparse attention see, found on a GPU.

`select_blocks` launches the bodies, which are in selection_bodies.py. What they do is in plain torch in
engine/layers/block_selection.py, which gives a mask of all keys; here no such mask is made, but lists of blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lazyio.errors import Unsupported
from lazyio.kernels.contract import Case, Kernel, bodies
from lazyio.kernels.pages import Entries, Pages, check_pages, found_by, places_of
from lazyio.kernels.places import UNIT

#: Of an entry, the lowest bits: which tokens of a group see the block.
BITS = 10

#: Blocks of a sequence for which there is a kernel.
MOST_BLOCKS = 2**16

_DIMS = (16, 32, 64, 128, 256)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Scores are kept for so many queries at a time that there are no more than this.
_MOST_SCORES = 2**24


@dataclass(frozen=True, slots=True)
class Selected:
    """The blocks that tokens see, a list for every `group` tokens in a row; a block has `ratio` keys.

    A token sees no key behind itself, so of the block that it lies in those before it and its own.
    """

    entries: torch.Tensor  # int32 [groups, capacity], ascending: block * 2**BITS + 2**i for each token i that sees it
    counts: torch.Tensor  # int32 [groups]: how many of them there are; what follows is no entry
    tokens: int
    group: int
    ratio: int

    @classmethod
    def of(cls, mask: torch.Tensor, group: int, ratio: int) -> Selected:
        """Those of a mask, bool [tokens, blocks]."""
        tokens, blocks = mask.shape
        groups = -(-tokens // group)
        padded = torch.zeros(groups * group, blocks, dtype=torch.int32, device=mask.device)
        padded[:tokens] = mask
        sees = (padded.view(groups, group, blocks) << _range(group, mask)[:, None]).sum(1, dtype=torch.int32)
        order = (sees == 0).to(torch.int8).argsort(dim=1, stable=True)
        entries = (order.to(torch.int32) << BITS) | sees.gather(1, order)
        return cls(entries, (sees != 0).sum(1, dtype=torch.int32), tokens, group, ratio)

    def behind(self, start: int) -> Selected:
        """Those of the tokens from `start`, which begins a group."""
        first = start // self.group
        return replace(self, entries=self.entries[first:], counts=self.counts[first:], tokens=self.tokens - start)

    def mask(self, blocks: int) -> torch.Tensor:
        """Which blocks each token sees, bool [tokens, blocks]."""
        groups, capacity = self.entries.shape
        there = _range(capacity, self.entries) < self.counts[:, None]
        found = torch.zeros(groups, blocks + 1, dtype=torch.int32, device=self.entries.device)
        place = torch.where(there, self.entries >> BITS, blocks)
        found.scatter_(1, place.long(), self.entries & (2**BITS - 1))
        of_each = (found[:, None, :blocks] >> _range(self.group, found)[:, None]) & 1
        return of_each.flatten(0, 1)[: self.tokens] != 0


def _range(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32, device=like.device)


def supports(dim: int, blocks: int) -> bool:
    """Whether there is a kernel for queries of this dimension, and so many blocks."""
    return dim in _DIMS and blocks < MOST_BLOCKS


def select_blocks(queries: torch.Tensor, keys: Entries, before: int, *, count: int, ratio: int, group: int) -> Selected:
    """The blocks that tokens see, which follow on the `before` ones of their sequence; never waits.

    queries [tokens, heads, dim] and keys [blocks, dim], of the complete blocks: float32, bfloat16 or float16, of one
    dtype, contiguous; keys may lie in pages. A block's score is the sum over heads of relu(q_h . k) in float32. Of the
    blocks that are complete with a token it sees the `count` with the highest scores, of equal ones the first; and the
    block that it lies in.
    Raises Unsupported where Triton is missing, and for what has no kernel.
    """
    _check(queries, keys, count, group)
    tokens = queries.shape[0]
    assert keys.shape[0] == (before + tokens) // ratio, "keys are those of the complete blocks"
    columns = -(-(before + tokens) // ratio)
    selected, width = _empty(queries, columns, count, ratio, group), _rounded(columns)
    at_once = max(1, _MOST_SCORES // width // group) * group
    for start in range(0, tokens, at_once):
        some = queries[start : start + at_once]
        scores = block_scores(some, keys, before + start, ratio=ratio, width=width)
        _choose(scores, before + start, count, ratio, selected.behind(start))
    return selected


def select_steps(
    queries: torch.Tensor, keys: Sequence[Entries], positions: torch.Tensor, *, count: int, ratio: int
) -> Selected:
    """`select_blocks` for one token of each of several sequences: `group` is 1.

    queries [sequences, heads, dim], keys [blocks, dim] of each, positions int64 [sequences], of the tokens.
    """
    most = max(keys, key=lambda one: one.shape[0])
    _check(queries, most, count, 1)
    _check_steps(queries, keys, positions)
    # The block that a token lies in may be one more.
    columns = most.shape[0] + 1
    selected, width = _empty(queries, columns, count, ratio, 1), _rounded(columns)
    scores = block_scores(queries, most, 0, ratio=ratio, width=width, steps=(keys, positions))
    _choose(scores, 0, count, ratio, selected, positions)
    return selected


def _empty(queries: torch.Tensor, columns: int, count: int, ratio: int, group: int) -> Selected:
    tokens = queries.shape[0]
    groups, capacity = -(-tokens // group), _rounded(min(columns, group * (count + 1)))
    entries = torch.empty(groups, capacity, dtype=torch.int32, device=queries.device)
    return Selected(entries, entries.new_empty(groups), tokens, group, ratio)


def block_scores(
    queries: torch.Tensor,
    keys: Entries,
    before: int,
    *,
    ratio: int,
    width: int,
    steps: tuple[Sequence[Entries], torch.Tensor] | None = None,
) -> torch.Tensor:
    """The scores of blocks that are complete with each query, float32 [tokens, width]; others are not set.

    `steps` are the keys and positions of `select_steps`, `keys` the most of these then.
    """
    tokens, heads, dim = queries.shape
    scores = torch.empty(tokens, width, device=queries.device)
    config = SCORE[queries.dtype == torch.float32]
    rows = config.rows if steps is None and tokens > 16 else 16
    language = _bodies().tl
    first, positions, lie = (keys, scores, scores) if steps is None else (steps[0][0], steps[1], places_of(steps[0]))
    lies, table, paging = found_by(first)
    _bodies().score[(-(-keys.shape[0] // config.columns) or 1, -(-tokens // rows) if steps is None else tokens)](
        *(queries, lies, table, scores, positions, lie, tokens, before, width),
        STEPS=steps is not None,
        RATIO=ratio,
        HEADS=heads,
        DIM=dim,
        ROWS=rows,
        COLUMNS=config.columns,
        OPERAND=language.bfloat16 if queries.dtype == torch.bfloat16 else language.float32,
        UNIT=UNIT // queries.element_size(),
        **paging,
        num_warps=config.warps,
    )
    return scores


def _choose(
    scores: torch.Tensor, before: int, count: int, ratio: int, selected: Selected, positions: torch.Tensor | None = None
) -> None:
    """Write what each token sees to its list, or to those of groups, of which these are the first."""
    tokens, width = scores.shape
    tile, lists = max(1024, _power_of_2(width)), selected.group == 1
    chosen = selected.entries if lists else torch.empty(tokens, width, dtype=torch.int8, device=scores.device)
    capacity = selected.entries.shape[1]
    _bodies().choose[(tokens,)](
        *(scores, chosen, selected.entries, selected.counts, scores if positions is None else positions),
        *(before, count, width, capacity),
        STEPS=positions is not None,
        LISTS=lists,
        RATIO=ratio,
        BITS=BITS,
        TILE=tile,
        num_warps=_warps_of(tile),
    )
    if not lists:
        _bodies().unite[(-(-tokens // selected.group),)](
            *(chosen, selected.entries, selected.counts, tokens, width, capacity, selected.group),
            BITS=BITS,
            TILE=tile,
            num_warps=_warps_of(tile),
        )


@dataclass(frozen=True, slots=True)
class Config:
    """How `score` is launched."""

    rows: int
    columns: int
    warps: int


#: By whether float32 is multiplied. Chosen for four heads of 128 on an H200.
SCORE = {False: Config(64, 128, 4), True: Config(16, 32, 4)}


def _warps_of(tile: int) -> int:
    """So many that a thread holds no more than 8 elements of a tile, if it can be."""
    return min(32, max(4, tile // 256))


def _rounded(columns: int) -> int:
    return -(-columns // 16) * 16


def _power_of_2(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()


def _bodies() -> Any:
    return bodies("selection_bodies", "the kernel of block selection")


def _check(queries: torch.Tensor, keys: Entries, count: int, group: int) -> None:
    dim, blocks = queries.shape[2], keys.shape[0]
    if not supports(dim, blocks) or queries.dtype not in _DTYPES:
        raise Unsupported(
            f"block selection has no kernel for {queries.dtype}, queries of {dim} values and {blocks} blocks: it has"
            f" those for float32, bfloat16 and float16, {_DIMS} values and less than {MOST_BLOCKS} blocks"
        )
    assert keys.shape[1:] == (dim,), "keys are [blocks, dim]"
    assert queries.dtype == keys.dtype, "queries and keys are of one dtype"
    assert queries.device == keys.device, "queries and keys are on different devices"
    assert queries.is_contiguous(), "queries are not contiguous"
    assert keys.is_contiguous(), "keys are not contiguous"
    assert 0 < group <= BITS, "an entry has a bit for each token of a group"
    assert count > 0, "no block may be chosen"
    if isinstance(keys, Pages):
        check_pages(([keys],))


def _check_steps(queries: torch.Tensor, keys: Sequence[Entries], positions: torch.Tensor) -> None:
    assert queries.shape[0] == len(keys), "there is a query for each sequence"
    assert positions.shape == (len(keys),), "positions are [sequences]"
    assert positions.dtype == torch.int64, "positions are int64"
    assert positions.is_contiguous(), "positions are not contiguous"
    assert positions.device == queries.device, "positions are on another device"
    if isinstance(keys[0], Pages):
        check_pages((keys,))
        return
    for one in keys:
        assert isinstance(one, torch.Tensor), "some lie in pages, and some do not"
        assert one.shape[1:] == queries.shape[2:], "keys are [blocks, dim]"
        assert one.dtype == queries.dtype, "queries and keys are of one dtype"
        assert one.device == queries.device, "queries and keys are on different devices"
        assert one.is_contiguous(), "keys are not contiguous"
        assert one.data_ptr() % UNIT == 0, "keys begin at a multiple of 16 bytes"


def reference(
    queries: torch.Tensor, keys: torch.Tensor, before: int, *, count: int, ratio: int, group: int
) -> Selected:
    """What `select_blocks` does, by sorting, on any device."""
    columns = -(-(before + len(queries)) // ratio)
    length = before + 1 + torch.arange(len(queries), device=queries.device)[:, None]
    block = torch.arange(columns, device=queries.device)
    scores = torch.zeros(len(queries), columns, dtype=torch.float64, device=queries.device)
    scores[:, : len(keys)] = (queries.double() @ keys.double().T).relu().sum(1)
    scores.masked_fill_(block >= length // ratio, -1)
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    best = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True) & (scores >= 0)
    return Selected.of(best | ((block == length // ratio) & (length % ratio != 0)), group, ratio)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Those of `select_blocks`."""

    queries: torch.Tensor
    keys: torch.Tensor
    before: int
    count: int
    ratio: int
    group: int

    @classmethod
    def random(
        cls,
        device: torch.device,
        seed: int,
        tokens: int,
        before: int,
        *,
        count: int = 8,
        ratio: int = 4,
        group: int = 3,
        heads: int = 2,
        dim: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> Arguments:
        """Small integers, of which every sum is exact, and many scores are equal: 0 and others."""
        made = torch.Generator(device).manual_seed(seed)

        def integers(*shape: int) -> torch.Tensor:
            return torch.randint(-1, 2, shape, generator=made, device=device).to(dtype)

        queries, keys = integers(tokens, heads, dim), integers((before + tokens) // ratio, dim)
        queries[..., -1] = 0  # a control has use for it
        return cls(queries, keys, before, count, ratio, group)

    def results(self, function: Callable[..., Selected]) -> list[torch.Tensor]:
        """What `select_blocks` or `reference` makes of them: the mask, and how long the lists are."""
        sizes = {"count": self.count, "ratio": self.ratio, "group": self.group}
        found = function(self.queries, self.keys, self.before, **sizes)
        return [found.mask(-(-(self.before + found.tokens) // self.ratio)).to(torch.int8), found.counts]


def _two_scores(device: torch.device, seed: int) -> Arguments:
    """Of every second query all scores are equal, of the others most blocks have one of two."""
    given = Arguments.random(device, seed, 14, 70)
    given.queries[::2] = 0
    some = torch.rand(len(given.keys), generator=torch.Generator(device).manual_seed(seed), device=device) < 0.5
    given.keys[some] = given.keys[0].clone()
    given.keys[~some] = 0
    return given


def _cases() -> list[Case[Arguments]]:
    true: dict[str, Any] = {"count": 512, "heads": 4, "dim": 128, "group": 5}
    sizes: dict[str, dict[str, Any]] = {
        "a sequence from its start": {"tokens": 50, "before": 0},
        "a chunk": {"tokens": 23, "before": 118, "planted": True},
        "from fewer blocks than may be seen to more": {"tokens": 20, "before": 24},
        "a step": {"tokens": 1, "before": 101, "group": 1},
        "blocks of 2": {"tokens": 9, "before": 60, "ratio": 2, "group": 10},
        "bfloat16": {"tokens": 20, "before": 90, "dtype": torch.bfloat16},
        "float16": {"tokens": 20, "before": 90, "dtype": torch.float16},
        "2,048 tokens at 30,720": {"tokens": 2048, "before": 30720, "dtype": torch.bfloat16, **true},
        "300 tokens at 2,000": {"tokens": 300, "before": 2000, "dtype": torch.bfloat16, **true},
        "steps at 131,070": {"tokens": 3, "before": 131070, "dtype": torch.bfloat16, **true, "group": 1},
        "float32 at 8,000": {"tokens": 200, "before": 8000, **true},
    }
    cases = []
    for name, size in sizes.items():
        planted = size.pop("planted", False)
        make = functools.partial(Arguments.random, **size)
        cases.append(Case(name, make, planted=planted, compiled_only="heads" in size or "bfloat16" in name))
    return [*cases, Case("two scores", _two_scores)]


def _last_of_equal(given: Arguments) -> Arguments:
    """The later of two blocks has a little more."""
    queries, keys = given.queries.clone(), given.keys.clone()
    queries[..., -1] = 1
    keys[:, -1] = torch.arange(len(keys), device=keys.device) * 2**-10
    return replace(given, queries=queries, keys=keys)


#: Faults by name.
CONTROLS: Mapping[str, Callable[[Arguments], Arguments]] = {
    "a head left out": lambda given: replace(given, queries=given.queries * _of_first_head(given)),
    "queries one token late": lambda given: replace(given, queries=given.queries.roll(1, 0)),
    "keys one block late": lambda given: replace(given, keys=given.keys.roll(1, 0)),
    "one block too few": lambda given: replace(given, count=given.count - 1),
    "tokens one further on": lambda given: replace(given, before=given.before + 1),
    "of equal scores the last": _last_of_equal,
}


def _of_first_head(given: Arguments) -> torch.Tensor:
    heads = torch.arange(given.queries.shape[1], device=given.queries.device)
    return (heads == 0)[:, None].to(given.queries.dtype)


KERNEL = Kernel(
    name="block_selection",
    run=lambda given: given.results(select_blocks),
    reference=lambda given: given.results(reference),
    cases=_cases(),
    controls=CONTROLS,
    bodies=lambda: [_bodies().score, _bodies().choose, _bodies().unite],
)
