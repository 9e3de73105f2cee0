"""Byte counts as text, both ways. All units are powers of 1024."""

from __future__ import annotations

import re
from fractions import Fraction

_SIZE = re.compile(r"(\d+)\s*b?|(\d+(?:\.\d+)?)\s*([kmgt])i?b?", re.ASCII)
_POWERS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: str) -> int:
    """Read '4096', '512KiB', '1.5 GiB' or '2G' as bytes, rounded down. Raises ValueError, also from 8 EiB on."""
    match = _SIZE.fullmatch(text.strip().lower())
    if match is not None:
        whole, amount, unit = match.groups()
        count = int(whole) if whole else int(Fraction(amount) * _POWERS[unit])
        if count < 1 << 63:
            return count
    raise ValueError(f"{text!r} is not a size; write for example 4096, 512MiB or 1.5GiB")


def format_bytes(count: float) -> str:
    """Write a byte count with one decimal: '26.8 GiB', '90 B'."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if abs(round(count, 1)) < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"
