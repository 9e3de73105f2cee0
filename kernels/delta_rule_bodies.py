"""What the GPU does for the gated delta rule: the bodies of `gated_delta_rule`, which launches them.

A block of 64 tokens begins with S and holds keys K, values V and queries Q, one a row. With c the sums of log decay
since the block began, B the diagonal of beta, and L the part of B exp(c_t - c_s) K K^T below the diagonal,

    D = T (V - exp(c) K S),  T = (I + L)^-1 B;    O = exp(c) Q S + P D,  P = exp(c_t - c_s) Q K^T where s <= t
    S <- exp(c_end) S + K^T exp(c_end - c) D

T and P don't depend on S: `prepare` computes them for all blocks and heads at once. `advance` then goes from block to
block, a program for some columns of S of one head. `step` is the rule for single tokens. Source of the rule: see
engine/layers/delta_rule.py; these are its equations, solved for D by the inverse of a triangular matrix.

Q and K come as they are, and are brought to unit length on the way: products of bfloat16 are exact in float32, so the
lengths are divided out of them and nothing is rounded twice.
"""

# What Triton compiles into a kernel is in capitals, as its own documentation has it; its decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit
def prepare(
    q: tl.tensor,
    k: tl.tensor,
    beta: tl.tensor,
    log_decay: tl.tensor,
    blocks: tl.tensor,  # int32 [blocks, 3]: the block's first token, and which tokens are here: from, to
    solved: tl.tensor,  # [blocks, heads, 64, 64]: T
    scores: tl.tensor,  # [blocks, heads, 64, 64]: P
    factors: tl.tensor,  # float32 [blocks, heads, 4, 64]: of K S, of Q S, of D in S; exp(c)
    HEADS: tl.constexpr,
    EACH: tl.constexpr,  # value heads that share a head of q and k
    KEY: tl.constexpr,
    Q_STRIDE: tl.constexpr,  # elements from a token to the next
    K_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,  # of the parts that vectors are multiplied in
    OPERAND: tl.constexpr,  # dtype that they are multiplied in
) -> None:
    """T, P and the factors of its tokens, of one block and head."""
    block = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    token = tl.arange(0, 64)
    row, column = token[:, None], token[None, :]
    first = tl.load(blocks + block * 3)
    live = (first + token >= tl.load(blocks + block * 3 + 1)) & (first + token < tl.load(blocks + block * 3 + 2))
    q += first.to(tl.int64) * Q_STRIDE + head // EACH * KEY
    k += first.to(tl.int64) * K_STRIDE + head // EACH * KEY
    of_queries, of_keys = tl.zeros((64, 64), tl.float32), tl.zeros((64, 64), tl.float32)
    length_q, length_k = tl.zeros((64,), tl.float32), tl.zeros((64,), tl.float32)
    for at in tl.static_range(0, KEY, WIDTH):
        key = at + tl.arange(0, WIDTH)[None, :]
        queries = tl.load(q + token[:, None] * Q_STRIDE + key, mask=live[:, None], other=0.0).to(OPERAND)
        keys = tl.load(k + token[:, None] * K_STRIDE + key, mask=live[:, None], other=0.0).to(OPERAND)
        of_queries = tl.dot(queries, tl.trans(keys), of_queries, input_precision="tf32x3")
        of_keys = tl.dot(keys, tl.trans(keys), of_keys, input_precision="tf32x3")
        length_q += tl.sum(queries.to(tl.float32) * queries.to(tl.float32), 1)
        length_k += tl.sum(keys.to(tl.float32) * keys.to(tl.float32), 1)
    side = (first + token) * HEADS + head
    of_beta = tl.load(beta + side, mask=live, other=0.0)
    decay = tl.load(log_decay + side, mask=live, other=0.0).to(tl.float64)
    # c as the sum of two float32. After a token that forgets all, its differences are small beside c: one would lose
    # them.
    total = tl.cumsum(decay, 0)
    high = total.to(tl.float32)
    low = (total - high.to(tl.float64)).to(tl.float32)
    exponent = high[:, None] - high[None, :] + (low[:, None] - low[None, :])
    since = tl.exp(tl.where(row >= column, exponent, float("-inf")))

    unit_q = KEY**-0.5 / tl.sqrt(length_q + 1e-6)
    unit_k = 1.0 / tl.sqrt(length_k + 1e-6)
    since *= unit_k[None, :]
    place = (block * HEADS + head).to(tl.int64)
    score = of_queries * since * unit_q[:, None]
    tl.store(scores + place * 4096 + row * 64 + column, score.to(scores.dtype.element_ty))
    lower = tl.where(row > column, of_keys * since * (of_beta * unit_k)[:, None], 0.0)
    solve = _inverse(lower) * of_beta[None, :]
    tl.store(solved + place * 4096 + row * 64 + column, solve.to(solved.dtype.element_ty))

    factors += place * 256 + token
    end = tl.sum(decay, 0)
    tl.store(factors, tl.exp(high) * unit_k)
    tl.store(factors + 64, tl.exp(high) * unit_q)
    tl.store(factors + 128, tl.exp((end - total).to(tl.float32)) * unit_k)
    tl.store(factors + 192, tl.exp(high))


@triton.jit
def _inverse(lower: tl.tensor) -> tl.tensor:
    """(I + lower)^-1, where `lower` [64, 64] is 0 on and above its diagonal.

    The inverse of a square follows from those of two halves X and Y on its diagonal: below them lies
    -Y (what lies there in `lower`) X. That of a square of 2 is its difference from 2 I.
    """
    first32, _, below32, second32 = _quarters(tl.reshape(lower, (1, 64, 64)))
    first16, _, below16, second16 = _quarters(_stack(first32, second32))
    squares = _stack(first16, second16)  # [4, 16, 16]
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    inverse = tl.where(row == column, 1.0, -tl.where(row // 2 == column // 2, squares, 0.0))
    inverse = _doubled(_doubled(_doubled(inverse, squares, 2), squares, 4), squares, 8)
    return tl.reshape(_merged(_merged(inverse, below16), below32), (64, 64))


@triton.jit
def _doubled(inverse: tl.tensor, lower: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Inverses of the squares of twice the SIZE along the diagonals of `lower` [n, 16, 16], from those of that size."""
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    below = (row // SIZE != column // SIZE) & (row // (2 * SIZE) == column // (2 * SIZE))
    return inverse - _times(inverse, _times(tl.where(below, lower, 0.0), inverse))


@triton.jit
def _quarters(x: tl.tensor) -> tl.tensor:
    """Each of [n, 2 m, 2 m] in four: upper left, upper right, lower left, lower right, [n, m, m]."""
    n: tl.constexpr = x.shape[0]
    m: tl.constexpr = x.shape[1] // 2
    upper, lower = tl.split(tl.permute(tl.reshape(x, (n, 2, m, 2, m)), (0, 2, 4, 3, 1)))
    upper_left, upper_right = tl.split(upper)
    lower_left, lower_right = tl.split(lower)
    return upper_left, upper_right, lower_left, lower_right


@triton.jit
def _stack(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """[2 n, m, m] of two [n, m, m], in turns."""
    m: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.join(x, y), (0, 3, 1, 2)), (2 * x.shape[0], m, m))


@triton.jit
def _merged(inverse: tl.tensor, below: tl.tensor) -> tl.tensor:
    """[n, 2 m, 2 m] from the inverses [2 n, m, m] along its diagonal and what lies below them in `lower`, [n, m, m]."""
    n: tl.constexpr = below.shape[0]
    m: tl.constexpr = below.shape[1]
    first, second = tl.split(tl.permute(tl.reshape(inverse, (n, 2, m, m)), (0, 2, 3, 1)))
    found = -_times(second, _times(below, first))
    whole = tl.join(tl.join(first, tl.zeros_like(first)), tl.join(found, second))
    return tl.reshape(tl.permute(whole, (0, 4, 1, 3, 2)), (n, 2 * m, 2 * m))


@triton.jit
def _times(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    if x.shape[0] == 1:  # all warps share in a product of matrices, one takes each of a batch
        m: tl.constexpr = x.shape[1]
        found = tl.dot(tl.reshape(x, (m, m)), tl.reshape(y, (m, m)), input_precision="tf32x3")
        return tl.reshape(found, (1, m, m))
    else:
        return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def advance(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    solved: tl.tensor,
    scores: tl.tensor,
    factors: tl.tensor,
    sequences: tl.tensor,  # int32 [sequences, 4]: first token of the first block; tokens from, to; the first block
    memory: tl.tensor,
    places: tl.tensor,  # int64 [sequences]: where the S of each lies, in fours of elements from `memory`
    out: tl.tensor,  # [tokens, heads, VALUE]
    HEADS: tl.constexpr,
    EACH: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    PART: tl.constexpr,  # columns of S
    OPERAND: tl.constexpr,
) -> None:
    """Outputs, and S after them, of one sequence, head and part of the values. All matrices are transposed.

    So S and D are what tensor cores take from registers: neither goes through memory that threads share.
    """
    head = tl.program_id(1)
    first = tl.load(sequences + tl.program_id(2) * 4)
    start = tl.load(sequences + tl.program_id(2) * 4 + 1)
    stop = tl.load(sequences + tl.program_id(2) * 4 + 2)
    place = (tl.load(sequences + tl.program_id(2) * 4 + 3) * HEADS + head).to(tl.int64)
    key, token = tl.arange(0, KEY), tl.arange(0, 64)
    value = tl.program_id(0) * PART + tl.arange(0, PART)
    memory += tl.load(places + tl.program_id(2)) * 4 + head * KEY * VALUE
    state = tl.load(memory + key[None, :] * VALUE + value[:, None])
    q += first.to(tl.int64) * Q_STRIDE + head // EACH * KEY
    k += first.to(tl.int64) * K_STRIDE + head // EACH * KEY
    v += first.to(tl.int64) * V_STRIDE + head * VALUE
    out += first.to(tl.int64) * (HEADS * VALUE) + head * VALUE
    solved += place * 4096
    scores += place * 4096
    factors += place * 256
    for at in range(first, stop, 64):
        live = ((at + token >= start) & (at + token < stop))[None, :]
        forgets = tl.load(factors + 255)
        keys = tl.load(k + token[None, :] * K_STRIDE + key[:, None], mask=live, other=0.0).to(OPERAND)
        queries = tl.load(q + token[None, :] * Q_STRIDE + key[:, None], mask=live, other=0.0).to(OPERAND)
        values = tl.load(v + token[None, :] * V_STRIDE + value[:, None], mask=live, other=0.0).to(OPERAND)
        solve = tl.load(solved + token[None, :] * 64 + token[:, None])
        score = tl.load(scores + token[None, :] * 64 + token[:, None])
        of_keys, of_queries = tl.load(factors + token)[None, :], tl.load(factors + 64 + token)[None, :]
        to_end = tl.load(factors + 128 + token)[None, :]
        now = state.to(OPERAND)
        known = tl.dot(now, keys, input_precision="tf32x3")
        found = tl.dot(now, queries, input_precision="tf32x3")
        change = tl.dot(values, solve, input_precision="tf32x3")
        change = tl.dot((known * -of_keys).to(OPERAND), solve, change, input_precision="tf32x3")
        found = tl.dot(change.to(OPERAND), score, found * of_queries, input_precision="tf32x3")
        state = tl.dot((change * to_end).to(OPERAND), tl.trans(keys), state * forgets, input_precision="tf32x3")
        place_out = token[None, :] * (HEADS * VALUE) + value[:, None]
        tl.store(out + place_out, found.to(out.dtype.element_ty), mask=live)
        q += 64 * Q_STRIDE
        k += 64 * K_STRIDE
        v += 64 * V_STRIDE
        out += 64 * HEADS * VALUE
        solved += HEADS * 4096
        scores += HEADS * 4096
        factors += HEADS * 256
    tl.store(memory + key[None, :] * VALUE + value[:, None], state)


@triton.jit
def step(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    beta: tl.tensor,
    log_decay: tl.tensor,
    tokens: tl.tensor,  # int32 [sequences]
    memory: tl.tensor,
    places: tl.tensor,
    out: tl.tensor,
    HEADS: tl.constexpr,
    EACH: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """One token of one sequence, of one head and part of the values: S is read and written once."""
    head = tl.program_id(1)
    token = tl.load(tokens + tl.program_id(2)).to(tl.int64)
    key = tl.arange(0, KEY)
    value = tl.program_id(0) * PART + tl.arange(0, PART)
    memory += tl.load(places + tl.program_id(2)) * 4 + head * KEY * VALUE
    where = key[:, None] * VALUE + value[None, :]
    state = tl.load(memory + where)
    of_k = tl.load(k + token * K_STRIDE + head // EACH * KEY + key).to(tl.float32)
    of_q = tl.load(q + token * Q_STRIDE + head // EACH * KEY + key).to(tl.float32)
    of_v = tl.load(v + token * V_STRIDE + head * VALUE + value).to(tl.float32)
    of_k *= 1.0 / tl.sqrt(tl.sum(of_k * of_k, 0) + 1e-6)
    of_q *= KEY**-0.5 / tl.sqrt(tl.sum(of_q * of_q, 0) + 1e-6)
    state *= tl.exp(tl.load(log_decay + token * HEADS + head))
    change = tl.load(beta + token * HEADS + head) * (of_v - tl.sum(state * of_k[:, None], 0))
    state += of_k[:, None] * change[None, :]
    found = tl.sum(state * of_q[:, None], 0)
    tl.store(out + token * (HEADS * VALUE) + head * VALUE + value, found.to(out.dtype.element_ty))
    tl.store(memory + where, state)
