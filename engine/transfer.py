"""Arrays on their way to a device: one copy for all of them, on a stream beside the one that computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lazyio.engine.pinned import PinnedMemory

# Arrays begin at multiples of this, so that a kernel may load as wide as it likes.
_ALIGNMENT = 256
_LEAST_BYTES = 1 << 16


class Transfer:
    """Copies arrays to a CUDA device by way of at most `sets` sets of staging that are used in turn.

    A set is as large as what it had to hold, and grows by doubling. It is used again only after its copy has ended on
    the host's side, and its kernel on the device's. Used by one thread at a time.
    """

    def __init__(self, device: torch.device, sets: int) -> None:
        self._device, self._limit = device, sets
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._free: deque[_Set] = deque()  # the one that was used the longest ago first
        self._lent = 0

    def has_room(self) -> bool:
        """Whether a set is left: those that were sent and not used have theirs."""
        return self._lent < self._limit

    def send(self, arrays: Sequence[NDArray[Any]]) -> Sent:
        """Begin to copy C-contiguous arrays. Waits for the last copy out of the same set, should it be under way.

        Without room it takes a set more, which goes when it was used.
        """
        starts: list[int] = []
        size = 0
        for array in arrays:
            starts.append(size)
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        staging = self._free.popleft() if self._free else _Set(self._device, self._stream)
        staging.hold(size)
        for array, start in zip(arrays, starts, strict=True):
            staging.host[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        staging.copy(size)
        self._lent += 1
        return Sent(self, staging, list(zip(starts, arrays, strict=True)))

    def give_back(self, staging: _Set) -> None:
        """End the use of a set."""
        self._lent -= 1
        if len(self._free) + self._lent < self._limit:
            self._free.append(staging)
        else:
            staging.close()

    def close(self) -> None:
        """Wait for copies, and free what is not in use."""
        while self._free:
            self._free.popleft().close()
        self._limit = 0  # what is in use goes when it is given back


class Sent:
    """Arrays that were sent: `tensors` once, then `used`."""

    def __init__(self, transfer: Transfer, staging: _Set, places: Sequence[tuple[int, NDArray[Any]]]) -> None:
        self._transfer, self._set = transfer, staging
        self._places = [(start, array.nbytes, array.dtype, array.shape) for start, array in places]
        self._given_back = False

    def tensors(self) -> list[torch.Tensor]:
        """The arrays on the device, there for whatever the current stream does from now on. Never waits."""
        self._set.arrive()
        device = self._set.device
        return [
            device[start : start + size].view(_TORCH[dtype]).view(shape) for start, size, dtype, shape in self._places
        ]

    def used(self) -> None:
        """Say that all that needs the tensors was given to the current stream."""
        self._set.depart()
        self.drop()

    def drop(self) -> None:
        """Give the set back."""
        if not self._given_back:
            self._given_back = True
            self._transfer.give_back(self._set)

    def __del__(self) -> None:
        self.drop()


_TORCH = {np.dtype("u1"): torch.uint8, np.dtype("i8"): torch.int64, np.dtype("f4"): torch.float32}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


class _Set:
    """Memory of the host, as much of the device, and events that tell when each is free again."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device, self._stream = device, stream
        self._memory: PinnedMemory | None = None
        self.host: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._copied, self._departed = _event(), _event()

    def hold(self, size: int) -> None:
        """Have room for `size` bytes, when the last copy has ended."""
        self._copied.synchronize()
        if self._memory is not None and size <= len(self.host):
            return
        size = max(size, _LEAST_BYTES if self._memory is None else 2 * len(self.host))
        self.close()
        # No tensors of inference, since they are written to outside of that too.
        with torch.inference_mode(False):
            self._memory = PinnedMemory(size, self._device)
            self.host = self._memory.bytes.numpy()
            # Of the copying stream's own memory, so that no other stream still works on what is written to.
            with torch.cuda.stream(self._stream):
                self.device = torch.empty(len(self.host), dtype=torch.uint8, device=self._device)

    def copy(self, size: int) -> None:
        """Copy the first `size` bytes to the device, when what was there before is no longer needed."""
        assert self._memory is not None
        with torch.cuda.stream(self._stream), torch.no_grad():
            self._stream.wait_event(self._departed)
            self.device[:size].copy_(self._memory.bytes[:size], non_blocking=True)
            self._copied.record(self._stream)

    def arrive(self) -> None:
        """Let the current stream go on only when the copy has ended."""
        torch.cuda.current_stream(self._device).wait_event(self._copied)

    def depart(self) -> None:
        """Note how far the current stream must come before the device's memory may be written to."""
        self._departed.record(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        """Free the memory, when nothing of it is under way."""
        if self._memory is not None:
            self._copied.synchronize()
            self._departed.synchronize()
            self._memory.close()
            self._memory = None

    def __del__(self) -> None:
        self.close()
