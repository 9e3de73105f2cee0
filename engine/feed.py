"""The rows of prompts and decode steps, asked for as soon as their tokens are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from lazyio.engine.device_table import DeviceRows, DeviceTable
from lazyio.errors import ReadError, SettingError
from lazyio.fetchers.base import Int64
from lazyio.ple.lookahead import Ahead
from lazyio.ple.rowids import RowIds, Tokens
from lazyio.table import LazyTable


class Feed:
    """Feeds a model with the rows of a table. `lookahead` is how many ubatches of a prompt are read ahead.

    With 0, the rows of a ubatch are read when the model asks for them. Raises SettingError for no such number.
    """

    def __init__(self, rows: DeviceTable, row_ids: RowIds, lookahead: int) -> None:
        if isinstance(lookahead, bool) or not isinstance(lookahead, int) or lookahead < 0:
            raise SettingError(f"lookahead is {lookahead!r}; it must be a number of ubatches, 0 or more")
        self._rows, self.row_ids, self.lookahead = rows, row_ids, lookahead

    @property
    def table(self) -> LazyTable:
        """The table whose rows they are."""
        return self._rows.table

    @property
    def tokens_ahead(self) -> int:
        """Tokens whose rows can be read ahead and not taken at once."""
        return self.table.rows_ahead // self.row_ids.heads

    def prompt(self, chunks: Iterable[Tokens], before: Tokens | None = None) -> PromptRows:
        """The rows of each chunk of a prompt that follows on the tokens `before`, in order; close what is left early.

        What is wrong with a chunk, in its tokens or in its reads, is raised at its turn.
        """
        ask = self._rows.prefetch if self.lookahead else self._rows.later
        return PromptRows(Ahead(ask, self._row_ids(chunks, before), depth=max(1, self.lookahead)))

    def step(self, sequences: Sequence[tuple[Tokens, Tokens | None]]) -> TokenRows:
        """The rows of the next tokens of several sequences, one after the other: (tokens, those before them) of each.

        Their reads begin now, in this thread. Where one can't, all of them are read when they are asked for: it is told
        then whose fault that is. Raises RowIndexError for wrong tokens.
        """
        ids = self._joined(sequences)
        try:
            return TokenRows(self._rows.start(ids))
        except ReadError:
            return TokenRows(self._rows.later(ids))

    def ahead(self, sequences: Sequence[tuple[Tokens, Tokens | None]], *, patient: bool = False) -> TokenRows:
        """The rows of chunks of several prompts, one after the other, given as for `step`; each distinct row once.

        A thread of the table reads them, `patient` ones when there is nothing else to read, or, without lookahead, they
        are read when they are asked for. Raises what `LazyTable.prefetch` raises, RowIndexError for wrong tokens.
        """
        ids = self._joined(sequences)
        return TokenRows(self._rows.prefetch(ids, patient=patient) if self.lookahead else self._rows.later(ids))

    def again(self, rows: TokenRows, some: slice) -> TokenRows:
        """The rows of some of the tokens that `rows` was asked for, read when their values are asked for."""
        return TokenRows(self._rows.later(rows.ids[some]))

    def empty(self, tokens: int) -> torch.Tensor:
        """Room for the values of so many tokens: [tokens, rows a token * row values]."""
        width = self.row_ids.heads * self._rows.row_values
        return torch.empty(tokens, width, dtype=self._rows.dtype, device=self._rows.device)

    def _joined(self, sequences: Sequence[tuple[Tokens, Tokens | None]]) -> Int64:
        context = self.row_ids.context
        if len(sequences) > 1 and all(
            len(tokens) == 1 and before is not None and len(before) >= context for tokens, before in sequences
        ):
            # Steps of replies: told by one call for all, in which each lies behind the tokens that it depends on.
            known = [token for tokens, before in sequences for token in (*_last(before, context), tokens[0])]
            return self.row_ids(known)[context :: context + 1]
        ids = [self.row_ids(tokens, before) for tokens, before in sequences]
        if len(ids) == 1:
            return ids[0]
        return np.concatenate([np.empty((0, self.row_ids.heads), np.int64), *ids])

    def _row_ids(self, chunks: Iterable[Tokens], before: Tokens | None) -> Iterator[Int64]:
        for tokens in chunks:
            yield self.row_ids(tokens, before)
            before = self.row_ids.tail(tokens, before)


def _last(before: Tokens | None, context: int) -> Tokens:
    return () if before is None else before[len(before) - context :]


class TokenRows:
    """The rows of the tokens of a ubatch, as models take them (`lazyio.engine.ubatch.Rows`)."""

    def __init__(self, rows: DeviceRows, then: Callable[[], None] = lambda: None) -> None:
        self._rows, self._then = rows, then

    def values(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Wait for them: [tokens, rows a token * row values], in `out` if given; `DeviceRows.values` has the rest."""
        shape = self._rows.shape
        wide = (shape[0], shape[1] * shape[2])
        if out is not None and out.shape != wide:
            raise ValueError(f"out must be {list(wide)} for these tokens, and is {list(out.shape)}")
        values = self._rows.values(None if out is None else out.view(shape)).view(wide)
        self._then()
        return values

    @property
    def ids(self) -> NDArray[Any]:
        """The rows asked for, [tokens, rows a token]."""
        return self._rows.ids

    def __len__(self) -> int:
        return len(self._rows.ids)

    def send(self) -> None:
        """See `DeviceRows`."""
        self._rows.send()

    def hurry(self) -> None:
        """Have them read no later than what is asked for from now on."""
        self._rows.hurry()

    @property
    def exposed_s(self) -> float:
        """Seconds that the host waited for rows that had not been read."""
        return self._rows.exposed_s

    @property
    def stall_events(self) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
        """See `DeviceRows`."""
        return self._rows.stall_events

    def cancel(self) -> None:
        """Give them up. Never waits."""
        self._rows.cancel()


class PromptRows(Iterator[TokenRows]):
    """The rows of each chunk of a prompt, the next ones on their way. Made by `Feed.prompt`.

    What has been read for the next chunk is copied to the device while the current one is computed.
    """

    def __init__(self, ahead: Ahead[DeviceRows]) -> None:
        self._ahead = ahead

    def __next__(self) -> TokenRows:
        rows = next(self._ahead)
        rows.send()
        self._send_next()
        return TokenRows(rows, self._send_next)

    def close(self) -> None:
        """Cancel what is in flight; nothing more will come. Never waits."""
        self._ahead.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send_next(self) -> None:
        upcoming = self._ahead.upcoming
        if upcoming is not None:
            upcoming.send()


class FirstRowBeyond:
    """Row ids of a table that has rows for the first `vocab` token ids alone: those beyond take row 0's.

    Source: Gemma3nTextModel of transformers, which looks up token 0 for ids outside the per-layer vocabulary.
    """

    def __init__(self, row_ids: RowIds, vocab: int) -> None:
        self._inner, self._vocab = row_ids, vocab
        self.heads, self.context = row_ids.heads, row_ids.context

    def __call__(self, tokens: Tokens, before: Tokens | None = None) -> Int64:
        """Row ids, int64 [n, heads]; see `RowIds`."""
        return self._inner(self._within(tokens), None if before is None else self._within(before))

    def tail(self, tokens: Tokens, before: Tokens | None = None) -> Int64:
        """What the next chunk must know of these; see `RowIds`."""
        return self._inner.tail(self._within(tokens), None if before is None else self._within(before))

    def _within(self, tokens: Tokens) -> Tokens:
        given = np.asarray(tokens)
        return np.where(given < self._vocab, given, 0)
