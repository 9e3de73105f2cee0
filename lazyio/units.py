"""Byte counts and durations as text, both ways."""

from __future__ import annotations

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: str) -> int:
    """Read '4096', '512KiB', '1.5 GiB' or '2G' (all powers of 1024) as bytes. Raises ValueError."""
    cleaned = text.strip().lower().removesuffix("ib").removesuffix("b").strip()
    digits = cleaned.rstrip("kmgt").strip()
    unit = cleaned[len(digits) :].strip()
    if unit not in _UNITS or not digits:
        raise ValueError(f"{text!r} is not a size; write for example 4096, 512MiB or 1.5GiB")
    value = float(digits)
    if not 0 <= value < 2**63:
        raise ValueError(f"{text!r} is not a size; write for example 4096, 512MiB or 1.5GiB")
    return int(value * _UNITS[unit])


def format_bytes(count: float) -> str:
    """Write a byte count with three digits or so: '26.8 GiB', '90 B'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
