from __future__ import annotations

from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lazyio import NeverFits, SettingError
from lazyio.bench.headline import room
from lazyio.bench.headline.work import Subject

GIB = 1 << 30
TINY = Subject("tiny", "F8_E4M3", 4000, None, "cpu", "on-bare", "0", None)
TRUE = replace(TINY, size="true", rows=108_000_000, device="cuda:0")


def with_memory(monkeypatch: pytest.MonkeyPatch, host: int, device: int) -> None:
    monkeypatch.setattr(room, "available_memory_bytes", lambda: host)
    monkeypatch.setattr(room, "_free_bytes", lambda name, _lock: host if name == "cpu" else device)


def fitting(subject: Subject, tokens: int = 23_664) -> int:
    return room.fitting_layers(room.plan_of(subject), subject, tokens, -1)


def test_layers_are_as_many_as_the_device_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 64 * GIB, 139 * GIB)
    # 24 of them and the state are 118.6 GiB, 25 are 123.5; 7/8 of 139 are 121.6.
    assert fitting(TRUE) == 24
    with_memory(monkeypatch, 64 * GIB, 142 * GIB)
    assert fitting(TRUE) == 25
    with_memory(monkeypatch, 64 * GIB, 512 * GIB)
    assert fitting(TRUE) == 48


def test_layers_of_packed_weights_are_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 64 * GIB, 78 * GIB)
    # All 48, the state and what expands the largest matrix are 67.8 GiB; 7/8 of 78 are 68.3.
    assert fitting(replace(TRUE, trunk="Q4_0")) == 48
    assert fitting(replace(TRUE, trunk="Q8_0")) < 40


def test_weights_that_contradict_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 64 * GIB, 139 * GIB)
    monkeypatch.setenv("LAZYIO_WEIGHTS", "dequantised")
    assert fitting(TRUE) == 24
    with pytest.raises(SettingError, match="trunk is Q4_0, and weights is dequantised: leave one of them out"):
        fitting(replace(TRUE, trunk="Q4_0"))


def test_layers_asked_for_may_take_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 64 * GIB, 125 * GIB)
    assert fitting(replace(TRUE, layers=25)) == 25
    with_memory(monkeypatch, 64 * GIB, 123 * GIB)
    numbers = (
        r"25 layers and the state of 23,664 tokens take 123.5 GiB, and 123.0 GiB of memory can be had .* on cuda:0"
    )
    with pytest.raises(NeverFits, match=numbers):
        fitting(replace(TRUE, layers=25))
    with pytest.raises(SettingError, match="layers is 49; this model can have 2 to 48"):
        fitting(replace(TRUE, layers=49))


def test_too_little_for_any_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 64 * GIB, 8 * GIB)
    with pytest.raises(NeverFits, match=r"2 layers .* take 12.1 GiB, and 7.0 GiB of memory can be had"):
        fitting(TRUE)


def test_the_table_must_fit_in_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 16 * GIB, 139 * GIB)
    with pytest.raises(NeverFits, match=r"mode off holds the table of 16.1 GiB in memory, and 16.0 GiB can be had"):
        fitting(TRUE)
    # On the CPU, weights and table share it: two layers of float32 are 24.2 GiB, the table 16.1.
    with_memory(monkeypatch, 40 * GIB, 0)
    with pytest.raises(
        NeverFits, match=r"2 layers .* take 24.2 GiB, and 23.9 GiB of memory can be had for them on cpu"
    ):
        fitting(replace(TRUE, device="cpu", layers=2))


def test_a_disk_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(room.shutil, "disk_usage", lambda _: usage(0, 0, 16 * GIB))
    room.check_disk(tmp_path, 15 * GIB)
    with pytest.raises(NeverFits, match=r"the table takes 16.0 GiB, and 16.0 GiB of disk are free at .* lower ROWS"):
        room.check_disk(tmp_path, 16 * GIB)


def test_token_ids_are_looked_at_before_anything_is_made(tmp_path: Path) -> None:
    ids = tmp_path / "ids.npy"
    np.save(ids, np.arange(30))
    subject = replace(TINY, ids=str(ids))
    plan = room.plan_of(subject)
    room.check_ids(plan, subject, 30)
    with pytest.raises(SettingError, match="has 30 token ids from 0 to 29, and 31 below 4096 are needed"):
        room.check_ids(plan, subject, 31)


@pytest.mark.gpu
def test_a_gpu_tells_its_memory() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert fitting(replace(TINY, device="cuda:0"), 700) == 4
