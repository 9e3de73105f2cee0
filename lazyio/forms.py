"""What values of settings look like as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lazyio.fetchers.registry import available
from lazyio.modes import MODES
from lazyio.units import format_bytes, parse_bytes

#: What matrices of random weights can be stored as: what can be multiplied by, as it is or packed.
TRUNK_TYPES = ("BF16", "F8_E4M3", "IQ4_NL", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")


@dataclass(frozen=True, slots=True)
class Form:
    """What values look like as text. `parse` raises ValueError for any other text."""

    accepts: str
    parse: Callable[[str], Any]
    write: Callable[[Any], str] = str


def choice(*words: str) -> Form:
    """One of these words."""

    def parse(text: str) -> str:
        return words[words.index(text.lower())]

    return Form(f"{', '.join(words[:-1])} or {words[-1]}", parse)


def switch() -> Form:
    """On or off."""
    values = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}

    def parse(text: str) -> bool:
        if text.lower() not in values:
            raise ValueError
        return values[text.lower()]

    return Form("on, true, yes or 1; off, false, no or 0", parse, lambda value: "on" if value else "off")


def count(least: int, most: int) -> Form:
    """A whole number."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
            raise ValueError
        return int(text)

    return Form(f"a whole number from {least} to {most}", parse)


def size(least: int = 0, zero: str = "") -> Form:
    """Bytes; `zero`, if given, is what 0 means, and then 0 is allowed below `least` too."""

    def parse(text: str) -> int:
        count = parse_bytes(text)
        if count < least and not (zero and count == 0):
            raise ValueError
        return count

    bounds = f" of at least {format_bytes(least)}" if least else ""
    accepts = f"a size{bounds} such as 4096, 512MiB or 1.5GiB" + (f"; 0 {zero}" if zero else "")
    return Form(accepts, parse, lambda count: format_bytes(count) if count else "0")


def cache_size() -> Form:
    """Bytes of a row cache; None is auto."""
    plain = size(least=1 << 20, zero="is none")

    def parse(text: str) -> int | None:
        return None if text.lower() == "auto" else plain.parse(text)

    return Form(f"auto; {plain.accepts}", parse, lambda count: "auto" if count is None else plain.write(count))


def ubatch() -> Form:
    """Tokens; None is auto."""
    whole = count(1, 1 << 20)

    def parse(text: str) -> int | None:
        return None if text.lower() == "auto" else whole.parse(text)

    return Form(f"auto; {whole.accepts}", parse, lambda tokens: "auto" if tokens is None else str(tokens))


def trunk() -> Form:
    """One of TRUNK_TYPES; None is auto."""

    def parse(text: str) -> str | None:
        return None if text.lower() == "auto" else TRUNK_TYPES[TRUNK_TYPES.index(text.upper())]

    return Form(f"auto, {', '.join(TRUNK_TYPES[:-1])} or {TRUNK_TYPES[-1]}", parse, lambda stored: stored or "auto")


def pages() -> Form:
    """Pages of a pool; 0 is off, None auto."""
    whole = count(0, 1 << 24)
    words = {"off": 0, "auto": None}

    def parse(text: str) -> int | None:
        return words[text.lower()] if text.lower() in words else whole.parse(text)

    names = {value: word for word, value in words.items()}
    return Form(f"off, which 0 is too; auto; {whole.accepts}", parse, lambda pages: names.get(pages, str(pages)))


def block() -> Form:
    """Bytes of a direct read."""
    most = 1 << 20

    def parse(text: str) -> int:
        count = parse_bytes(text)
        if count and not (512 <= count <= most and count.bit_count() == 1):
            raise ValueError
        return count

    return Form("a power of two from 512 to 1MiB; 0 takes the least that each file allows", parse)


def mode() -> Form:
    """A lazy mode, or the name of a fetcher."""

    def parse(text: str) -> str:
        if text.lower() in MODES:
            return text.lower()
        if text not in available():
            raise ValueError
        return text

    return Form(f"{', '.join(MODES)} or the name of a registered fetcher", parse)
