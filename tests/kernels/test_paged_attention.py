"""Attention from pages beside the same from windows, which the contract's cases are too; here in layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lazyio.engine.kv import pieces as kv_pieces
from lazyio.engine.kv.pieces import LaneTable, Paged
from lazyio.engine.kv.tables import Table
from lazyio.engine.layers import attention, block_selection, gated_attention
from lazyio.engine.layers.block_selection import BlockKeys, BlockSelection
from lazyio.engine.layers.gated_attention import GatedAttention, KeysValues
from lazyio.engine.layers.rope import Rope
from lazyio.engine.state import State
from lazyio.engine.ubatch import Ubatch
from lazyio.kernels import sparse_attention
from lazyio.kernels.paged_attention import Arguments
from lazyio.kernels.pages import PAGE, Entries
from lazyio.kernels.sparse_attention import attend_causal, attend_steps

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of overflows in the interpreter
CPU = torch.device("cpu")


def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention, block_selection, gated_attention, kv_pieces):
        monkeypatch.setattr(module, "usable", lambda _: True)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("end", [255, 256, 257, 512])
def test_bits_are_those_of_windows_around_an_edge(end: int, tokens: int, device: torch.device):
    *_, equal = Arguments.random(device, end, tokens, (end,)).found()
    assert equal.tolist() == [1, 1, 1]


def test_parts_of_keys_are_those_of_windows(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    """Also where a part begins within a page."""
    monkeypatch.setattr(sparse_attention, "_LEAST_SPAN", 32)
    for tokens, ends in ((1, (300,)), (1, (300, 259))):
        *_, equal = Arguments.random(device, 2, tokens, ends).found()
        assert equal.tolist() == [1, 1, 1]


def test_sequences_that_share_a_page(device: torch.device):
    """As those do that begin alike: what each has behind it is its own."""
    given = Arguments.random(device, 3, 1, (300, 270))
    of = given.sequences
    keys, values, _ = given._written()
    shared = torch.stack([keys[0].table[0], keys[1].table[1]])
    keys[1], values[1] = (replace(kind[1], table=shared) for kind in (keys, values))
    windows = [[pages.gathered() for pages in kind] for kind in (keys, values)]
    assert torch.equal(windows[0][1], torch.cat([of.k[0][:PAGE], of.k[1][PAGE:]]))
    q, positions = torch.cat(of.q), torch.tensor(of.before, device=device)
    found, expected = (attend_steps(q, *kinds, positions, None, scale=of.scale) for kinds in ((keys, values), windows))
    assert torch.equal(found, expected)


def mixed(kinds: list[list[Entries]]) -> list[list[Entries]]:
    return [kinds[0], [kinds[1][0], kinds[1][1].gathered()], kinds[2]]


@pytest.mark.parametrize(
    "change",
    [
        mixed,
        lambda kinds: [[kinds[0][0].gathered(), kinds[0][1]], *kinds[1:]],
        lambda kinds: [kinds[0], kinds[1][::-1], kinds[2]],
        lambda kinds: [[replace(one, table=one.table.int()) for one in kind] for kind in kinds],
        lambda kinds: [[replace(one, table=one.table[:1]) for one in kind] for kind in kinds],
        lambda kinds: [[replace(one, plane=one.plane[:, : PAGE // 2]) for one in kind] for kind in kinds[:2]],
    ],
)
def test_pages_that_do_not_fit_are_never_launched(change):
    given = Arguments.random(CPU, 0, 1, (300, 270))
    of = given.sequences
    keys, values, *_ = change(given._pages())
    with pytest.raises(AssertionError):
        attend_steps(torch.cat(of.q), keys, values, torch.tensor(of.before), None, scale=1.0)
    with pytest.raises(AssertionError):
        [attend_causal(of.q[0], k, v, scale=1.0) for k, v in zip(keys, values, strict=True)]


class Lanes:
    """States of a layer and what selects its blocks, in pages of one pool without numbers, or in windows."""

    def __init__(
        self, modules: list[Any], tables: Sequence[Sequence[int]], device: torch.device, *, paged: bool
    ) -> None:
        self.modules, self.device, self.paged = modules, device, paged
        each = 2 * 2 * PAGE * 16 + PAGE // 4 * 16
        self.pool = torch.full((10 * each,), torch.nan, device=device)
        shapes, self.planes, offset = ((PAGE, 2, 16), (PAGE, 2, 16), (PAGE // 4, 16)), [], 0
        for shape in shapes:
            strides = (each, *torch.empty(shape, device="meta").stride())
            self.planes.append(self.pool.as_strided((10, *shape), strides, offset))
            offset += torch.Size(shape).numel()
        self.states = [self.state(table) for table in tables]

    def state(self, pages: Sequence[int]) -> State:
        room = len(pages) * PAGE
        pieces = {module: module.new_piece(room, torch.float32, self.device) for module in self.modules}
        if self.paged:
            table = LaneTable(Table(np.array(pages, np.int32)), torch.tensor(pages, device=self.device))
            k, v, blocks = (Paged(plane, table, 0) for plane in self.planes)
            pieces[self.modules[0]] = KeysValues(k, v)
            for module in self.modules[1:]:
                pieces[module] = BlockKeys(blocks, pieces[module].raw)
        return State(pieces, room)

    def computed(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of the next tokens of each."""
        ubatch = Ubatch.of([(state, [0] * len(x)) for state, x in zip(self.states, parts, strict=True)], self.device)
        with torch.inference_mode():
            found = self.modules[0](torch.cat(parts), Rope(100.0, 8).angles(ubatch.positions, torch.float32), ubatch)
        for state, x in zip(self.states, parts, strict=True):
            state.tokens += len(x)
        return found


def layers(selecting: bool, device: torch.device) -> list[Any]:
    """An attention, and what selects its blocks."""
    made = torch.Generator().manual_seed(2)
    selection = BlockSelection(24, 2, 16, 12, 4, Rope(100.0, 8), 1e-6, serves=(6, 2)) if selecting else None
    layer = GatedAttention(24, 6, 2, 16, 1e-6, selection).requires_grad_(False).to(device)
    for parameter in layer.parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, generator=made))
    return [layer] if selection is None else [layer, selection]


@pytest.mark.parametrize("selecting", [False, True])
def test_a_layer_in_pages_is_the_layer_in_windows(
    selecting: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    """Chunks that cut pages, steps of several sequences around an edge and of one alone, and nothing is copied."""
    modules, tables = layers(selecting, device), [[7, 2], [4], [1, 9, 5]]
    paged, windows = (Lanes(modules, tables, device, paged=paged) for paged in (True, False))
    made = torch.Generator().manual_seed(4)
    for counts in [(254, 9, 505), (1, 1, 9), (1, 1, 1), (1, 1, 1), (1, 13, 1)]:
        parts = [torch.randn(count, 24, generator=made).to(device) for count in counts]
        found = paged.computed(parts)
        assert found.isfinite().all()
        assert torch.equal(found, windows.computed(parts))
        if counts[0] > 1:  # so much would take the interpreter minutes
            switched_on(monkeypatch)
            monkeypatch.setattr(Paged, "entries", property(lambda _: pytest.fail("pages were copied")))
    planes = paged.planes[: 3 if selecting else 2]
    assert all(plane[[0, 3, 6, 8]].isnan().all() for plane in planes)
    assert all(plane[[1, 2, 4, 7, 9, 5], 0].isfinite().all() for plane in planes[:2])


def test_a_sequence_that_outgrows_its_pages_is_not_written(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    switched_on(monkeypatch)
    lanes = Lanes(layers(False, device), [[3]], device, paged=True)
    with pytest.raises(AssertionError, match="outgrew its claim"):
        lanes.computed([torch.zeros(PAGE + 1, 24, device=device)])
    assert lanes.pool.isnan().all()
