"""Entries of sequences that lie in pages of a pool, for kernels that read them there, and their writing.

`write` launches a body of page_bodies.py. Attention and the selection of blocks take `Pages` in the place of a tensor:
their bodies look up where a tile of keys lies, and are those for tensors in all else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from lazyio.kernels.contract import bodies
from lazyio.kernels.places import UNIT, places

#: Positions of a page.
PAGE = 256


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """The entries of a sequence so far: entry i is one of page table[i // entries of a page].

    It has what launchers ask a tensor [length, *shape] for.
    """

    plane: torch.Tensor  # [pages of the pool, entries of a page, *shape]; entries of a page lie in a row
    table: torch.Tensor  # int64 [pages of the sequence], on the same device
    length: int

    def __len__(self) -> int:
        return self.length

    @property
    def shape(self) -> tuple[int, ...]:
        """[length, *shape]."""
        return self.length, *self.plane.shape[2:]

    @property
    def dtype(self) -> torch.dtype:
        """Of entries."""
        return self.plane.dtype

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.plane.device

    def stride(self) -> tuple[int, ...]:
        """In elements, within a page."""
        return self.plane.stride()[1:]

    def is_contiguous(self) -> bool:
        """Whether entries of a page are behind each other."""
        return self.plane[0].is_contiguous()

    def gathered(self) -> torch.Tensor:
        """All entries, [length, *shape], a copy."""
        count = -(-self.length // self.plane.shape[1])
        return self.plane.index_select(0, self.table[:count]).flatten(0, 1)[: self.length]


#: Entries of a sequence, [length, *shape].
Entries: TypeAlias = torch.Tensor | Pages


def found_by(entries: Entries) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    """What a body finds entries by: the tensor, the table, and the constants PAGE and PAGE_STRIDE."""
    if isinstance(entries, Pages):
        plane = entries.plane
        return plane, entries.table, {"PAGE": plane.shape[1], "PAGE_STRIDE": plane.stride(0)}
    return entries, entries, {"PAGE": 0, "PAGE_STRIDE": 0}


def places_of(*kinds: Sequence[Entries]) -> torch.Tensor:
    """Where those of several sequences lie: of each kind the tensors, or once the tables, beside those of the first.

    int64 [kinds * sequences] or [sequences], in units of 16 bytes.
    """
    tables = [entries.table for entries in kinds[0] if isinstance(entries, Pages)]
    if tables:
        return places(tables)
    found = [places([entries for entries in kind if isinstance(entries, torch.Tensor)]) for kind in kinds]
    return found[0] if len(found) == 1 else torch.cat(found)


def check_pages(kinds: Sequence[Sequence[Entries]]) -> None:
    """Assert that bodies can find the entries of several sequences, of each kind in pages of the same tables."""
    of_kinds = [[_in_pages(entries) for entries in kind] for kind in kinds]
    tables = [pages.table for pages in of_kinds[0]]
    for kind in of_kinds:
        plane = kind[0].plane
        assert len(kind) == len(tables), "there is something of each kind for each sequence"
        assert PAGE % plane.shape[1] == 0, f"a page of {PAGE} positions has {plane.shape[1]} entries"
        assert plane.data_ptr() % UNIT == 0, "a plane begins at a multiple of 16 bytes"
        assert plane.stride(0) == of_kinds[0][0].plane.stride(0), "planes are of different pools"
        for pages, table in zip(kind, tables, strict=True):
            assert pages.plane is plane, "sequences are in different planes"
            assert pages.table is table, "what a sequence keeps has different tables"
            assert pages.length <= table.shape[0] * plane.shape[1], "pages are fewer than entries"
    for table in tables:
        _check_table(table, of_kinds[0][0].plane.device)


def _in_pages(entries: Entries) -> Pages:
    assert isinstance(entries, Pages), "some lie in pages, and some do not"
    return entries


def _check_table(table: torch.Tensor, device: torch.device) -> None:
    assert table.dtype == torch.int64, "tables are int64"
    assert table.is_contiguous(), "a table is not contiguous"
    assert table.device == device, "a table is on another device"
    assert table.data_ptr() % UNIT == 0, "tables begin at a multiple of 16 bytes"


def write(new: Sequence[torch.Tensor], kinds: Sequence[Sequence[Pages]], positions: torch.Tensor) -> None:
    """Write entries of one or two kinds, as keys and values, to where they belong; never waits.

    new [entries, *shape] each, in the dtype of the pages, entries of one sequence, or one each of several; `kinds` are
    these sequences, with room for them, in pages of the same table. positions int64 [entries] are those of the tokens,
    for which a page has 256 / entries of a page each. Raises Unsupported where Triton is missing.
    """
    _check(new, kinds, positions)
    planes = [kind[0].plane for kind in kinds]
    width = planes[0][0, 0].numel()
    steps = len(kinds[0]) > 1
    pair = {"first": new[0], "second": new[-1], "to_first": planes[0], "to_second": planes[-1]}
    _bodies().write[(new[0].shape[0],)](
        **pair,
        table=kinds[0][0].table,
        positions=positions,
        places=places_of(kinds[0]) if steps else positions,
        WIDTH=width,
        FIRST_STRIDE=new[0].stride(0),
        SECOND_STRIDE=new[-1].stride(0),
        PAGE=planes[0].shape[1],
        PAGE_STRIDE=planes[0].stride(0),
        RATIO=PAGE // planes[0].shape[1],
        PAIR=len(new) == 2,
        STEPS=steps,
        TILE=1 << (width - 1).bit_length(),
    )


def _check(new: Sequence[torch.Tensor], kinds: Sequence[Sequence[Pages]], positions: torch.Tensor) -> None:
    assert len(new) == len(kinds) in (1, 2), "entries of one or two kinds are written"
    count, shape = new[0].shape[0], new[0].shape[1:]
    check_pages(kinds)
    assert len(kinds[0]) in (1, count), "entries are of one sequence, or of one each"
    assert positions.shape == (count,), "positions are [entries]"
    assert positions.dtype == torch.int64, "positions are int64"
    assert positions.is_contiguous(), "positions are not contiguous"
    for entries, kind in zip(new, kinds, strict=True):
        plane = kind[0].plane
        assert entries.shape == (count, *shape), "entries of both kinds have the same shape"
        assert plane.shape[1:] == (kinds[0][0].plane.shape[1], *shape), "entries have the shape of those in pages"
        assert entries.dtype == plane.dtype, "entries are of another dtype than pages"
        assert entries.device == plane.device == positions.device, "tensors are on different devices"
        assert count == 0 or entries[0].is_contiguous(), "an entry is not contiguous"
        assert kind[0].is_contiguous(), "entries of a page are not contiguous"


def _bodies() -> Any:
    return bodies("page_bodies", "the kernel of pages")


def reference(new: Sequence[torch.Tensor], kinds: Sequence[Sequence[Pages]], positions: torch.Tensor) -> None:
    """What `write` does, on any device."""
    for entries, kind in zip(new, kinds, strict=True):
        each = kind[0].plane.shape[1]
        number = positions // (PAGE // each)
        tables = [pages.table for pages in kind]
        if len(tables) == 1:
            pages = tables[0][number // each]
        else:
            pages = torch.stack([table[i // each] for table, i in zip(tables, number, strict=True)])
        kind[0].plane[pages, number % each] = entries
