"""Which fetcher reads, and what takes the place of one that is refused, by real refusals of the kernel."""

import ctypes
import errno
import fcntl
import os
import resource
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyio import LazyIOError, LazyTable, NeverFits, SettingError, TableSpec, Unsupported, modes, open_table
from lazyio.fetchers import Fetcher, load
from lazyio.fetchers.conformance import MadeTable, run_in_child, write_rows
from lazyio.host import filesystem_of

OpenWay = Callable[..., LazyTable]

# System calls that have these numbers on all architectures.
PIDFD_OPEN, IO_URING_SETUP, PROCESS_MADVISE = 434, 425, 440


def refuse_call(number: int, code: int) -> None:
    """Have the kernel answer a system call of this process with an error, as the seccomp profiles of containers do."""
    load_number, jump_if_equal, answer = 0x20, 0x15, 0x06
    errno_answer, allow = 0x00050000, 0x7FFF0000
    steps = [
        (load_number, 0, 0, 0),
        (jump_if_equal, 0, 1, number),
        (answer, 0, 0, errno_answer | code),
        (answer, 0, 0, allow),
    ]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(filters)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    for arguments in ((no_new_privileges, 1, 0, 0, 0), (set_seccomp, filter_mode, ctypes.addressof(program), 0, 0)):
        assert prctl(*arguments) == 0, os.strerror(ctypes.get_errno())


def check_rows(table: LazyTable, made: MadeTable) -> None:
    ids = np.random.default_rng(6).integers(0, len(made.content), 2000)
    np.testing.assert_array_equal(table.gather(ids), made.content[ids])


@pytest.fixture
def needs_uring(spec: TableSpec) -> None:
    try:
        open_table(spec, mode="uring", direct_io="off", strict=True).close()
    except Unsupported as refused:
        pytest.skip(str(refused))


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes fetchers of these names unsupported."""

    def arrange(*names: str) -> None:
        def load_or_refuse(name: str) -> type[Fetcher]:
            return refused(name) if name in names else load(name)

        monkeypatch.setattr(modes, "load", load_or_refuse)

    return arrange


def refused(name: str) -> Any:
    def open_it(*_: object) -> None:
        raise Unsupported(f"there is no {name} here")

    return open_it


# --- modes and their fetchers ----------------------------------------------------------------------------------------


def test_each_mode_has_its_fetcher_and_says_so(open_way: OpenWay, way: str, spec: TableSpec, made: MadeTable) -> None:
    with open_way(spec) as table:
        backend = table.backend
        assert backend.mode == way.split(",")[0]
        assert backend.fallback_reason is None
        assert backend.why == "as asked"
        assert backend.block_bytes >= (512 if backend.direct_io else 1)
        assert (backend.workers > 1) == (backend.fetcher == "pread")
        check_rows(table, made)


def test_the_bare_mode_asks_for_no_pages(spec: TableSpec) -> None:
    for mode, advised in (("on", True), ("on-bare", False)):
        with open_table(spec, mode=mode) as table:
            fetcher: Any = table._fetcher
            assert fetcher.options.advice == advised


def test_numbers_are_passed_on(spec: TableSpec) -> None:
    with open_table(spec, mode="on-direct", workers=5, direct_io="on", block_bytes="8KiB") as table:
        assert table.backend.workers == 5
        assert table.backend.block_bytes == 8192 or not table.backend.direct_io


@pytest.mark.usefixtures("needs_uring")
def test_the_depth_is_passed_on(spec: TableSpec) -> None:
    with open_table(spec, mode="uring", queue_depth=7) as table:
        assert table.backend.queue_depth == 7


def test_an_unknown_mode_is_refused_with_those_there_are(spec: TableSpec) -> None:
    with pytest.raises(SettingError, match=r"'sideways'; it can be off, on, on-bare, on-direct, uring, auto"):
        open_table(spec, mode="sideways")


def test_off_is_refused_where_it_can_not_fit(spec: TableSpec) -> None:
    with pytest.raises(NeverFits, match="use mode uring, on-direct or on, or lower reserve"):
        open_table(spec, mode="off", reserve="1000TiB")


# --- auto ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("missing", "mode"), [(0, "off"), (1, "uring")])
@pytest.mark.usefixtures("needs_uring")
def test_auto_loads_what_fits_beside_the_reserve(
    spec: TableSpec, made: MadeTable, monkeypatch: pytest.MonkeyPatch, missing: int, mode: str
) -> None:
    monkeypatch.setattr(modes, "available_memory_bytes", lambda: spec.table_bytes + (1 << 20) - missing)
    with open_table(spec, reserve="1MiB") as table:
        assert table.backend.mode == "auto"
        assert table.backend.fetcher == modes.FETCHERS[mode]
        fits = "it fits in memory" if mode == "off" else "it does not fit in memory"
        assert table.backend.why.startswith(
            f"{fits}: the table takes 369.2 KiB, 1.4 MiB of memory can be had and 1.0 MiB"
        )
        check_rows(table, made)


@pytest.mark.parametrize(("lacking", "fetcher"), [(["uring"], "pread"), (["uring", "pread"], "mmap")])
def test_auto_takes_the_best_that_works(
    spec: TableSpec,
    made: MadeTable,
    monkeypatch: pytest.MonkeyPatch,
    refuse: Callable[..., None],
    lacking: list[str],
    fetcher: str,
) -> None:
    monkeypatch.setattr(modes, "available_memory_bytes", lambda: 0)
    refuse(*lacking)
    before = open_descriptors()
    with open_table(spec) as table:
        assert table.backend.fetcher == fetcher
        for name in lacking:
            assert f"there is no {name} here" in table.backend.why
        check_rows(table, made)
    assert open_descriptors() == before, "the one that was tried first is still open"


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "lacking", "fetcher"),
    [("uring", ["uring"], "pread"), ("uring", ["uring", "pread"], "mmap"), ("on-direct", ["pread"], "mmap")],
)
def test_the_next_one_takes_its_place_and_every_reason_is_named(
    spec: TableSpec, made: MadeTable, refuse: Callable[..., None], mode: str, lacking: list[str], fetcher: str
) -> None:
    refuse(*lacking)
    before = len(os.listdir("/proc/self/fd"))
    with open_table(spec, mode=mode) as table:
        assert table.backend.fetcher == fetcher
        assert table.backend.mode == mode
        for name in lacking:
            assert f"there is no {name} here" in str(table.backend.fallback_reason)
        check_rows(table, made)
    with pytest.raises(Unsupported, match=f"there is no {lacking[0]} here"):
        open_table(spec, mode=mode, strict=True)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_nothing_can_replace_is_an_error(spec: TableSpec, refuse: Callable[..., None]) -> None:
    refuse("mmap")
    with pytest.raises(Unsupported, match="there is no mmap here"):
        open_table(spec, mode="on")


@pytest.mark.usefixtures("needs_uring")
@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (errno.EPERM, r"io_uring is refused (EPERM): a seccomp profile forbids it"),
        (errno.ENOSYS, r"io_uring is refused (ENOSYS): this kernel"),
    ],
)
def test_a_refused_io_uring_is_replaced_by_pread(spec: TableSpec, made: MadeTable, code: int, cause: str) -> None:
    def check() -> None:
        refuse_call(IO_URING_SETUP, code)
        with open_table(spec, mode="uring") as table:
            assert table.backend.fetcher == "pread"
            assert table.backend.fallback_reason is not None
            assert cause in table.backend.fallback_reason
            check_rows(table, made)
        with pytest.raises(Unsupported) as caught:
            open_table(spec, mode="uring", strict=True)
        assert cause in str(caught.value)

    run_in_child(check)


@pytest.mark.parametrize(("call", "name"), [(PROCESS_MADVISE, "process_madvise"), (PIDFD_OPEN, "pidfd_open")])
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_without_advice_in_batches_maps_still_work(
    spec: TableSpec, made: MadeTable, call: int, name: str, code: int
) -> None:
    def check() -> None:
        refuse_call(call, code)
        with open_table(spec, mode="on") as table:
            assert table.backend.fetcher == "mmap"
            assert table.backend.fallback_reason is not None
            assert f"{name} is refused ({errno.errorcode[code]})" in table.backend.fallback_reason
            check_rows(table, made)
        with pytest.raises(Unsupported, match=f"{name} is refused .*strict allows no fallback"):
            open_table(spec, mode="on", strict=True)
        with open_table(spec, mode="on-bare", strict=True) as table:
            check_rows(table, made)

    run_in_child(check)


@pytest.fixture
def in_memory() -> Iterator[MadeTable]:
    """A table on a filesystem without direct I/O."""
    if not os.path.isdir("/dev/shm") or filesystem_of("/dev/shm").kind != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield write_rows(Path(folder), 90, [("a", 131, 2000)])


@pytest.mark.parametrize("mode", ["on-direct", "uring"])
def test_without_direct_reads_they_are_buffered_and_the_cause_named(
    in_memory: MadeTable, make_spec: Callable[[MadeTable], TableSpec], mode: str
) -> None:
    spec = make_spec(in_memory)
    with open_table(spec, mode=mode, direct_io="on") as table:
        assert not table.backend.direct_io
        assert table.backend.block_bytes == 1
        assert "a lies on tmpfs" in str(table.backend.fallback_reason)
        check_rows(table, in_memory)
    before = open_descriptors()
    with pytest.raises(Unsupported, match="a lies on tmpfs"):
        open_table(spec, mode=mode, direct_io="on", strict=True)
    assert open_descriptors() == before
    with open_table(spec, mode=mode, direct_io="off") as table:
        assert "tmpfs" not in str(table.backend.fallback_reason)


def test_little_lockable_memory_changes_no_byte(make_spec: Callable[[MadeTable], TableSpec]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        made = write_rows(Path(folder), 90, [("a", 131, 2000)])
        spec = make_spec(made)
        for mode in ("uring", "on-direct"):
            open_table(spec, mode=mode).close()

        def check() -> None:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            for mode in ("uring", "on-direct"):
                with open_table(spec, mode=mode) as table:
                    reason = table.backend.fallback_reason
                    assert table.backend.fetcher == modes.FETCHERS[mode] or "RLIMIT_MEMLOCK" in str(reason)
                    check_rows(table, made)

        run_in_child(check)


def test_too_few_descriptors_are_an_error_in_words_or_a_fallback(
    open_way: OpenWay, way_arguments: dict[str, Any], spec: TableSpec, made: MadeTable
) -> None:
    open_way(spec).close()

    def check() -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        before = open_descriptors()
        outcomes = set()
        for left in range(14):
            free = [number for number in range(256) if number not in before]
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[left], hard))
            try:
                with open_table(spec, **way_arguments) as table:
                    check_rows(table, made)
                    outcomes.add("read")
            except LazyIOError as error:
                # With none left, /proc does not tell how much memory there is.
                outcomes.add("refused" if "open files" in str(error) or "0 B can be had" in str(error) else str(error))
            assert open_descriptors() == before, f"with {left} descriptors left"
        assert outcomes == {"read", "refused"}

    run_in_child(check)


def open_descriptors() -> set[int]:
    """Found without opening one."""
    found = set()
    for number in range(256):
        with suppress(OSError):
            fcntl.fcntl(number, fcntl.F_GETFD)
            found.add(number)
    return found
