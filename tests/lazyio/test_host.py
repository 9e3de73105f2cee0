import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lazyio import host
from lazyio.fetchers.base import Alignment

GIB = 1 << 30


class FakeRoot:
    """A /proc and a /sys of our own making."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def write(self, name: str, text: object) -> None:
        file = self.path / name.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")


@pytest.fixture
def root(tmp_path: Path) -> FakeRoot:
    return FakeRoot(tmp_path)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_available_memory_is_that_of_the_machine_without_cgroups(root: FakeRoot) -> None:
    root.write("proc/meminfo", f"MemTotal: 99 kB\nMemFree: 1 kB\nMemAvailable:  {8 * GIB // 1024} kB")
    assert host.available_memory_bytes(root=str(root)) == 8 * GIB


def test_old_kernels_give_free_memory_only(root: FakeRoot) -> None:
    root.write("proc/meminfo", "MemTotal: 99 kB\nMemFree: 12 kB")
    assert host.available_memory_bytes(root=str(root)) == 12 * 1024


def test_nothing_is_available_where_nothing_can_be_read(root: FakeRoot) -> None:
    assert host.available_memory_bytes(root=str(root)) == 0


def test_this_machine_has_memory() -> None:
    assert 0 < host.available_memory_bytes() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cgroup2(root: FakeRoot, group: str, limit: object, usage: int, cache: int = 0) -> None:
    folder = f"sys/fs/cgroup{group}"
    root.write(f"{folder}/memory.max", limit)
    root.write(f"{folder}/memory.current", usage)
    root.write(f"{folder}/memory.stat", f"anon 5\nfile {cache}\ninactive_file {cache // 2}\nactive_file {cache // 2}")


def machine_with_cgroup2(root: FakeRoot, path: str, subtree: str = "/") -> None:
    root.write("proc/meminfo", f"MemAvailable: {64 * GIB // 1024} kB")
    root.write("proc/self/cgroup", f"0::{path}")
    root.write(
        "proc/self/mountinfo",
        f"31 23 0:28 {subtree} /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate",
    )


def test_the_limit_of_an_outer_cgroup_counts(root: FakeRoot) -> None:
    machine_with_cgroup2(root, "/pod/app")
    cgroup2(root, "/pod/app", "max", 1 * GIB)
    cgroup2(root, "/pod", 6 * GIB, 4 * GIB)
    assert host.available_memory_bytes(root=str(root)) == 2 * GIB


def test_page_cache_of_a_cgroup_counts_as_free(root: FakeRoot) -> None:
    machine_with_cgroup2(root, "/app")
    cgroup2(root, "/app", 6 * GIB, 5 * GIB, cache=4 * GIB)
    assert host.available_memory_bytes(root=str(root)) == 5 * GIB


def test_the_throttling_limit_is_a_limit(root: FakeRoot) -> None:
    machine_with_cgroup2(root, "/app")
    cgroup2(root, "/app", "max", 1 * GIB)
    root.write("sys/fs/cgroup/app/memory.high", 3 * GIB)
    assert host.available_memory_bytes(root=str(root)) == 2 * GIB


def test_a_cgroup_beyond_its_limit_has_nothing_left(root: FakeRoot) -> None:
    machine_with_cgroup2(root, "/app")
    cgroup2(root, "/app", 1 * GIB, 2 * GIB)
    assert host.available_memory_bytes(root=str(root)) == 0


@pytest.mark.parametrize(
    ("path", "subtree"),
    [("/", "/"), ("/docker/abc", "/docker/abc"), ("/elsewhere", "/docker/abc")],
    ids=["own namespace", "bind of the own group", "outside of what is mounted"],
)
def test_a_container_sees_its_own_group_as_the_root(root: FakeRoot, path: str, subtree: str) -> None:
    machine_with_cgroup2(root, path, subtree)
    cgroup2(root, "", 3 * GIB, 1 * GIB)
    assert host.available_memory_bytes(root=str(root)) == 2 * GIB


def test_cgroup_v1(root: FakeRoot) -> None:
    root.write("proc/meminfo", f"MemAvailable: {64 * GIB // 1024} kB")
    root.write("proc/self/cgroup", "8:pids:/\n4:cpu,memory:/job\n0::/")
    root.write(
        "proc/self/mountinfo",
        "34 31 0:31 / /sys/fs/cgroup/cpu\\040mem rw - cgroup cgroup rw,cpu,memory\n"
        "35 31 0:32 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids",
    )
    for group, limit in (("/job", 9 * GIB), ("", 2**63 - 4096)):
        root.write(f"sys/fs/cgroup/cpu mem{group}/memory.limit_in_bytes", limit)
        root.write(f"sys/fs/cgroup/cpu mem{group}/memory.usage_in_bytes", 5 * GIB)
        root.write(f"sys/fs/cgroup/cpu mem{group}/memory.stat", f"active_file 1\ntotal_active_file {1 * GIB}")
    assert host.available_memory_bytes(root=str(root)) == 5 * GIB


# --- filesystems and devices -----------------------------------------------------------------------------------------


def fake_mounts(root: FakeRoot, path: Path, kind: str, source: str = "server:/export") -> None:
    point = str(path).replace(" ", r"\040")
    root.write(
        "proc/self/mountinfo",
        f"20 1 8:1 / / rw - ext4 /dev/sda1 rw\n21 20 0:50 / {point} rw - {kind} {source} rw",
    )


@pytest.mark.parametrize(
    ("kind", "network", "drops_cache"),
    [
        ("ext4", False, True),
        ("overlay", False, True),
        ("fuseblk", False, True),
        ("tmpfs", False, False),
        ("hugetlbfs", False, False),
        ("zfs", False, False),
        ("nfs4", True, True),
        ("cifs", True, True),
        ("ceph", True, True),
        ("fuse.sshfs", True, True),
        ("virtiofs", True, True),
    ],
)
def test_kinds(root: FakeRoot, tmp_path: Path, kind: str, network: bool, drops_cache: bool) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    fake_mounts(root, folder, kind)
    filesystem = host.filesystem_of(folder, root=str(root))
    assert (filesystem.kind, filesystem.mount, filesystem.source) == (kind, str(folder), "server:/export")
    assert (filesystem.network, filesystem.drops_cache) == (network, drops_cache)


def test_the_number_of_the_mount_goes_over_its_path(root: FakeRoot, tmp_path: Path) -> None:
    fake_mounts(root, tmp_path, "nfs4")
    file = tmp_path / "file"
    file.touch()
    descriptor = os.open(file, os.O_RDONLY)
    try:
        root.write(f"proc/self/fdinfo/{descriptor}", "pos:\t0\nflags:\t0100000\nmnt_id:\t20")
        assert host.filesystem_of(descriptor, root=str(root)).kind == "ext4"
    finally:
        os.close(descriptor)


def test_of_two_mounts_at_one_place_the_later_one_is_seen(root: FakeRoot, tmp_path: Path) -> None:
    root.write("proc/self/mountinfo", "1 1 8:1 / / rw - rootfs none rw\n2 1 8:1 / / rw - xfs /dev/sda1 rw")
    assert host.filesystem_of(tmp_path, root=str(root)).kind == "xfs"


def test_a_prefix_of_a_name_is_not_a_mount_point(root: FakeRoot, tmp_path: Path) -> None:
    (tmp_path / "data2").mkdir()
    fake_mounts(root, tmp_path / "data", "nfs4")
    assert host.filesystem_of(tmp_path / "data2", root=str(root)).kind == "ext4"


def fake_disk(root: FakeRoot, number: str, disk: str, partition: str | None = None) -> None:
    folder = f"sys/devices/pci/block/{disk}"
    for name, value in (("rotational", 0), ("nr_requests", 1023), ("logical_block_size", 4096)):
        root.write(f"{folder}/queue/{name}", value)
    if partition:
        root.write(f"{folder}/{partition}/partition", 2)
    link = root.path / "sys/dev/block" / number
    link.parent.mkdir(parents=True)
    link.symlink_to(root.path / folder / (partition or ""))


@pytest.mark.parametrize("partition", [None, "nvme0n1p2"])
def test_a_partition_has_the_queue_of_its_disk(root: FakeRoot, tmp_path: Path, partition: str | None) -> None:
    device = os.stat(tmp_path).st_dev
    fake_disk(root, f"{os.major(device)}:{os.minor(device)}", "nvme0n1", partition)
    filesystem = host.filesystem_of(tmp_path, root=str(root))
    assert (filesystem.major, filesystem.minor) == (os.major(device), os.minor(device))
    assert (filesystem.device, filesystem.rotational) == ("nvme0n1", False)
    assert (filesystem.queue_requests, filesystem.sector_bytes) == (1023, 4096)


def test_everything_may_be_missing(root: FakeRoot, tmp_path: Path) -> None:
    filesystem = host.filesystem_of(tmp_path, root=str(root))
    assert (filesystem.kind, filesystem.device, filesystem.rotational) == ("unknown", None, None)
    assert not filesystem.network
    assert host.io_counters(root=str(root)) is None
    assert host.io_uring_disabled(root=str(root)) is None


def test_a_path_that_is_not_there_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        host.filesystem_of(tmp_path / "none")


def test_descriptor_and_path_agree(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        assert host.filesystem_of(descriptor) == host.filesystem_of(tmp_path)
    finally:
        os.close(descriptor)


# --- direct I/O ------------------------------------------------------------------------------------------------------


def statx_answer(monkeypatch: pytest.MonkeyPatch, mask: int, memory: int, offset: int, read_offset: int = 0) -> None:
    def statx(descriptor: int, path: bytes, flags: int, wanted: int, buffer: ctypes.Array[ctypes.c_char]) -> int:
        answer = bytearray(256)
        answer[0:4] = mask.to_bytes(4, sys.byteorder)
        answer[0x98:0x9C] = memory.to_bytes(4, sys.byteorder)
        answer[0x9C:0xA0] = offset.to_bytes(4, sys.byteorder)
        answer[0xB4:0xB8] = read_offset.to_bytes(4, sys.byteorder)
        buffer.raw = bytes(answer)
        return 0

    monkeypatch.setattr(host, "_libc_statx", lambda: statx)


def test_alignment_as_statx_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    statx_answer(monkeypatch, 0x2FFF, memory=4, offset=512)
    assert host.direct_alignment(0) == Alignment(offset=512, memory=4)


def test_reads_may_be_aligned_to_less_than_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    statx_answer(monkeypatch, 0x22FFF, memory=4, offset=4096, read_offset=512)
    assert host.direct_alignment(0) == Alignment(offset=512, memory=4)


def test_reads_are_aligned_like_writes_where_they_have_no_alignment_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statx_answer(monkeypatch, 0x22FFF, memory=4, offset=4096, read_offset=0)
    assert host.direct_alignment(0) == Alignment(offset=4096, memory=4)


def test_zero_means_that_there_is_no_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    statx_answer(monkeypatch, 0x2FFF, memory=0, offset=0)
    assert host.direct_alignment(0) is None


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_libc_statx", lambda: lambda *_: -1)


def lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_libc_statx", lambda: None)


def not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    statx_answer(monkeypatch, 0x0FFF, memory=0, offset=0)


@pytest.mark.parametrize("statx_does", [refuse, lack, not_say])
@pytest.mark.parametrize(("sector_bytes", "expected"), [(512, 512), (None, 4096)])
def test_where_statx_is_silent_the_device_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, statx_does: object, sector_bytes: int | None, expected: int
) -> None:
    assert callable(statx_does)
    statx_does(monkeypatch)
    disk = host.Filesystem("ext4", "/", "/dev/sda", 8, 0, sector_bytes=sector_bytes)
    monkeypatch.setattr(host, "filesystem_of", lambda descriptor: disk)
    assert host.direct_alignment(0) == Alignment(offset=expected, memory=expected)


def test_a_direct_read_at_that_alignment_succeeds(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 64)
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("this filesystem has no direct I/O")
    try:
        alignment = host.direct_alignment(descriptor)
        assert alignment is not None
        with mmap.mmap(-1, alignment.offset) as buffer:
            assert os.preadv(descriptor, [buffer], alignment.offset) == alignment.offset
            assert buffer[:16] == bytes(range(16))
    finally:
        os.close(descriptor)


# --- mincore ---------------------------------------------------------------------------------------------------------


def test_a_file_of_ones_own_is_owned(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    file.chmod(0o400)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        assert host.owns_or_writes(file)
        assert host.owns_or_writes(descriptor)
    finally:
        os.close(descriptor)


AS_NOBODY = """
import ctypes, mmap, os, sys
from lazyio.host import owns_or_writes

libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]

def mincore_sees_the_hole(descriptor):
    address = libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    resident = ctypes.create_string_buffer(1)
    assert libc.mincore(address, 4096, resident) == 0
    return resident.raw == bytes(1)

descriptors = [os.open(path, os.O_RDONLY) for path in sys.argv[1:]]
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for descriptor in descriptors:
    print(owns_or_writes(descriptor), mincore_sees_the_hole(descriptor))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_the_truth_of_mincore_is_known_beforehand(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("readable", "writable")]
    for file, mode in zip(files, (0o644, 0o666), strict=True):
        with file.open("wb") as sparse:
            sparse.truncate(4096)
        file.chmod(mode)
    command = [sys.executable, "-c", AS_NOBODY, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False False", "True True"]


# --- counters and kernel ---------------------------------------------------------------------------------------------


def test_counters_count_what_is_read_between_them(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(100_000))
    before = host.io_counters()
    if before is None:
        pytest.skip("this kernel does not count I/O")
    file.read_bytes()
    after = host.io_counters()
    assert after is not None
    assert 100_000 <= (after - before).rchar < after.rchar
    assert 1 <= (after - before).syscr < after.syscr


def test_io_uring_disabled(root: FakeRoot) -> None:
    root.write("proc/sys/kernel/io_uring_disabled", 2)
    assert host.io_uring_disabled(root=str(root)) == 2


def test_kernel_release() -> None:
    assert host.kernel_release() == os.uname().release
