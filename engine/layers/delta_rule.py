"""The gated delta rule, token by token and in blocks.

A head keeps a matrix S [key_dim, value_dim], at first zero, that gives a value for a key. Token t corrects it:

    S <- exp(g_t) S;    d_t = beta_t (v_t - S^T k_t);    S <- S + k_t d_t^T;    o_t = S^T q_t

Of a block of tokens that begins with S, let c_t be the sum of g over its tokens up to t. Then all d of the block are
the solution of a triangular system, and the rest is products of matrices:

    d_t + beta_t sum over s < t of exp(c_t - c_s) (k_t . k_s) d_s = beta_t (v_t - exp(c_t) S^T k_t)
    o_t = exp(c_t) S^T q_t + sum over s <= t of exp(c_t - c_s) (q_t . k_s) d_s
    S <- exp(c_end) S + sum over s of exp(c_end - c_s) k_s d_s^T

Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv:2412.06464. Since g <= 0 and s <= t, no
exponent here is positive. All tensors are float32, but for c, and on one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch.nn import functional

#: Tokens of a block. Blocks begin at its multiples, as counted from the start of the sequence, wherever ubatches do:
#: cuts at its multiples change no bit.
BLOCK = 64

# Their intermediate results are held at once.
_BLOCKS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Tokens:
    """What the rule needs of each token."""

    q: torch.Tensor  # [tokens, heads, key_dim]
    k: torch.Tensor  # [tokens, heads, key_dim]
    v: torch.Tensor  # [tokens, heads, value_dim]
    beta: torch.Tensor  # [tokens, heads]
    log_decay: torch.Tensor  # [tokens, heads], none above 0: g

    def __len__(self) -> int:
        return len(self.q)

    def __getitem__(self, some: slice) -> Tokens:
        return Tokens(*(getattr(self, field.name)[some] for field in fields(self)))

    def blocks(self, before: int) -> Tokens:
        """Tensors [blocks, heads, BLOCK, ...], with zeros in the place of tokens that are not here: they do nothing."""
        front = before % BLOCK
        behind = -(front + len(self)) % BLOCK

        def cut(x: torch.Tensor) -> torch.Tensor:
            padded = functional.pad(x, (*(0, 0) * (x.ndim - 1), front, behind))
            return padded.view(-1, BLOCK, *x.shape[1:]).transpose(1, 2)

        return Tokens(*(cut(getattr(self, field.name)) for field in fields(self)))


def step(tokens: Tokens, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of several sequences: o [sequences, heads, value_dim], and the new memory.

    `memory` is S of each, [sequences, heads, key_dim, value_dim]; it is changed in place and returned.
    """
    memory.mul_(tokens.log_decay.exp()[..., None, None])
    known = (tokens.k[..., None, :] @ memory).squeeze(-2)
    correction = tokens.beta[..., None] * (tokens.v - known)
    memory.addcmul_(tokens.k[..., :, None], correction[..., None, :])
    return (tokens.q[..., None, :] @ memory).squeeze(-2), memory


def follow(tokens: Tokens, before: int, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The next tokens of one sequence, after `before` of them: o [tokens, heads, value_dim], and the new memory.

    `memory` is S, [heads, key_dim, value_dim]; it may be changed in place.
    """
    outputs = []
    for part in _parts(len(tokens), before):
        if part.stop - part.start == 1:
            found, (memory,) = step(tokens[part], memory[None])
        else:
            found, memory = _blockwise(tokens[part], before + part.start, memory)
        outputs.append(found)
    return torch.cat(outputs), memory


def _parts(tokens: int, before: int) -> Iterator[slice]:
    """A bounded number of blocks each; a last token that is alone in its block is a part, as it is when decoded."""
    start = 0
    while start < tokens:
        stop = min(start + _BLOCKS_AT_ONCE * BLOCK - (before + start) % BLOCK, tokens)
        if (before + stop) % BLOCK == 1 and stop - start > 1:
            stop -= 1
        yield slice(start, stop)
        start = stop


def _blockwise(tokens: Tokens, before: int, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = tokens.blocks(before)
    # c, in float64: after a token that forgets all, its small differences would be lost in float32.
    total = x.log_decay.cumsum(-1, dtype=torch.float64)
    since = _decay_between(total)
    from_start = total.float().exp()[..., None]
    beta = x.beta[..., None]
    keys = x.k.transpose(-1, -2)
    # d = corrections - reads S, whatever S the block begins with.
    sides = torch.cat([beta * x.v, beta * from_start * x.k], -1)
    solved = torch.linalg.solve_triangular(beta * since * (x.k @ keys), sides, upper=False, unitriangular=True)
    values = x.v.shape[-1]
    corrections, reads = solved[..., :values].contiguous(), solved[..., values:].contiguous()
    to_end = keys * (total[..., -1:] - total).float().exp()[..., None, :]
    outputs, memory = _scan(corrections, reads, from_start * x.q, to_end, from_start[..., -1:, :], memory)
    outputs += (since * (x.q @ keys)) @ corrections
    here = outputs.transpose(1, 2).flatten(0, 1)
    return here[before % BLOCK :][: len(tokens)], memory


def _decay_between(total: torch.Tensor) -> torch.Tensor:
    """exp(c_t - c_s) for s <= t, 0 above: [..., BLOCK, BLOCK]."""
    later = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=total.device).triu(1)
    return (total[..., :, None] - total[..., None, :]).float().masked_fill_(later, -torch.inf).exp_()


def _scan(
    corrections: torch.Tensor,
    reads: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    decay: torch.Tensor,
    memory: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hand S on from block to block: what it gives for the queries of each, and S after the last.

    `corrections` become d, in place.
    """
    outputs = torch.empty_like(corrections)
    for block in range(len(outputs)):
        corrections[block].baddbmm_(reads[block], memory, alpha=-1)
        torch.bmm(queries[block], memory, out=outputs[block])
        memory = torch.baddbmm(memory * decay[block], keys[block], corrections[block])
    return outputs, memory
