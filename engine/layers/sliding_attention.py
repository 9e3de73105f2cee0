"""Attention in blocks of queries, so that the cost of a window of keys grows with the window, not with the chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lazyio.engine.layers.attention import attend, causal
from lazyio.engine.ubatch import behind


@dataclass(frozen=True, slots=True)
class Block:
    """Some queries of a chunk, the keys that any of them sees, and which of these each does."""

    queries: slice
    keys: slice
    allowed: torch.Tensor | None  # bool [queries, keys]; None where all are


def blocks(tokens: int, keys: int, device: torch.device, window: int | None = None) -> list[Block]:
    """The last `tokens` of `keys` positions; with `window`, so many of them a block, each with less than two windows.

    A position sees itself and what comes before it, with `window` only the last so many of these.
    """
    if window is None or keys <= window:
        return [Block(slice(0, tokens), slice(0, keys), causal(tokens, keys, device))]
    before = keys - tokens
    # What a whole block sees of its own keys and of as many before them as its first query reaches.
    band = causal(window, 2 * window - 1, device, window)
    found: list[Block] = []
    for first in range(0, tokens, window):
        last = min(first + window, tokens)
        start = max(0, before + first - (window - 1))
        missing = window - 1 - (before + first - start)
        allowed = None if band is None else band[: last - first, missing : window - 1 + last - first]
        found.append(Block(slice(first, last), slice(start, before + last), allowed))
    return found


def attend_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: Sequence[Block], *, scale: float
) -> torch.Tensor:
    """`attend`, a block at a time: [tokens, heads, dim] of q [tokens, heads, dim] and k, v [keys, kv_heads, dim]."""
    found = [attend(q[b.queries], k[b.keys], v[b.keys], scale=scale, allowed=b.allowed) for b in parts]
    return behind(found)
