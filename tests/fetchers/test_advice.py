import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lazyio.fetchers.advice import Adviser
from lazyio.fetchers.base import Int64
from lazyio.fetchers.conformance import run_in_child
from lazyio.fetchers.mapping import libc

PAGE = mmap.PAGESIZE
PAGES = 3000

Vectors = list[tuple[int, int]]


class Libc:
    """The C library, with `answer` in the place of process_madvise; keeps what was asked for."""

    def __init__(self, answer: Callable[[Vectors], int] | None = None) -> None:
        self.calls: list[Vectors] = []
        self.singles: Vectors = []
        self._answer = answer or (lambda vectors: sum(length for _, length in vectors))

    def syscall(
        self, number: int, descriptor: object, vectors: ctypes.c_void_p, count: ctypes.c_size_t, *_: object
    ) -> int:
        assert number == 440
        words = np.ctypeslib.as_array((ctypes.c_uint64 * (2 * count.value)).from_address(vectors.value or 0))
        asked = [(int(address), int(length)) for address, length in words.reshape(-1, 2)]
        self.calls.append(asked)
        return self._answer(asked)

    def madvise(self, address: int, length: int, advice: int) -> int:
        assert advice == mmap.MADV_WILLNEED
        self.singles.append((address, length))
        return 0


@pytest.fixture
def adviser() -> Iterator[Adviser]:
    adviser = Adviser()
    yield adviser
    adviser.close()


def ranges(count: int) -> tuple[Int64, Int64]:
    """Ranges that only a double of the C library may be asked about."""
    return np.arange(count) * 10 * PAGE + (1 << 40), np.full(count, PAGE)


def refuse(code: int) -> Callable[[Vectors], int]:
    def answer(vectors: Vectors) -> int:
        ctypes.set_errno(code)
        return -1

    return answer


def test_pages_come_into_memory(adviser: Adviser, tmp_path: Path) -> None:
    path = tmp_path / "pages"
    path.write_bytes(os.urandom(PAGES * PAGE))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_RANDOM)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    if resident(address).any():
        pytest.skip("this filesystem drops nothing from the page cache")
    wanted = np.arange(0, PAGES, 2)
    adviser.will_need(address + wanted * PAGE, np.full(len(wanted), PAGE))
    assert adviser.fell_back is None
    for _ in range(500):
        if resident(address)[wanted].all():
            break
        time.sleep(0.01)
    assert resident(address)[wanted].all()
    assert not resident(address)[1::2].all()


def resident(address: int) -> np.ndarray:
    flags = np.zeros(PAGES, np.uint8)
    assert libc().mincore(address, PAGES * PAGE, flags.ctypes.data) == 0
    return flags & 1 == 1


def test_ranges_go_a_thousand_and_24_at_a_time(adviser: Adviser) -> None:
    adviser._libc = double = Libc()
    addresses, lengths = ranges(2500)
    adviser.will_need(addresses, lengths)
    assert [len(call) for call in double.calls] == [1024, 1024, 452]
    assert [each for call in double.calls for each in call] == list(
        zip(addresses.tolist(), lengths.tolist(), strict=True)
    )
    assert adviser.fell_back is None


def test_no_ranges_make_no_call(adviser: Adviser) -> None:
    adviser._libc = double = Libc()
    adviser.will_need(*ranges(0))
    assert double.calls == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EINVAL])
def test_a_refusal_is_said_and_each_range_advised_by_itself(adviser: Adviser, code: int) -> None:
    adviser._libc = double = Libc(refuse(code))
    addresses, lengths = ranges(3)
    adviser.will_need(addresses, lengths)
    adviser.will_need(addresses, lengths)
    assert len(double.calls) == 1, "what is refused once is not tried again"
    assert double.singles == 2 * list(zip(addresses.tolist(), lengths.tolist(), strict=True))
    assert adviser.fell_back is not None
    assert f"process_madvise is refused ({errno.errorcode[code]})" in adviser.fell_back


def test_a_refused_range_is_left_to_its_fault_and_the_rest_advised(adviser: Adviser) -> None:
    """A call stops at the range that fails, and says how many bytes it did; one that fails at once is an error."""
    addresses, lengths = ranges(6)
    bad = int(addresses[2])

    def answer(vectors: Vectors) -> int:
        done = 0
        for address, length in vectors:
            if address == bad:
                if not done:
                    ctypes.set_errno(errno.EFAULT)
                return done or -1
            done += length
        return done

    adviser._libc = double = Libc(answer)
    adviser.will_need(addresses, lengths)
    assert [[address for address, _ in call] for call in double.calls] == [
        addresses.tolist(),
        addresses[2:].tolist(),
        addresses[3:].tolist(),
    ]
    assert adviser.fell_back is None
    assert double.singles == []


def test_a_child_advises_itself(adviser: Adviser) -> None:
    memory = mmap.mmap(-1, PAGE)
    here = np.array([np.frombuffer(memory, np.uint8).ctypes.data]), np.array([PAGE])
    adviser.will_need(*here)
    before = adviser._pidfd

    def check() -> None:
        adviser.will_need(*here)
        assert adviser.fell_back is None
        information = Path(f"/proc/self/fdinfo/{adviser._pidfd}").read_text()
        assert f"Pid:\t{os.getpid()}\n" in information
        adviser.close()

    run_in_child(check)
    assert adviser._pidfd == before
    adviser.will_need(*here)


def test_closing_twice_or_unused_is_harmless() -> None:
    before = len(os.listdir("/proc/self/fd"))
    Adviser().close()
    adviser = Adviser()
    memory = mmap.mmap(-1, PAGE)
    adviser.will_need(np.array([np.frombuffer(memory, np.uint8).ctypes.data]), np.array([PAGE]))
    adviser.close()
    adviser.close()
    assert len(os.listdir("/proc/self/fd")) == before
