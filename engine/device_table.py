"""A table's rows as values on a device: read, copied, dequantised and expanded."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lazyio.engine.transfer import Sent, Transfer
from lazyio.errors import Cancelled, SettingError, Unsupported
from lazyio.fetchers.base import Bytes, Int64
from lazyio.kernels.expand_rows import SUPPORTED, expand_rows, reference
from lazyio.table import LazyTable

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Sets of staging: ubatches of a prompt are sent ahead of their turn; decode alternates between two.
_PROMPT_SETS, _STEP_SETS = 4, 2

#: Waits for packed rows uint8 [unique, row_bytes], and gives them with the place of each row asked among them.
Take = Callable[[], tuple[Bytes, Int64]]


class DeviceTable:
    """The rows of `table` as values of `dtype` on `device`. The table stays its owner's to close.

    Rows cross to a CUDA device packed, each distinct one once, with one copy on a stream of their own; there a kernel
    turns them into values. On the CPU, plain torch does. `decoded_on` says "device", or "host" for a stored type that
    has no kernel: such rows are decoded to float32 before they are copied.
    With `timed`, `DeviceRows.stall_events` are recorded.

    Its methods are for one thread at a time. Raises SettingError for another dtype or kind of device, Unsupported for
    rows that can't be decoded.
    """

    def __init__(self, table: LazyTable, device: torch.device, dtype: torch.dtype, *, timed: bool = False) -> None:
        if device.type not in ("cpu", "cuda"):
            raise SettingError(f"rows can be had on a cpu or cuda device, and not on {device}")
        if dtype not in _DTYPES:
            raise SettingError(f"rows can be had in float32, bfloat16 or float16, and not in {dtype}")
        if not table.row_values:
            raise Unsupported(f"rows of type {table.dtype} of {table.spec.tensor} can't be decoded here")
        self.table, self.device, self.dtype = table, device, dtype
        self.timed = timed and device.type == "cuda"
        self.decoded_on = "device" if table.dtype in SUPPORTED else "host"
        if self.decoded_on == "host":
            table.decode(np.zeros((1, table.row_bytes), np.uint8))  # a type without a decoder is refused here
        bias = table.head_bias
        self._bias = None if bias is None else torch.from_numpy(bias.biases).to(device)
        self._ahead = self._in_steps = None
        if device.type == "cuda":
            self._ahead, self._in_steps = Transfer(device, _PROMPT_SETS), Transfer(device, _STEP_SETS)

    @property
    def row_values(self) -> int:
        """Values of a row."""
        return self.table.row_values

    def gather(self, ids: Any) -> torch.Tensor:
        """Values of rows `ids`, ints of any shape: [*ids.shape, row_values]. Raises as `LazyTable.gather` does."""
        return self.later(ids).values()

    def later(self, ids: Any) -> DeviceRows:
        """Rows that are read when their values are asked for, and not before."""
        asked = _copy(ids)
        return DeviceRows(self, asked, lambda: self.table.gather_unique(asked), self._ahead)

    def prefetch(self, ids: Any, *, patient: bool = False) -> DeviceRows:
        """Rows that a thread of the table reads, one ubatch after the other. Raises as `LazyTable.prefetch` does."""
        asked = _copy(ids)
        ticket = self.table.prefetch(asked, patient=patient)
        return DeviceRows(self, asked, ticket.result, self._ahead, ticket.done, ticket.cancel, ticket.hurry)

    def start(self, ids: Any) -> DeviceRows:
        """Rows of a decode step, whose reads begin now, in this thread. Raises as `LazyTable.start` does."""
        asked = _copy(ids)
        started = self.table.start(asked)
        shape, places = (asked.size, self.table.row_bytes), np.arange(asked.size)
        return DeviceRows(self, asked, lambda: (started.rows().reshape(shape), places), self._in_steps)

    def close(self) -> None:
        """Wait for copies under way, and free the staging. Harmless when done twice."""
        for transfer in (self._ahead, self._in_steps):
            if transfer is not None:
                transfer.close()

    def arrays(self, packed: Bytes, inverse: Int64, ids: NDArray[Any]) -> list[NDArray[Any]]:
        """What must be on the device for `expand`."""
        if self.decoded_on == "host":
            return [self.table.decode(packed), inverse]
        bias = self.table.head_bias
        return [packed, inverse] if bias is None else [packed, inverse, bias.heads(ids)]

    def expand(self, arrays: list[torch.Tensor], out: torch.Tensor) -> None:
        """Fill `out` [n, row_values] from `arrays`, in the order of the current stream."""
        rows, inverse, *heads = arrays
        if self.decoded_on == "host":
            out.copy_(rows.index_select(0, inverse))
            return
        expand = expand_rows if self.device.type == "cuda" else reference
        head = heads[0] if heads else None
        expand(rows, inverse, self.table.dtype, out, scale=self.table.spec.scale, bias=self._bias, head=head)


class DeviceRows:
    """Rows on their way to the device. Made by `DeviceTable`.

    `ids` are those asked for, `hurry` is that of a ticket. `exposed_s` is how long `values` and `send` waited for rows
    that had not been read. `stall_events` are two CUDA events around what the current stream had to wait for the rows,
    None unless the table is `timed`: their `elapsed_time` is how long the device stood still.
    """

    def __init__(
        self,
        table: DeviceTable,
        ids: NDArray[Any],
        take: Take,
        transfer: Transfer | None,
        done: Callable[[], bool] = lambda: False,
        cancel: Callable[[], None] = lambda: None,
        hurry: Callable[[], None] = lambda: None,
    ) -> None:
        self._table, self.ids, self._transfer, self.hurry = table, ids, transfer, hurry
        self._take, self._done, self._cancel = take, done, cancel
        self._sent: Sent | None = None
        self.exposed_s = 0.0
        self.stall_events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values: [*ids.shape, row_values]."""
        return (*self.ids.shape, self._table.row_values)

    def send(self) -> None:
        """Have the rows copied to the device if they have been read and staging has room; never waits for rows."""
        if self._transfer is not None and self._sent is None and self._done() and self._transfer.has_room():
            self._sent = self._transfer.send(self._arrays())

    def values(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Wait for the rows to be read; their values, [*ids.shape, row_values], in the order of the current stream.

        `out`, if given, is filled and returned: contiguous, of that shape and of the table's dtype, on its device, such
        as the fixed input of a CUDA graph. The device's own waiting is left to it.
        Raises what reading them raises, Cancelled after `cancel`, ValueError for an `out` that is none.
        """
        result = self._result(out)
        flat = result.view(self.ids.size, self._table.row_values)
        if self._transfer is None:
            kept = self._arrays()
            self._table.expand([_as_tensor(array) for array in kept], flat)
            return result
        stall = self._events()
        if self._sent is None:
            self._sent = self._transfer.send(self._arrays())
        sent, self._sent = self._sent, None
        arrays = sent.tensors()
        if stall is not None:
            stall[1].record()
        self._table.expand(arrays, flat)
        sent.used()
        return result

    def cancel(self) -> None:
        """Give the rows up. Never waits."""
        self._cancel()
        self._take, self._done = _cancelled, lambda: False
        if self._sent is not None:
            self._sent.drop()
            self._sent = None

    def _arrays(self) -> list[NDArray[Any]]:
        since = time.perf_counter()
        packed, inverse = self._take()
        self.exposed_s += time.perf_counter() - since
        return self._table.arrays(packed, inverse.reshape(-1), self.ids.reshape(-1))

    def _events(self) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
        if self._table.timed:
            self.stall_events = _timing_event(), _timing_event()
            self.stall_events[0].record()
        return self.stall_events

    def _result(self, out: torch.Tensor | None) -> torch.Tensor:
        table = self._table
        if out is None:
            return torch.empty(self.shape, dtype=table.dtype, device=table.device)
        same = out.shape == self.shape and out.dtype == table.dtype and out.device.type == table.device.type
        if not same or not out.is_contiguous():
            raise ValueError(
                f"out must be contiguous {table.dtype} {list(self.shape)} on {table.device}, and is {out.dtype} "
                f"{list(out.shape)} on {out.device}{'' if out.is_contiguous() else ', not contiguous'}"
            )
        return out


def _copy(ids: Any) -> NDArray[Any]:
    asked = np.array(ids)
    return asked if asked.size or isinstance(ids, np.ndarray) else asked.astype(np.int64)  # an empty list has no type


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _cancelled() -> tuple[Bytes, Int64]:
    raise Cancelled("the rows were cancelled before they were asked for")


def _as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """The same memory as a tensor, which is only read; the array must be kept. torch warns of read-only arrays."""
    if array.flags.writeable or not array.size:
        return torch.from_numpy(array if array.size else array.copy())
    memory = (ctypes.c_ubyte * array.nbytes).from_address(array.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.uint8).view(array.shape)
