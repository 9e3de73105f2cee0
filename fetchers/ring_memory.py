"""The memory of an io_uring as C liburing lays it out, and numpy views of it."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

# Of include/uapi/linux/io_uring.h.
SQE = np.dtype(
    [
        ("opcode", "u1"),
        ("flags", "u1"),
        ("ioprio", "u2"),
        ("fd", "i4"),
        ("off", "u8"),
        ("addr", "u8"),
        ("len", "u4"),
        ("rw_flags", "u4"),
        ("user_data", "i8"),
        ("rest", "u8", 3),
    ]
)
CQE = np.dtype([("user_data", "i8"), ("res", "i4"), ("flags", "u4")])


class Offsets(ctypes.Structure):
    """struct io_sqring_offsets or io_cqring_offsets, which liburing uses by itself."""

    _fields_ = [("words", ctypes.c_uint32 * 10)]


class Params(ctypes.Structure):
    """struct io_uring_params."""

    _fields_ = [
        ("sq_entries", ctypes.c_uint32),
        ("cq_entries", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("sq_thread_cpu", ctypes.c_uint32),
        ("sq_thread_idle", ctypes.c_uint32),
        ("features", ctypes.c_uint32),
        ("wq_fd", ctypes.c_uint32),
        ("resv", ctypes.c_uint32 * 3),
        ("sq_off", Offsets),
        ("cq_off", Offsets),
    ]


class Queue(ctypes.Structure):
    """The words that struct io_uring_sq and struct io_uring_cq of liburing begin with."""

    _fields_ = [
        ("head", ctypes.c_void_p),
        ("tail", ctypes.c_void_p),
        ("ring_mask", ctypes.c_void_p),
        ("ring_entries", ctypes.c_void_p),
        ("flags", ctypes.c_void_p),
        ("dropped_or_overflow", ctypes.c_void_p),
    ]


class Submission(ctypes.Structure):
    """struct io_uring_sq."""

    _fields_ = [
        ("queue", Queue),
        ("array", ctypes.c_void_p),
        ("sqes", ctypes.c_void_p),
        ("sqe_head_tail", ctypes.c_uint * 2),
        ("ring_size", ctypes.c_size_t),
        ("ring_pointer", ctypes.c_void_p),
        ("mask_entries_size_pad", ctypes.c_uint * 4),
    ]


class Completion(ctypes.Structure):
    """struct io_uring_cq."""

    _fields_ = [
        ("queue", Queue),
        ("cqes", ctypes.c_void_p),
        ("ring_size", ctypes.c_size_t),
        ("ring_pointer", ctypes.c_void_p),
        ("mask_entries_pad", ctypes.c_uint * 4),
    ]


class IoUring(ctypes.Structure):
    """struct io_uring of liburing 2.x; a version that adds words finds room in `spare`."""

    _fields_ = [
        ("sq", Submission),
        ("cq", Completion),
        ("flags", ctypes.c_uint),
        ("ring_fd", ctypes.c_int),
        ("features", ctypes.c_uint),
        ("spare", ctypes.c_uint * 32),
    ]


def view(address: int, count: int, dtype: np.dtype[np.void]) -> NDArray[np.void]:
    """View memory at an address as an array [count] of `dtype`."""
    return np.ndarray((count,), dtype, memoryview((ctypes.c_char * (count * dtype.itemsize)).from_address(address)))


def words(address: int, count: int) -> NDArray[np.uint32]:
    """View memory at an address as uint32 [count]."""
    return np.ndarray((count,), np.uint32, memoryview((ctypes.c_uint32 * count).from_address(address)))
