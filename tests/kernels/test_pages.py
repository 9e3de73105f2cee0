from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from lazyio.kernels.pages import PAGE, Pages, reference, write

CPU = torch.device("cpu")


def planes(device: torch.device, ratio: int = 1, shape: Sequence[int] = (3, 5), pages: int = 9) -> list[torch.Tensor]:
    """Those of keys and of values in a pool that has no numbers, with something between them."""
    each = PAGE // ratio * shape[0] * shape[1]
    stride = -(-(2 * each + 64) // 64) * 64
    pool = torch.full((pages * stride,), torch.nan, device=device)
    strides = (stride, shape[0] * shape[1], shape[1], 1)
    return [pool.as_strided((pages, PAGE // ratio, *shape), strides, at * (each + 64 - each % 64)) for at in (0, 1)]


def table(pages: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(pages, device=device)


def numbers(count: int, shape: Sequence[int], device: torch.device, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("ends", [(255,), (256,), (257,), (1, 254, 2, 300, 200)], ids=str)
def test_chunks_lie_where_they_belong_and_nothing_else_is_touched(
    ends: tuple[int, ...], ratio: int, device: torch.device
):
    found, expected = planes(device, ratio), planes(device, ratio)
    of_sequence, start = table([7, 2, 5], device), 0
    for count in ends:
        new = [numbers(count // ratio, (3, 5), device, seed) for seed in (start, start + 1)]
        positions = torch.arange(count // ratio, device=device) * ratio + start
        for into, by in ((found, write), (expected, reference)):
            by(new, [[Pages(plane, of_sequence, 0)] for plane in into], positions)
        start += count // ratio * ratio
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert one[0].isnan().all()  # the null page
        assert one[[1, 3, 4, 6, 8]].isnan().all()


def test_entries_are_those_that_were_written(device: torch.device):
    (plane, _), new = planes(device), numbers(600, (3, 5), device)
    pages = Pages(plane, table([7, 2, 5], device), 600)
    write((new,), ([pages],), torch.arange(600, device=device))
    assert torch.equal(pages.gathered(), new)
    assert torch.equal(plane[2], new[PAGE : 2 * PAGE])
    assert (pages.shape, len(pages), pages.stride()) == ((600, 3, 5), 600, (15, 5, 1))


def test_an_entry_for_each_of_several_sequences(device: torch.device):
    found, expected = planes(device), planes(device)
    tables = [table([4], device), table([8, 1], device), table([3, 6, 2], device)]
    wide = numbers(3, (6, 5), device)  # entries may lie apart
    new, positions = (wide[:, :3], wide[:, 3:]), torch.tensor([9, 256, 767], device=device)
    for into, by in ((found, write), (expected, reference)):
        by(new, [[Pages(plane, one, 0) for one in tables] for plane in into], positions)
    for one, other, entries in zip(found, expected, new, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.stack([one[4, 9], one[1, 0], one[2, 255]]), entries)


def given(device: torch.device = CPU) -> tuple[list[torch.Tensor], list[list[Pages]], torch.Tensor]:
    tables = [table([4, 2], device), table([8, 1], device)]
    kinds = [[Pages(plane, one, 0) for one in tables] for plane in planes(device)]
    return [numbers(2, (3, 5), device), numbers(2, (3, 5), device, 1)], kinds, torch.tensor([1, 2], device=device)


def with_table(kinds: list[list[Pages]], changed: torch.Tensor) -> list[list[Pages]]:
    return [[kind[0], replace(kind[1], table=changed)] for kind in kinds]


@pytest.mark.parametrize(
    "change",
    [
        lambda new, kinds, at: (new[:1], kinds, at),
        lambda new, kinds, at: ([*new, new[0]], [*kinds, kinds[0]], at),
        lambda new, kinds, at: (new, kinds, at[:1]),
        lambda new, kinds, at: (new, kinds, at.int()),
        lambda new, kinds, at: ([one.half() for one in new], kinds, at),
        lambda new, kinds, at: ([one[:, :2] for one in new], kinds, at),
        lambda new, kinds, at: ([one.transpose(1, 2).contiguous().transpose(1, 2) for one in new], kinds, at),
        lambda new, kinds, at: ([torch.cat([one, one]) for one in new], kinds, torch.cat([at, at])),
        lambda new, kinds, at: ([one.to("meta") for one in new], kinds, at),
        lambda new, kinds, at: (new, [kinds[0], kinds[1][:1]], at),
        lambda new, kinds, at: (new, [kinds[0], [kinds[1][0], kinds[0][1]]], at),
        lambda new, kinds, at: (new, [kinds[0], kinds[1][::-1]], at),
        lambda new, kinds, at: (new, [kinds[0], [replace(one, plane=one.plane.clone()) for one in kinds[1]]], at),
        lambda new, kinds, at: (new, with_table(kinds, torch.tensor([8, 1], dtype=torch.int32)), at),
        lambda new, kinds, at: (new, with_table(kinds, torch.tensor([8, 0, 1, 0])[::2]), at),
        lambda new, kinds, at: (new, with_table(kinds, torch.tensor([0, 8, 1])[1:]), at),
        lambda new, kinds, at: (new, [[replace(one, length=513) for one in kind] for kind in kinds], at),
    ],
)
def test_what_does_not_fit_is_never_launched(change):
    write(*given())
    with pytest.raises(AssertionError):
        write(*change(*given()))


def test_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from lazyio.kernels.pages import *\n"
        "new, pages = torch.zeros(3, 4), Pages(torch.zeros(2, 256, 4), torch.tensor([1]), 3)\n"
        "reference([new], [[pages]], torch.arange(3)); pages.gathered()\n"
        "write([new], [[pages]], torch.arange(3))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("lazyio.errors.Unsupported: the kernel of pages needs Triton, which can't be imported")
