"""Facts of the machine: memory to be had, filesystems and their devices, counters of I/O.

Everything is read from /proc, /sys and statx. What can't be read is reported as unknown (None) or as the cautious
value, never as an error: containers and old kernels hide some of it. `root` is where /proc and /sys are looked for.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from lazyio.fetchers.base import Alignment

__all__ = [
    "Filesystem",
    "IoCounters",
    "available_memory_bytes",
    "direct_alignment",
    "filesystem_of",
    "io_counters",
    "io_uring_disabled",
    "kernel_release",
    "owns_or_writes",
]

# Where each read is a message to a server, a hypervisor or a daemon, so that thousands of tiny ones crawl; 9p and
# virtiofs are how virtual machines reach their host's files. Not listed: cluster filesystems over shared block devices
# (gfs2, ocfs2), which read blocks like a local one, and fuseblk, a local disk behind a driver in user space.
_SERVERS = {"afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "wekafs"}
_DAEMONS = {"9p", "fuse", "virtiofs"}
# Memory filesystems have no page cache to drop; ZFS keeps its own cache, which neither fadvise nor mincore reaches.
_NEVER_DROPS = {"devtmpfs", "hugetlbfs", "ramfs", "rootfs", "tmpfs", "zfs"}


# --- memory ----------------------------------------------------------------------------------------------------------


def available_memory_bytes(*, root: str = "") -> int:
    """Bytes this process can still take: the least of MemAvailable and of what each of its cgroups has left.

    Page cache that a cgroup is charged for counts as free, since the kernel gives it back before it refuses memory.
    0 where nothing can be read.
    """
    fields = _fields(_text(f"{root}/proc/meminfo"))
    machine = fields.get("MemAvailable", fields.get("MemFree", 0)) * 1024
    return max(0, min([machine, *_cgroup_rooms(root)]))


def _cgroup_rooms(root: str) -> Iterator[int]:
    """What every memory cgroup from the process' own up to the root of its hierarchy has left."""
    for line in _text(f"{root}/proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        unified = hierarchy == "0"
        if not unified and "memory" not in controllers.split(","):
            continue
        for mount in _mounts(root):
            if mount.kind == ("cgroup2" if unified else "cgroup") and (unified or "memory" in mount.options):
                yield from _rooms_above(f"{root}{mount.point}", mount.subtree, path)


def _rooms_above(mount_point: str, subtree: str, path: str) -> Iterator[int]:
    # A container often sees its own cgroup mounted as the root, under the path that the host knows it by.
    below = os.path.relpath(path, subtree)
    group = os.path.normpath(mount_point if below.startswith("..") else f"{mount_point}/{below}")
    while len(group) >= len(os.path.normpath(mount_point)):
        stat = _fields(_text(f"{group}/memory.stat"))
        for limit_name, usage_name, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.high", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, usage = _number(f"{group}/{limit_name}"), _number(f"{group}/{usage_name}")
            if limit is not None and usage is not None:
                cache = stat.get(f"{prefix}active_file", 0) + stat.get(f"{prefix}inactive_file", 0)
                yield limit - max(0, usage - cache)
        group = os.path.dirname(group)


# --- filesystems and devices -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Filesystem:
    """Where a file lies. `kind` is the kernel's name ("ext4", "nfs4", "fuse.sshfs", ...) or "unknown" without /proc."""

    kind: str
    mount: str  # mount point
    source: str  # what is mounted there: a device, an export
    major: int  # of st_dev
    minor: int
    device: str | None = None  # the disk, as in /sys/block; None where no one disk is known
    rotational: bool | None = None  # as the device says; virtual ones often say so wrongly
    queue_requests: int | None = None  # requests the block layer queues for the device
    sector_bytes: int | None = None  # logical block of the device

    @property
    def network(self) -> bool:
        """Whether each read is a message to somebody else, so that tiny random reads crawl."""
        return self.kind.split(".")[0] in _SERVERS | _DAEMONS

    @property
    def drops_cache(self) -> bool:
        """Whether cached pages can be dropped, and their absence proved, so that cold reads can be measured."""
        return self.kind not in _NEVER_DROPS


def filesystem_of(path: str | os.PathLike[str] | int, *, root: str = "") -> Filesystem:
    """The filesystem of a path or an open descriptor. Raises OSError if the path can't be reached."""
    status = os.stat(path)
    major, minor = os.major(status.st_dev), os.minor(status.st_dev)
    mount = _mount_of(path, root)
    if mount is None:
        mount = _Mount(0, "/", "/", (), "unknown", "")
    queue, device = _block_queue(major, minor, mount.source, root)
    rotational = _number(f"{queue}/rotational")
    return Filesystem(
        kind=mount.kind,
        mount=mount.point,
        source=mount.source,
        major=major,
        minor=minor,
        device=device,
        rotational=None if rotational is None else bool(rotational),
        queue_requests=_number(f"{queue}/nr_requests"),
        sector_bytes=_number(f"{queue}/logical_block_size"),
    )


@dataclass(frozen=True, slots=True)
class _Mount:
    number: int
    subtree: str  # directory of the filesystem that is visible at `point`
    point: str
    options: tuple[str, ...]  # of the filesystem, which for a cgroup are its controllers
    kind: str
    source: str


def _mounts(root: str) -> list[_Mount]:
    """Parse mountinfo; proc_pid_mountinfo(5) has the fields. Spaces in names are written as octal escapes."""
    mounts = []
    for line in _text(f"{root}/proc/self/mountinfo").splitlines():
        left, separator, right = line.partition(" - ")
        here, there = left.split(" "), right.split(" ")
        if separator and len(here) >= 6 and len(there) >= 3:
            number, subtree, point = int(here[0]), _unescape(here[3]), _unescape(here[4])
            mounts.append(_Mount(number, subtree, point, tuple(there[2].split(",")), there[0], _unescape(there[1])))
    return mounts


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _mount_of(path: str | os.PathLike[str] | int, root: str) -> _Mount | None:
    """The mount by the number that the kernel gives for an open file; where that is hidden, by the longest prefix."""
    mounts = _mounts(root)
    number = _mount_number(path, root)
    for mount in mounts:
        if mount.number == number:
            return mount
    real = os.path.realpath(f"/proc/self/fd/{path}" if isinstance(path, int) else path)
    above = [mount for mount in mounts if f"{real}/".startswith(mount.point.rstrip("/") + "/")]
    return max(reversed(above), key=lambda mount: len(mount.point), default=None)


def _mount_number(path: str | os.PathLike[str] | int, root: str) -> int | None:
    descriptor = path if isinstance(path, int) else os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return _fields(_text(f"{root}/proc/self/fdinfo/{descriptor}")).get("mnt_id")
    finally:
        if descriptor != path:
            os.close(descriptor)


def _block_queue(major: int, minor: int, source: str, root: str) -> tuple[str, str | None]:
    """Folder of the queue of the disk under a filesystem, and the disk's name. A partition has its disk's queue."""
    if major == 0 and source.startswith("/dev/"):
        # Filesystems over several devices (btrfs) have a number of their own and mount by the name of one device.
        try:
            number = os.stat(source).st_rdev
            major, minor = os.major(number), os.minor(number)
        except OSError:
            pass
    block = os.path.realpath(f"{root}/sys/dev/block/{major}:{minor}")
    if os.path.exists(f"{block}/partition"):
        block = os.path.dirname(block)
    return f"{block}/queue", os.path.basename(block) if os.path.isdir(f"{block}/queue") else None


# --- direct I/O ------------------------------------------------------------------------------------------------------

# Constants and offsets of struct statx in linux/stat.h.
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_DIO_READ_ALIGN = 0x20000
_STATX_BYTES = 256
_DIO_ALIGN_AT = 0x98  # memory, offset
_DIO_READ_ALIGN_AT = 0xB4  # offset, for reads alone; filesystems that copy on write ask more of writes


def direct_alignment(descriptor: int) -> Alignment | None:
    """What direct I/O on an open file must be aligned to; None where the filesystem says that it has none.

    Where kernel, filesystem or C library do not tell, the block size of the device or 4096: then, and strictly always,
    only a read that succeeds shows that it works.
    """
    answer = _statx(descriptor, _STATX_DIOALIGN | _STATX_DIO_READ_ALIGN)
    mask = 0 if answer is None else struct.unpack_from("=I", answer)[0]
    if answer is None or not mask & _STATX_DIOALIGN:
        block = filesystem_of(descriptor).sector_bytes or 4096
        return Alignment(offset=block, memory=block)
    memory, offset = struct.unpack_from("=II", answer, _DIO_ALIGN_AT)
    if mask & _STATX_DIO_READ_ALIGN:
        offset = struct.unpack_from("=I", answer, _DIO_READ_ALIGN_AT)[0] or offset
    return Alignment(offset=offset, memory=memory) if offset and memory else None


def _statx(descriptor: int, mask: int) -> bytes | None:
    statx = _libc_statx()
    if statx is None:
        return None
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    return None if statx(descriptor, b"", _AT_EMPTY_PATH, mask, buffer) else buffer.raw


@functools.cache
def _libc_statx() -> ctypes._NamedFuncPointer | None:
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if statx is not None:
        statx.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p]
    return statx


def owns_or_writes(path: str | os.PathLike[str] | int) -> bool:
    """Whether mincore tells the truth about a file: the caller owns it, may act as its owner, or may write to it.

    For anybody else Linux reports every page as resident (mincore(2)). Raises OSError if the file can't be opened.
    """
    name = f"/proc/self/fd/{path}" if isinstance(path, int) else path
    try:
        # The kernel grants O_NOATIME by the very rule that mincore uses for owners, user namespaces and all.
        os.close(os.open(name, os.O_RDONLY | os.O_NOATIME | os.O_CLOEXEC))
    except PermissionError:
        return os.access(name, os.W_OK, effective_ids=True)
    return True


# --- counters and kernel ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IoCounters:
    """What the process has read so far, all threads together. The difference of two is what was read between them."""

    rchar: int  # bytes that read calls returned, from the page cache too
    syscr: int  # read calls; io_uring and page faults make none
    read_bytes: int  # bytes fetched from devices

    def __sub__(self, earlier: IoCounters) -> IoCounters:
        return IoCounters(self.rchar - earlier.rchar, self.syscr - earlier.syscr, self.read_bytes - earlier.read_bytes)


def io_counters(*, root: str = "") -> IoCounters | None:
    """Read them now; None where the kernel does not count."""
    fields = _fields(_text(f"{root}/proc/self/io"))
    try:
        return IoCounters(fields["rchar"], fields["syscr"], fields["read_bytes"])
    except KeyError:
        return None


def kernel_release() -> str:
    """Release of the running kernel, as `uname -r` prints it."""
    return os.uname().release


def io_uring_disabled(*, root: str = "") -> int | None:
    """The sysctl kernel.io_uring_disabled: 0 for all, 1 for a group and root alone, 2 for none; None where unknown."""
    return _number(f"{root}/proc/sys/kernel/io_uring_disabled")


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def _number(path: str) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _fields(text: str) -> dict[str, int]:
    """Numbers by name, from lines like 'name: 12 kB' or 'name 12'."""
    pairs = (line.replace(":", " ").split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) >= 2 and pair[1].isdecimal()}
