"""Which rows of a table a token needs.

A table of n-grams (qwen4_exp) has several rows a token, found by hashing the token with those before it; a table of
Gemma has one, the token itself. Both are functions of token ids alone, so rows can be fetched before a forward pass
needs them:

    row_ids = row_ids_of(spec)
    before = None
    for tokens in chunks:
        ids = row_ids(tokens, before)             # int64 [tokens, heads]
        before = row_ids.tail(tokens, before)     # what the next chunk must know of this one

`before` is all the state there is. It holds token ids and is never changed in place, so keeping an old one is enough to
go back to that point of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lazyio.errors import RowIndexError, TableError
from lazyio.ple.spec import NgramHash, TableSpec

Int64 = NDArray[np.int64]
#: Token ids of one sequence, in order: an integer array or a sequence of ints.
Tokens = NDArray[Any] | Sequence[int]

# Rows beyond those of the heads are padding, up to a multiple of 128 in the release. Constants derived for a given
# number of rows leave less than the primes of all heads lie apart, some hundreds.
_MOST_PADDING_ROWS = 4096


class RowIds(Protocol):
    """Turns the token ids of one sequence into row ids."""

    heads: int  # rows a token
    context: int  # how many tokens before a chunk can matter to it

    def __call__(self, tokens: Tokens, before: Tokens | None = None) -> Int64:
        """Row ids, int64 [n, heads], of `tokens` [n], which follow directly on `before`.

        `before` may be longer than `context` or, at the start of a sequence, shorter, empty or None.
        Raises RowIndexError for token ids that are not integers, negative, or too large for the table.
        """
        ...

    def tail(self, tokens: Tokens, before: Tokens | None = None) -> Int64:
        """The last `context` ids of `before` and `tokens` together: the `before` of the chunk that follows."""
        ...


def row_ids_of(spec: TableSpec, vocab: int | None = None) -> RowIds:
    """The row ids of a table: hashed where it has n-gram constants, else the token ids themselves.

    `vocab` is the number of token ids, where it is known and lower than what the constants allow.
    Raises TableError if the constants contradict each other, reach beyond the table or leave more of it unused than
    padding can be, or where a table of hashed n-grams comes without them.
    """
    if spec.ngram is None:
        if "ngram_embedding" in spec.tensor or (spec.architecture or "").startswith("qwen4"):
            raise TableError(
                f"{spec.path}: {spec.tensor} is read by hashed n-grams, and the constants of the hash are not in the "
                "file; open the folder of the model, with its config.json"
            )
        return IdentityRowIds(spec.rows)
    row_ids = NgramRowIds(spec.ngram, vocab)
    if row_ids.rows > spec.rows:
        raise TableError(
            f"{spec.path}: the n-gram heads of {spec.tensor} address {row_ids.rows} rows, but the table has "
            f"{spec.rows}; the constants belong to another table, or rows are missing"
        )
    if spec.rows - row_ids.rows > _MOST_PADDING_ROWS:
        raise TableError(
            f"{spec.path}: the n-gram heads of {spec.tensor} address {row_ids.rows} rows, and the table has "
            f"{spec.rows}, more than {_MOST_PADDING_ROWS} beyond them: the constants and the table are of two models; "
            "bring the files of one together"
        )
    return row_ids


class IdentityRowIds:
    """Row id = token id, one a token."""

    heads = 1
    context = 0

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __call__(self, tokens: Tokens, before: Tokens | None = None) -> Int64:
        """Row ids, int64 [n, 1]; see `RowIds`."""
        return _checked(tokens, self.rows).reshape(-1, 1).copy()

    def tail(self, tokens: Tokens, before: Tokens | None = None) -> Int64:
        """No token matters to the next: int64 [0]."""
        return np.empty(0, np.int64)


class NgramRowIds:
    """Row ids of qwen4_exp: one a head, the heads of bigrams first, then those of trigrams, and so on.

    For position t, let c_0 = id_t, and c_s = id_{t-s} unless id_{t-s} or a token between it and t is EOS or lies before
    the start, in which case c_s = EOS. An EOS at t itself cuts nothing of its own context. Then, for the n-gram of n
    tokens and a head of P rows that begins at row O,

        mix_n = (c_0 * m_0) xor (c_1 * m_1) xor ... xor (c_{n-1} * m_{n-1})
        row   = mix_n mod P + O

    Source: `Qwen4ExpTextNGramEmbedding` of transformers. Ids are bounded so that no product reaches 2**63, hence signed
    and unsigned arithmetic agree.
    """

    def __init__(self, constants: NgramHash, vocab: int | None = None) -> None:
        _check_constants(constants)
        self.constants = constants
        self.context = len(constants.multipliers) - 1
        self.heads = len(constants.head_sizes)
        self.rows = max(map(sum, zip(constants.head_offsets, constants.head_sizes, strict=True)))
        largest = (2**63 - 1) // max(constants.multipliers)
        self.vocab = largest + 1 if vocab is None else min(vocab, largest + 1)
        if not 0 <= constants.eos < self.vocab:
            raise TableError(f"the EOS of the n-gram hash is token {constants.eos}, outside 0 to {self.vocab - 1}")
        self._offsets = np.array(constants.head_offsets, np.int64)

    def __call__(self, tokens: Tokens, before: Tokens | None = None) -> Int64:
        """Row ids, int64 [n, heads]; see `RowIds`."""
        checked = _checked(tokens, self.vocab)
        # A step of decoding is so short that the cost of starting numpy's loops would be most of it.
        if len(checked) == 1:
            return np.array([self._rows_of_one(int(checked[0]), self._before(before).tolist())], np.int64)
        known = np.concatenate((self._before(before), checked)).view(np.uint64)
        count, constants = len(checked), self.constants
        rows = np.empty((count, self.heads), np.int64)
        mix = known[self.context :] * np.uint64(constants.multipliers[0])
        cut = np.zeros(count, np.bool_)
        for distance in range(1, self.context + 1):
            earlier = known[self.context - distance : self.context - distance + count]
            cut |= earlier == constants.eos
            mix ^= np.where(cut, np.uint64(constants.eos), earlier) * np.uint64(constants.multipliers[distance])
            first = (distance - 1) * constants.heads_per_ngram
            for head in range(first, first + constants.heads_per_ngram):
                # numpy divides by one unsigned number with multiplications; its remainder does not.
                size = np.uint64(constants.head_sizes[head])
                rows[:, head] = (mix - mix // size * size).view(np.int64)
        rows += self._offsets
        return rows

    def tail(self, tokens: Tokens, before: Tokens | None = None) -> Int64:
        """The last `context` token ids, int64 [context], filled from the front with EOS at the start of a sequence."""
        return self._last(np.concatenate((self._before(before), _checked(tokens, self.vocab))))

    def _before(self, before: Tokens | None) -> Int64:
        if before is None:
            return np.full(self.context, self.constants.eos, np.int64)
        given = np.asarray(before)
        # Only the end is looked at, so that a whole history costs no more than what matters of it.
        return self._last(_checked(given[-self.context :] if given.ndim else given, self.vocab))

    def _last(self, tokens: Int64) -> Int64:
        """The last `context` of them. EOS stands for what lies before the start, since it cuts just the same."""
        missing = max(0, self.context - len(tokens))
        start = np.full(missing, self.constants.eos, np.int64)
        return np.concatenate((start, tokens[len(tokens) - self.context + missing :]))

    def _rows_of_one(self, token: int, before: list[int]) -> list[int]:
        constants = self.constants
        sizes, offsets, per_ngram = constants.head_sizes, constants.head_offsets, constants.heads_per_ngram
        rows: list[int] = []
        mix, cut = token * constants.multipliers[0], False
        for distance in range(1, self.context + 1):
            earlier = before[-distance]
            cut = cut or earlier == constants.eos
            mix ^= (constants.eos if cut else earlier) * constants.multipliers[distance]
            first = (distance - 1) * per_ngram
            rows += [mix % sizes[head] + offsets[head] for head in range(first, first + per_ngram)]
        return rows


def _checked(tokens: Tokens, vocab: int) -> Int64:
    """`tokens` as int64 [n], each from 0 to vocab - 1."""
    given = np.asarray(tokens)
    if given.size == 0:
        return np.empty(0, np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise RowIndexError(
            f"token ids must be integers in one dimension; got {given.dtype} of shape {list(given.shape)}"
        )
    lowest, highest = int(given.min()), int(given.max())
    if lowest < 0 or highest >= vocab:
        wrong = lowest if lowest < 0 else highest
        raise RowIndexError(f"token id {wrong} is outside 0 to {vocab - 1}, the ids this table has rows for")
    return given.astype(np.int64)


def _check_constants(constants: NgramHash) -> None:
    heads, per_ngram = len(constants.head_sizes), constants.heads_per_ngram
    ngrams = len(constants.multipliers) - 1
    if ngrams < 1 or per_ngram < 1 or heads != ngrams * per_ngram or len(constants.head_offsets) != heads:
        raise TableError(
            f"n-gram constants do not fit each other: {len(constants.multipliers)} multipliers and {per_ngram} heads "
            f"an n-gram ask for {max(0, ngrams) * per_ngram} heads; there are {heads} sizes and "
            f"{len(constants.head_offsets)} offsets"
        )
    largest = 2**63 - 1
    if not all(0 < number <= largest for number in (*constants.multipliers, *constants.head_sizes)):
        raise TableError(f"multipliers and sizes of n-gram heads must lie in 1 to {largest}; got {constants}")
    if not all(
        0 <= offset <= largest - size for offset, size in zip(constants.head_offsets, constants.head_sizes, strict=True)
    ):
        raise TableError(f"n-gram heads must end at or below row {largest}; got {constants}")
