"""Memory of the host that a device copies from by itself."""

from __future__ import annotations

import contextlib
import mmap
import os
import warnings
from typing import Any

import torch

# What a child inherits is not mapped there (MADV_DONTFORK), and must never be unmapped either: by then something else
# may lie at those addresses.
_inherited: list[object] = []


class PinnedMemory:
    """`size` bytes or a little more, page-aligned, registered with CUDA for as long as this lives.

    torch's own pinned memory is rounded up to a power of two and never given back. Where registering is refused, the
    memory serves all the same, copies from it wait, and that is said once, as a RuntimeWarning.
    """

    _warned = False

    def __init__(self, size: int, device: torch.device) -> None:
        self._pid, self._address = os.getpid(), 0
        self._map = mmap.mmap(
            -1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        # A child must not have pages that a copy in flight would read from another place.
        self._map.madvise(mmap.MADV_DONTFORK)
        #: uint8 [size]
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        code = int(_cudart().cudaHostRegister(self.bytes.data_ptr(), len(self.bytes), 0))
        if code:
            _forget_error(device)
            self._warn(code)
        else:
            self._address = self.bytes.data_ptr()

    @property
    def registered(self) -> bool:
        """Whether a device copies from it by itself."""
        return bool(self._address)

    def close(self) -> None:
        """End the registration, when no copy is under way. Harmless when done twice, or in a child."""
        if self._pid != os.getpid():
            _inherited.append(self._map)
        elif self._address:
            _cudart().cudaHostUnregister(self._address)
        self._address = 0

    def __del__(self) -> None:
        self.close()

    @classmethod
    def _warn(cls, code: int) -> None:
        if not cls._warned:
            cls._warned = True
            warnings.warn(
                f"CUDA refuses to register staging memory (error {code}), so that copies of rows to the device wait: "
                "raise RLIMIT_MEMLOCK (ulimit -l)",
                RuntimeWarning,
                stacklevel=2,
            )


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _forget_error(device: torch.device) -> None:
    """Have the next launch of a kernel blamed for CUDA's last error here, and not in somebody else's work."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)
