"""Softmax attention over the keys and values of a sequence."""

from __future__ import annotations

import torch
from torch.nn import functional

from lazyio.kernels.contract import usable
from lazyio.kernels.sparse_attention import attend_causal, supports


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, allowed: torch.Tensor | None
) -> torch.Tensor:
    """softmax(q k^T * scale over the allowed keys) v: [tokens, heads, dim], in the dtype of q.

    q [tokens, heads, dim]; k, v [keys, kv_heads, dim], of which each serves heads / kv_heads query heads in order;
    allowed bool [tokens, keys], or None where all are.
    """
    if allowed is None and len(q) == 1 and _has_kernel(q, k):
        return attend_causal(q, k, v, scale=scale)
    shared = q.shape[1] // k.shape[1]
    if allowed is None:
        return _attend_all(q, k, v, shared, scale)
    k, v = (x.repeat_interleave(shared, 1).transpose(0, 1)[None] for x in (k, v))
    mask = allowed[None, None]
    out = functional.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1)


def attend_before(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
    """`attend` of the last tokens of k and v, of each to the keys up to its own."""
    if _has_kernel(q, k):
        return attend_causal(q, k, v, scale=scale)
    return attend(q, k, v, scale=scale, allowed=causal(len(q), len(k), q.device))


def _has_kernel(q: torch.Tensor, k: torch.Tensor) -> bool:
    return usable(q.device) and supports(q.shape[1], k.shape[1], q.shape[2])


def _attend_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shared: int, scale: float) -> torch.Tensor:
    # Heads that share keys are so many queries of one head: then keys, in a step of decoding most of what there is to
    # move, are not copied for each of them.
    tokens, _, dim = q.shape
    q = q.view(tokens, -1, shared, dim).transpose(0, 1).reshape(-1, 1, tokens * shared, dim)
    k, v = (x.transpose(0, 1)[:, None] for x in (k, v))
    out = functional.scaled_dot_product_attention(q, k, v, scale=scale)
    return out.view(-1, tokens, shared, v.shape[-1]).transpose(0, 1).flatten(1, 2)


def causal(tokens: int, keys: int, device: torch.device, window: int | None = None) -> torch.Tensor | None:
    """Which keys each of the last `tokens` of `keys` positions may see, bool [tokens, keys]; None where all may.

    It sees itself and what comes before it, with `window` only the last so many of these.
    """
    if tokens == 1 and (window is None or keys <= window):
        return None
    query = torch.arange(keys - tokens, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    allowed = key <= query
    return allowed if window is None else allowed & (key > query - window)
