"""What the machine was like when something ran: its load, its processors' clocks, its GPUs."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from statistics import fmean
from typing import Any

from lazyio import host

_QUERY_S = 20.0
# What nvidia-smi calls them, and what we do.
_FIELDS = {
    "index": "index",
    "name": "name",
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "power.draw": "power_w",
    "temperature.gpu": "temperature_c",
    "utilization.gpu": "busy_percent",
    "memory.used": "memory_used_mib",
}


def snapshot() -> dict[str, Any]:
    """Now: `load` over the last minute, `cpu_mhz` as the mean of all processors, and `gpus`, an object each.

    What can't be known here is None, or an empty list.
    """
    return {"load": os.getloadavg()[0], "cpu_mhz": cpu_mhz(), "gpus": gpus()}


def description() -> dict[str, Any]:
    """What does not change while it runs: processors, kernel, GPUs by name."""
    return {
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": host.kernel_release(),
        "python": platform.python_version(),
        "gpus": [gpu["name"] for gpu in gpus()],
    }


def cpu_mhz(root: str = "") -> float | None:
    """The mean clock of all processors; None where the kernel does not tell."""
    files = Path(f"{root}/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq")
    khz = [int(text) for file in files if (text := _text(file).strip()).isdecimal()]
    if khz:
        return fmean(khz) / 1000
    told = re.findall(r"^cpu MHz\s*: ([0-9.]+)$", _text(Path(f"{root}/proc/cpuinfo")), re.MULTILINE)
    return fmean(map(float, told)) if told else None


def gpus() -> list[dict[str, Any]]:
    """What nvidia-smi tells of each GPU; an empty list without it, or where it finds none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(", ")] for line in done.stdout.splitlines()]
    return [_gpu(row) for row in rows if len(row) == len(_FIELDS)]


def _gpu(row: list[str]) -> dict[str, Any]:
    cells = dict(zip(_FIELDS.values(), row, strict=True))
    return {name: text if name == "name" else _number(text) for name, text in cells.items()}


def _number(text: str) -> float | None:
    """None for what a GPU does not tell, such as '[N/A]'."""
    return float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) else None


def _cpu_name() -> str:
    named = re.search(r"^model name\s*: (.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return named[1].strip() if named else platform.machine()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
