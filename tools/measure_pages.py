"""Measure keys, values and states in pages beside windows: prompts, steps of replies, and what a seat takes.

    python tools/measure_pages.py MODEL --load-format dummy --layers 8 --contexts 2048,32768 --streams 1,8

All ways run by turns, forwards and backwards, windows twice for the noise, over the same tokens in the same cuts. Their
logits must be equal bit for bit, or nothing is printed. The table is in memory.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

try:
    import torch
except ModuleNotFoundError as error:
    raise SystemExit(f"measure_pages: error: models are measured with torch: {error}") from None

from lazyio.bench.report import WIDTH
from lazyio.bench.turns import in_turn
from lazyio.engine import LLM
from lazyio.engine.admission import Admission, Windows
from lazyio.engine.kv.layout import Layout
from lazyio.engine.kv.paged import Paged, Reuse
from lazyio.engine.kv.pool import PAGE
from lazyio.engine.weights.load import open_source, outline
from lazyio.errors import LazyIOError

WINDOWS, PAGES = "windows", "pages"
console = Console(width=None if Console().is_terminal else WIDTH)


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds of all prompts together and of each step; microseconds on the host to seat and to release a lane."""

    prompt_s: float
    steps_s: list[float]
    seat_us: float
    release_us: float
    logits: torch.Tensor  # of the last step


def main(
    model: str,
    contexts: Annotated[str, typer.Option(help="Tokens of each prompt.")] = "2048,8192,32768",
    streams: Annotated[str, typer.Option(help="Sequences at once.")] = "1,8",
    steps: Annotated[int, typer.Option(help="Tokens of each reply.")] = 32,
    rounds: Annotated[int, typer.Option(help="Rounds over both ways.")] = 3,
    load_format: str = "auto",
    layers: int | None = None,
    trunk: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    ubatch: int = 2048,
) -> None:
    table: dict[str, Any] = {"lazy_mode": "off", "lookahead": 0}
    options = {"load_format": load_format, "layers": layers, "trunk": trunk, "dtype": dtype, "kv_pages": "off"}
    has_table = has_rows(model, load_format, layers)
    with LLM(model, device=device, ubatch=ubatch, **options, **(table if has_table else {})) as llm:
        console.print(llm.summary())
        for context, count in itertools.product(numbers(contexts), numbers(streams)):
            what = f"{context:,} tokens, {count} streams"
            results = Table(what, "prompt, ms", "step, ms", "step over windows'", "seat and release, us", box=None)
            for row in compare(llm, context, count, steps, rounds):
                results.add_row(*row)
            console.print(results)  # each at once: what is known stands, whatever ends the next


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def has_rows(model: str, load_format: str, layers: int | None) -> bool:
    return bool(outline(open_source(model), load_format, layers).row_values)


def compare(llm: LLM, context: int, streams: int, steps: int, rounds: int) -> list[tuple[str, ...]]:
    random = np.random.default_rng(0)
    texts = [random.integers(0, llm.model.vocab, context + steps) for _ in range(streams)]
    each = -(-(context + steps + 1) // PAGE) + Layout(llm.model).run_pages
    ways: dict[str, Admission] = {
        WINDOWS: Windows(llm.model, streams),
        PAGES: Paged(llm.model, streams * each, streams=streams, reuse=Reuse()),
    }
    runs: dict[str, list[Run]] = {WINDOWS: [], PAGES: [], f"{WINDOWS} again": []}
    for way in ways.values():  # libraries choose and compile their kernels
        run(llm, way, texts, context)
    for number in range(rounds):
        for name, again in in_turn(list(ways), WINDOWS, number):
            runs[f"{name} again" if again else name].append(run(llm, ways[name], texts, context))
    expected = runs[WINDOWS][0].logits
    if not all(torch.equal(each.logits, expected) for some in runs.values() for each in some):
        raise SystemExit(f"the ways disagree after {context} tokens of {streams} streams, so no time counts")
    return [told(name, some, runs[WINDOWS]) for name, some in runs.items()]


def told(name: str, runs: Sequence[Run], windows: Sequence[Run]) -> tuple[str, ...]:
    medians = [statistics.median(each.steps_s) for each in runs]
    ratios = [a / statistics.median(b.steps_s) for a, b in zip(medians, windows, strict=True)]
    return (
        name,
        spread([1e3 * each.prompt_s for each in runs]),
        spread([1e3 * each for each in medians]),
        spread(ratios),
        f"{statistics.median(each.seat_us for each in runs):,.0f} and "
        f"{statistics.median(each.release_us for each in runs):,.0f}",
    )


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.2f} [{min(values):,.2f}, {max(values):,.2f}]"


def run(llm: LLM, admission: Admission, texts: Sequence[Any], context: int) -> Run:
    """A fresh run over the same tokens: what an earlier one left in pages is given up before."""
    if isinstance(admission, Paged):
        admission.ledger.prefixes.clear()
    steps = len(texts[0]) - context
    began = time.perf_counter()
    seats = [admission.seat(text[:context], steps) for text in texts]
    seated = time.perf_counter()
    settle(llm)
    prompt_began = time.perf_counter()
    for seat, text in zip(seats, texts, strict=True):
        for start in range(0, context, llm.ubatch or context):
            advance(llm, [(seat, text)], min(llm.ubatch or context, context - start))
    settle(llm)
    prompt_s, steps_s = time.perf_counter() - prompt_began, []
    for _ in range(steps):
        since = time.perf_counter()
        logits = advance(llm, list(zip(seats, texts, strict=True)), 1)
        settle(llm)
        steps_s.append(time.perf_counter() - since)
    ending = time.perf_counter()
    for seat, text in zip(seats, texts, strict=True):
        admission.release(seat, text.tolist())
    release_us = 1e6 * (time.perf_counter() - ending) / len(seats)
    return Run(prompt_s, steps_s, 1e6 * (seated - began) / len(seats), release_us, logits.cpu())


def advance(llm: LLM, lanes: Sequence[tuple[Any, Any]], count: int) -> torch.Tensor:
    """The logits after the next so many tokens of each lane, whose table is in memory."""
    chunks = [(seat.state, text[seat.state.tokens : seat.state.tokens + count].tolist()) for seat, text in lanes]
    rows = None
    if llm.feed is not None:
        reach = llm.feed.row_ids.context
        before = [text[max(0, seat.state.tokens - reach) : seat.state.tokens] for seat, text in lanes]
        rows = llm.feed.step([(tokens, known) for (_, tokens), known in zip(chunks, before, strict=True)])
    hidden = llm.scheduler._forward.step(chunks, rows)
    return llm.scheduler._forward.logits(hidden[count - 1 :: count])


def settle(llm: LLM) -> None:
    if llm.device.type == "cuda":
        torch.cuda.synchronize(llm.device)


if __name__ == "__main__":
    try:
        typer.run(main)
    except (LazyIOError, ModuleNotFoundError) as error:
        raise SystemExit(f"measure_pages: error: {error}") from None
