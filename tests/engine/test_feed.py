"""Rows of prompts and steps: the same in every mode and with any lookahead, asked for as early as can be."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lazyio import Cancelled, LazyTable, NgramHash, RowIndexError, SettingError, TableSpec, Unsupported, open_table
from lazyio.engine.device_table import DeviceTable
from lazyio.engine.feed import Feed, FirstRowBeyond
from lazyio.fetchers.conformance import write_rows
from lazyio.fetchers.faults import Faults, with_faults
from lazyio.ple.ngram import derive_constants
from lazyio.ple.rowids import IdentityRowIds, NgramRowIds

CPU = torch.device("cpu")
ROWS, VOCAB = 3000, 500
HASH: NgramHash = derive_constants(ROWS, vocab=VOCAB, eos=17)
TOKENS = np.random.default_rng(41).integers(0, VOCAB, 300)
TOKENS[[40, 99, 100]] = 17
CUTS = [0, 1, 64, 100, 101, 300]
CHUNKS = [TOKENS[start:end] for start, end in pairwise(CUTS)]
MODES: list[dict[str, Any]] = [
    {"mode": "off", "reserve": 0},
    {"mode": "on"},
    {"mode": "on-bare"},
    {"mode": "on-direct", "direct_io": "on"},
    {"mode": "on-direct", "direct_io": "off"},
    {"mode": "uring", "direct_io": "on", "row_cache": 0},
    {"mode": "uring", "direct_io": "on"},
]


@pytest.fixture
def spec(tmp_path: Path) -> TableSpec:
    made = write_rows(tmp_path, 90, [("rows", 77, ROWS)])
    return TableSpec(
        path=str(tmp_path / "rows"),
        tensor="rows",
        dtype="Q4_0",
        rows=ROWS,
        row_values=160,
        row_bytes=90,
        extents=made.extents,
        ngram=HASH,
    )


@pytest.fixture
def table(spec: TableSpec) -> Iterator[LazyTable]:
    with open_table(spec, mode="on-direct", direct_io="on", row_cache=0) as table:
        yield table


def feed_of(table: LazyTable, lookahead: int = 2) -> Feed:
    return Feed(DeviceTable(table, CPU, torch.float32), NgramRowIds(HASH, VOCAB), lookahead)


def expected(table: LazyTable, tokens: Any = TOKENS, before: Any = None) -> torch.Tensor:
    ids = NgramRowIds(HASH, VOCAB)(tokens, before)
    return torch.from_numpy(table.decode(table.gather(ids))).flatten(1)


def same_bits(values: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(values.view(torch.int32), wanted.view(torch.int32))


# --- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [0, 1, 3, 64])
@pytest.mark.parametrize("arguments", MODES, ids=str)
def test_a_prompt_has_its_rows_in_every_mode(spec: TableSpec, arguments: dict[str, Any], lookahead: int) -> None:
    try:
        table = open_table(spec, strict=True, **arguments)
    except Unsupported as refused:
        pytest.skip(str(refused))
    with table:
        values = []
        for chunk, rows in zip(CHUNKS, feed_of(table, lookahead).prompt(CHUNKS), strict=True):
            values.append(rows.values())
            assert values[-1].shape == (len(chunk), HASH.heads_per_ngram * 2 * 160)
            assert rows.exposed_s >= 0
        same_bits(torch.cat(values), expected(table))


def test_chunks_that_are_asked_for_together_share_rows(table: LazyTable) -> None:
    sequences = [(TOKENS[:60], None), (TOKENS[20:90], TOKENS[18:20]), (TOKENS[:60], None)]
    rows = feed_of(table).ahead(sequences)
    values = rows.values()
    assert table.stats().unique_rows == len(np.unique(NgramRowIds(HASH, VOCAB)(TOKENS[:90])))
    same_bits(values, torch.cat([expected(table)[place] for place in (slice(60), slice(20, 90), slice(60))]))
    again = feed_of(table).again(rows, slice(60, 130))
    same_bits(again.values(), expected(table)[20:90])


def test_a_prompt_goes_on_where_another_ended(table: LazyTable) -> None:
    for lookahead in (0, 2):
        (rows,) = feed_of(table, lookahead).prompt([TOKENS[100:]], TOKENS[:100])
        same_bits(rows.values(), expected(table)[100:])


def wait_until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("lookahead", [1, 2, 4])
def test_so_many_ubatches_are_read_ahead(table: LazyTable, lookahead: int) -> None:
    with feed_of(table, lookahead).prompt(CHUNKS) as prompt:
        for turn in range(len(CHUNKS)):
            begun = min(len(CHUNKS), turn + lookahead)
            wait_until(lambda begun=begun: table.stats().gathers == begun)
            time.sleep(0.005)
            assert table.stats().gathers == begun
            next(prompt)


def test_without_lookahead_rows_are_read_when_the_model_asks(table: LazyTable) -> None:
    prompt = feed_of(table, 0).prompt(CHUNKS)
    first = next(prompt)
    second = next(prompt)
    assert table.stats().gathers == 0
    second.values()
    first.values()
    assert table.stats().gathers == 2


def test_leaving_early_cancels(table: LazyTable) -> None:
    with closing(feed_of(table, 3).prompt(CHUNKS)) as prompt:
        current = next(prompt)
        behind = prompt._ahead.upcoming
    same_bits(current.values(), expected(table)[:1])
    with pytest.raises(Cancelled):
        behind.values()
    assert list(prompt) == []


def test_forgetting_a_prompt_leaves_nothing_to_read(spec: TableSpec) -> None:
    def slow(fetcher: Any) -> Any:
        return with_faults(fetcher, Faults(late=1, delay_s=0.02))

    with open_table(spec, mode="on-direct", direct_io="on", row_cache=0, wrap=slow) as table:
        prompt = feed_of(table, 4).prompt(CHUNKS)
        del prompt
        gc.collect()
        time.sleep(0.1)
        assert table.stats().gathers <= 1


@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_wrong_token_is_an_error_at_its_turn(table: LazyTable, lookahead: int) -> None:
    prompt = feed_of(table, lookahead).prompt([TOKENS[:5], [VOCAB], TOKENS[5:9]])
    same_bits(next(prompt).values(), expected(table)[:5])
    with pytest.raises(RowIndexError, match=f"token id {VOCAB} is outside"):
        next(prompt)


def test_what_is_sent_is_what_has_been_read(table: LazyTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next chunk is offered to the device when its turn comes near: before the current is computed, and after."""
    feed, offered = feed_of(table, 2), []
    prompt = feed.prompt(CHUNKS[:3])
    monkeypatch.setattr(type(prompt._ahead.upcoming), "send", lambda rows: offered.append(rows.shape[0]))
    next(prompt).values()
    assert offered == [1, 63, 63]
    next(prompt).values()
    assert offered[3:] == [63, 36, 36]
    next(prompt).values()
    assert offered[6:] == [36]


# --- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", MODES, ids=str)
def test_steps_have_their_rows_in_every_mode(spec: TableSpec, arguments: dict[str, Any]) -> None:
    try:
        table = open_table(spec, strict=True, **arguments)
    except Unsupported as refused:
        pytest.skip(str(refused))
    with table:
        feed = feed_of(table)
        for place in (0, 1, 2, 41, 42, 101):
            rows = feed.step([(TOKENS[place : place + 1], TOKENS[:place])])
            same_bits(rows.values(), expected(table)[place : place + 1])
        rows = feed.step([([int(TOKENS[9])], TOKENS[7:9]), (TOKENS[40:43], TOKENS[38:40]), ([3], None)])
        wanted = [expected(table)[9:10], expected(table)[40:43], expected(table, [3])]
        same_bits(rows.values(), torch.cat(wanted))


@pytest.mark.parametrize("places", [(2, 9), (41, 40, 42, 99, 100, 101, 102, 3), (0, 1, 5), (1,)])
def test_steps_of_several_sequences_at_once(table: LazyTable, places: tuple[int, ...]) -> None:
    feed = feed_of(table)
    for reach in (2, 3, 300):
        before = [TOKENS[max(0, place - reach) : place].tolist() for place in places]
        tokens = [[int(TOKENS[place])] for place in places]
        wanted = torch.cat([expected(table)[place : place + 1] for place in places])
        same_bits(feed.step(list(zip(tokens, before, strict=True))).values(), wanted)
    identity = Feed(DeviceTable(table, CPU, torch.float32), IdentityRowIds(ROWS), 2)
    assert identity.step([([7], []), ([2999], [4])]).ids.tolist() == [[7], [2999]]
    with pytest.raises(RowIndexError, match="3000"):
        identity.step([([7], []), ([3000], [4])])


def test_a_step_writes_to_a_fixed_place(table: LazyTable) -> None:
    out = torch.zeros(1, 16 * 160)
    for place in (5, 6):
        rows = feed_of(table).step([(TOKENS[place : place + 1], TOKENS[:place])])
        assert rows.values(out).data_ptr() == out.data_ptr()
        same_bits(out, expected(table)[place : place + 1])
    with pytest.raises(ValueError, match=r"out must be \[1, 2560\]"):
        feed_of(table).step([([1], None)]).values(torch.zeros(1, 16, 160))


def test_a_step_of_nothing(table: LazyTable) -> None:
    for sequences in ([], [([], None)], [([], None), ([], TOKENS[:2])]):
        assert feed_of(table).step(sequences).values().shape == (0, 16 * 160)


def test_a_step_is_under_way_when_it_returns(table: LazyTable) -> None:
    rows = feed_of(table).step([(TOKENS[5:6], TOKENS[:5])])
    assert table.stats().gathers == 1
    rows.cancel()
    with pytest.raises(Cancelled):
        rows.values()


# --- settings --------------------------------------------------------------------------------------------------------


def test_less_than_no_lookahead_is_refused(table: LazyTable) -> None:
    for wrong in (-1, 1.5, True, None):
        with pytest.raises(SettingError, match=f"lookahead is {wrong}"):
            feed_of(table, wrong)  # type: ignore[arg-type]


def test_tokens_beyond_the_rows_take_the_first_row() -> None:
    row_ids = FirstRowBeyond(IdentityRowIds(100), 90)
    assert (row_ids.heads, row_ids.context) == (1, 0)
    np.testing.assert_array_equal(row_ids([89, 90, 5, 1000]), [[89], [0], [5], [0]])
    assert len(row_ids.tail([95], None)) == 0
    with pytest.raises(RowIndexError):
        row_ids([-1])
    hashed = FirstRowBeyond(NgramRowIds(HASH, VOCAB), VOCAB)
    np.testing.assert_array_equal(hashed([3, 900], [800, 4]), NgramRowIds(HASH, VOCAB)([3, 0], [0, 4]))
    np.testing.assert_array_equal(hashed.tail([900], [4]), [4, 0])
