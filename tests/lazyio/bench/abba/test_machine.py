from __future__ import annotations

from pathlib import Path

import pytest

from lazyio.bench.abba import machine

ANSWER = "0, GPU A, 345, 2619, 71.23, 31, 0, 4\n1, GPU B, 1980, 2619, [N/A], 64, 100, 81000\n"


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a program in the place of nvidia-smi."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_gpus_as_they_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "answer").write_text(ANSWER)
    smi(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/asked; cat {tmp_path}/answer')
    one, other = machine.gpus()
    assert one == {
        "index": 0,
        "name": "GPU A",
        "sm_mhz": 345,
        "memory_mhz": 2619,
        "power_w": 71.23,
        "temperature_c": 31,
        "busy_percent": 0,
        "memory_used_mib": 4,
    }
    assert (other["name"], other["power_w"], other["sm_mhz"]) == ("GPU B", None, 1980)
    asked = (tmp_path / "asked").read_text()
    assert "--query-gpu=index,name,clocks.sm,clocks.mem,power.draw,temperature.gpu" in asked
    assert machine.description()["gpus"] == ["GPU A", "GPU B"]
    assert machine.snapshot()["gpus"] == [one, other]


@pytest.mark.parametrize("script", ["exit 9", "echo No devices were found"])
def test_a_driver_that_does_not_answer(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, script)
    assert machine.gpus() == []


def test_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpus() == []
    now = machine.snapshot()
    assert now["load"] >= 0
    assert now["gpus"] == []


def test_clocks_of_processors(tmp_path: Path) -> None:
    assert machine.cpu_mhz(str(tmp_path)) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor\t: 0\ncpu MHz\t\t: 2000.0\n\nprocessor\t: 1\ncpu MHz\t\t: 3000.5\n"
    )
    assert machine.cpu_mhz(str(tmp_path)) == 2500.25
    for number, khz in enumerate(("1000000\n", "2000000\n", "?\n")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_cur_freq").write_text(khz)
    assert machine.cpu_mhz(str(tmp_path)) == 1500
