"""Attention and the selection of blocks where keys and values lie in pages: what they are checked on.

What is launched is in sparse_attention.py, block_selection.py and pages.py. Here is what the three make of a sequence
together: beside the references, and beside windows, bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lazyio.kernels import block_selection, sparse_attention
from lazyio.kernels.block_selection import Selected, select_blocks, select_steps
from lazyio.kernels.contract import Case, Kernel, bodies
from lazyio.kernels.pages import PAGE, Entries, Pages, write
from lazyio.kernels.sparse_attention import attend_causal, attend_selected, attend_steps, group_of

# Entries are written in chunks that cut pages.
_CHUNK = 100
# Elements that pages are a multiple of.
_ALIGNED = 128


@dataclass(frozen=True, slots=True)
class Sequences:
    """The last tokens of a sequence, or the last one of each of several, with all that they see, in windows."""

    q: list[torch.Tensor]  # [tokens, heads, dim] each
    k: list[torch.Tensor]  # [keys, kv_heads, dim]
    v: list[torch.Tensor]
    queries: list[torch.Tensor]  # [tokens, heads, dim], for blocks
    blocks: list[torch.Tensor]  # [blocks, dim]
    count: int
    ratio: int
    scale: float

    @property
    def ends(self) -> list[int]:
        """How long each is."""
        return [k.shape[0] for k in self.k]

    @property
    def before(self) -> list[int]:
        """Tokens before the first of these."""
        return [k.shape[0] - q.shape[0] for k, q in zip(self.k, self.q, strict=True)]

    def results(
        self, k: Sequence[Entries], v: Sequence[Entries], blocks: Sequence[Entries], later: int
    ) -> list[torch.Tensor]:
        """What launchers make of them where keys lie so: attention to all keys, blocks, attention to these."""
        sizes = {"count": self.count, "ratio": self.ratio}
        if len(self.q) == 1:
            (q,), (queries,), (before,) = self.q, self.queries, self.before
            group = group_of(q.shape[0], q.shape[1], self.k[0].shape[1], q.dtype, q.device)
            selected = select_blocks(queries, blocks[0], before, group=group, **sizes)
            causal = attend_causal(q, k[0], v[0], scale=self.scale)
            found = attend_selected(q, k[0], v[0], selected, scale=self.scale)
        else:
            q, positions = torch.cat(self.q), torch.tensor(self.before, device=self.q[0].device) + later
            selected = select_steps(torch.cat(self.queries), blocks, positions, **sizes)
            causal = attend_steps(q, k, v, positions, None, scale=self.scale)
            found = attend_steps(q, k, v, positions, selected, scale=self.scale)
        return [causal, self._mask(selected), found]

    def expected(self) -> list[torch.Tensor]:
        """The same by the references."""
        found: list[list[torch.Tensor]] = []
        for q, k, v, queries, blocks, before in zip(
            self.q, self.k, self.v, self.queries, self.blocks, self.before, strict=True
        ):
            selected = block_selection.reference(queries, blocks, before, count=self.count, ratio=self.ratio, group=1)
            some = [sparse_attention.reference(q, k, v, of, scale=self.scale) for of in (None, selected)]
            found.append([some[0], self._mask(selected), some[1]])
        return [torch.cat(some) for some in zip(*found, strict=True)]

    def _mask(self, selected: Selected) -> torch.Tensor:
        return selected.mask(-(-max(self.ends) // self.ratio) + 1).float()


@dataclass(frozen=True, slots=True)
class Arguments:
    """Sequences, and the pages of each. The rest are faults."""

    sequences: Sequences
    tables: tuple[torch.Tensor, ...]
    page_stride: int
    swapped: bool = False  # the first two pages, where they are read
    late: int = 0  # positions, where entries are written
    longer: int = 0  # sequences, where they are read

    @classmethod
    def random(
        cls,
        device: torch.device,
        seed: int,
        tokens: int,
        ends: tuple[int, ...],
        *,
        far: bool = False,
        heads: tuple[int, int] = (6, 2),
        dim: int = 16,
        dtype: torch.dtype = torch.float32,
        of_blocks: Mapping[str, Any] | None = None,
    ) -> Arguments:
        """Sequences of these lengths, of which these are the last `tokens`; `far` pages are gigabytes apart."""
        given = [(device, seed + i, tokens, end - tokens) for i, end in enumerate(ends)]
        keys = [sparse_attention.Arguments.random(*of, heads=heads, dim=dim, dtype=dtype) for of in given]
        some = [block_selection.Arguments.random(*of, dtype=dtype, **(of_blocks or {})) for of in given]
        q, k, v = ([getattr(one, name) for one in keys] for name in ("q", "k", "v"))
        queries, blocks = [one.queries for one in some], [one.keys for one in some]
        sequences = Sequences(q, k, v, queries, blocks, some[0].count, some[0].ratio, keys[0].scale)
        counts = [-(-end // PAGE) for end in ends]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)) + 1  # page 0 is nobody's
        tables = tuple(pages.clone() for pages in torch.split(order.to(device), counts))
        stride = 2 * PAGE * heads[1] * dim + PAGE // some[0].ratio * blocks[0].shape[1]
        stride = max(stride, 2**31 // sum(counts)) if far else stride
        return cls(sequences, tables, -(-stride // _ALIGNED) * _ALIGNED)

    def found(self) -> list[torch.Tensor]:
        """Results from pages, and whether those from windows have the same bits."""
        of = self.sequences
        k, v, blocks = self._written()
        tables = [torch.cat([table[:2].flip(0), table[2:]]) if self.swapped else table for table in self.tables]
        k, v, blocks = (
            [replace(pages, table=table) for pages, table in zip(kind, tables, strict=True)] for kind in (k, v, blocks)
        )
        k, v = ([replace(pages, length=pages.length + self.longer) for pages in kind] for kind in (k, v))
        found, expected = of.results(k, v, blocks, self.longer), of.results(of.k, of.v, of.blocks, 0)
        equal = [torch.equal(one, other) for one, other in zip(found, expected, strict=True)]
        return [*found, torch.tensor(equal, device=found[0].device).float()]

    def expected(self) -> list[torch.Tensor]:
        """Results by the references, and that all bits are the same."""
        found = self.sequences.expected()
        return [*found, torch.ones(len(found), device=found[0].device)]

    def _written(self) -> list[list[Pages]]:
        """Keys, values and keys of blocks, in a pool that had no numbers before."""
        of = self.sequences
        k, v, blocks = self._pages()
        each = range(len(of.k))
        for i in each:
            last = of.ends[i] - (len(each) > 1)
            for start in range(0, last, _CHUNK):
                here = slice(start, min(start + _CHUNK, last))
                write((of.k[i][here], of.v[i][here]), ([k[i]], [v[i]]), self._positions(here))
            write((of.blocks[i],), ([blocks[i]],), self._positions(slice(0, of.blocks[i].shape[0])) * of.ratio)
        if len(each) > 1:
            positions = torch.cat([self._positions(slice(end - 1, end)) for end in of.ends])
            write([torch.cat([one[-1:] for one in kind]) for kind in (of.k, of.v)], (k, v), positions)
        return [k, v, blocks]

    def _pages(self) -> list[list[Pages]]:
        """Of each kind and sequence, in planes of one pool, with nothing in them."""
        of = self.sequences
        count = 1 + sum(table.shape[0] for table in self.tables)
        pool = torch.empty(count * self.page_stride, dtype=of.k[0].dtype, device=of.k[0].device)
        found, offset = [], 0
        for kind, ratio in ((of.k, 1), (of.v, 1), (of.blocks, of.ratio)):
            shape = (PAGE // ratio, *kind[0].shape[1:])
            strides = (self.page_stride, *torch.empty(shape, device="meta").stride())
            plane = pool.as_strided((count, *shape), strides, offset).fill_(math.nan)
            found.append([Pages(plane, table, one.shape[0]) for table, one in zip(self.tables, kind, strict=True)])
            offset += math.prod(shape)
        return found

    def _positions(self, here: slice) -> torch.Tensor:
        return torch.arange(here.start + self.late, here.stop + self.late, device=self.tables[0].device)


def _cases() -> list[Case[Arguments]]:
    true: dict[str, Any] = {"heads": (24, 2), "dim": 256, "dtype": torch.bfloat16}
    true["of_blocks"] = {"count": 512, "heads": 4, "dim": 128}
    sizes: dict[str, dict[str, Any]] = {
        "a chunk": {"tokens": 13, "ends": (303,)},
        "a step": {"tokens": 1, "ends": (302,)},
        "steps": {"tokens": 1, "ends": (301, 70, 511)},
        "steps up to an edge, one less and one more": {"tokens": 1, "ends": (256, 255, 257)},
        "a chunk over an edge, float16": {"tokens": 20, "ends": (266,), "dtype": torch.float16},
        "a chunk up to an edge, blocks of 2": {"tokens": 9, "ends": (256,), "of_blocks": {"ratio": 2}},
        "500 tokens at 7,777": {"tokens": 500, "ends": (8277,), **true},
        "70 tokens, pages far apart": {"tokens": 70, "ends": (9000,), "far": True, **true},
        "a step at 131,070": {"tokens": 1, "ends": (131071,), **true},
        "steps, bfloat16": {"tokens": 1, "ends": (131071, 7777, 2304, 1, 256, 30000), **true},
        "steps, pages far apart": {"tokens": 1, "ends": (7777, 2304), "far": True, **true},
    }
    within = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
    return [
        Case(
            name,
            functools.partial(Arguments.random, **size),
            within[size.get("dtype", torch.float32)],
            planted=name in ("a chunk", "steps"),
            compiled_only="dim" in size,
        )
        for name, size in sizes.items()
    ]


#: Faults by name.
CONTROLS: Mapping[str, Callable[[Arguments], Arguments]] = {
    "two pages swapped": lambda given: replace(given, swapped=True),
    "sequences one longer": lambda given: replace(given, longer=1),
    "entries one position late": lambda given: replace(given, late=1),
}


def _bodies() -> list[Any]:
    attention = bodies("attention_bodies", "the kernel of attention")
    selection = bodies("selection_bodies", "the kernel of block selection")
    return [bodies("page_bodies", "the kernel of pages").write, attention.attend, attention.combine, selection.score]


KERNEL = Kernel(
    name="paged_attention",
    run=lambda given: given.found(),
    reference=lambda given: given.expected(),
    cases=_cases(),
    controls=CONTROLS,
    bodies=_bodies,
)
