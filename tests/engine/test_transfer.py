"""What is sent arrives, and no set of staging is touched while something may still use it, on a device of our own.

The double does work when it is asked to and in the order that streams and events allow, as a device does; what a real
one does is tested with `DeviceTable`.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lazyio.engine import pinned
from lazyio.engine.transfer import Transfer

CPU = torch.device("cpu")
RANDOM = np.random.default_rng(5)


class Device:
    """Streams are queues of work that is done by `run`, as late as possible."""

    def __init__(self) -> None:
        self.compute = Stream(self)
        self.registered: dict[int, int] = {}
        self.refuses = False
        self.current = self.compute

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if not self.refuses:
            self.registered[address] = size
        return int(self.refuses)

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


class Stream:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.work: list[Callable[[], None]] = []

    def run(self) -> None:
        while self.work:
            self.work.pop(0)()

    def wait_event(self, event: "Event") -> None:
        self.work.append(event.last.wait)


class Moment:
    """When a stream has come to where an event was recorded."""

    def __init__(self, stream: Stream | None = None) -> None:
        self.stream, self.happened = stream, stream is None
        if stream is not None:
            stream.work.append(self.happen)

    def happen(self) -> None:
        self.happened = True

    def wait(self) -> None:
        while not self.happened:
            assert self.stream is not None
            assert self.stream.work, "waits for ever"
            self.stream.work.pop(0)()


class Event:
    def __init__(self) -> None:
        self.last = Moment()

    def record(self, stream: Stream) -> None:
        self.last = Moment(stream)

    def synchronize(self) -> None:
        self.last.wait()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, device.current = device.current, stream
        yield
        device.current = before

    copy = torch.Tensor.copy_

    def copy_(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not non_blocking:
            return copy(self, other)
        device.current.work.append(lambda: (copy(self, other), None)[1])
        return self

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream(device))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: device.current)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(pinned, "_cudart", lambda: device)
    yield device
    gc.collect()
    assert not device.registered, "memory is left registered"


def arrays(size: int) -> list[np.ndarray]:
    return [
        RANDOM.integers(0, 256, (size, 90), np.uint8),
        RANDOM.integers(0, 9, 3 * size),
        RANDOM.normal(size=(size, 5)).astype(np.float32),
    ]


class Use:
    """A kernel that reads what was sent, whenever the device comes to it."""

    def __init__(self, device: Device, sent: Any) -> None:
        tensors = sent.tensors()
        self.seen: list[torch.Tensor] = []
        device.compute.work.append(lambda: self.seen.extend(tensor.clone() for tensor in tensors))
        sent.used()

    def check(self, expected: list[np.ndarray]) -> None:
        assert len(self.seen) == len(expected)
        for seen, array in zip(self.seen, expected, strict=True):
            np.testing.assert_array_equal(seen.numpy(), array)


@pytest.mark.parametrize("sets", [1, 2, 4])
def test_a_device_that_lags_behind_sees_what_was_sent(device: Device, sets: int) -> None:
    carrier = Transfer(CPU, sets)
    uses = []
    for turn in range(30):
        sent = arrays(int(RANDOM.integers(0, 400)))
        use = Use(device, carrier.send(sent))
        uses.append((use, [array.copy() for array in sent]))
        for array in sent:
            array[...] = 0  # the caller's memory is its own again
        if turn % 7 == 6:
            device.compute.run()
    device.compute.run()
    for use, expected in uses:
        use.check(expected)
    assert len(carrier._free) <= sets
    carrier.close()


def test_what_was_sent_ahead_keeps_its_set(device: Device) -> None:
    carrier = Transfer(CPU, 2)
    data = [arrays(100) for _ in range(4)]
    ahead = [carrier.send(data[0]), carrier.send(data[1])]
    assert not carrier.has_room()
    beyond = carrier.send(data[2])
    ahead[0].drop()
    del ahead[0]
    assert not carrier.has_room()
    uses = [Use(device, beyond), Use(device, ahead[0])]
    assert carrier.has_room()
    uses.append(Use(device, carrier.send(data[3])))
    device.compute.run()
    for use, expected in zip(uses, (data[2], data[1], data[3]), strict=True):
        use.check(expected)
    assert len(carrier._free) == 2
    carrier.close()


def test_sets_grow_by_doubling_and_are_used_again(device: Device) -> None:
    carrier = Transfer(CPU, 1)
    sizes = []
    for size in (10, 3000, 3100, 6100, 50):
        Use(device, carrier.send([np.zeros((size, 90), np.uint8)]))
        assert len(device.registered) == 1
        sizes += device.registered.values()
    assert sizes == [1 << 16, 270_336, 540_672, 1_081_344, 1_081_344]
    carrier.close()
    carrier.close()
    assert not device.registered


def test_memory_is_given_back_whenever_the_end_comes(device: Device) -> None:
    carrier = Transfer(CPU, 2)
    sent = carrier.send(arrays(10))
    carrier.close()
    assert len(device.registered) == 1
    Use(device, sent)
    assert not device.registered
    forgotten = Transfer(CPU, 2)
    forgotten.send(arrays(10))
    del forgotten
    gc.collect()
    assert not device.registered


def test_refused_registration_is_said_once(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned.PinnedMemory, "_warned", False)
    device.refuses = True
    carrier = Transfer(CPU, 2)
    data = arrays(50)
    with pytest.warns(RuntimeWarning, match=r"refuses to register staging memory \(error 1\).*RLIMIT_MEMLOCK") as said:
        uses = [Use(device, sent) for sent in [carrier.send(data), carrier.send(data)]]
    assert len(said) == 1
    device.compute.run()
    for use in uses:
        use.check(data)
    carrier.close()
