"""The command `lazyio bench-engine`: its options, taken before torch is imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from lazyio.bench.kept import KeptJson
from lazyio.bench.options import check_writable
from lazyio.bench.report import WIDTH
from lazyio.model_options import (
    Device,
    DirectIO,
    Dtype,
    Layers,
    LoadFormat,
    RowCache,
    Strict,
    TablePath,
    Trunk,
    Weights,
)

if TYPE_CHECKING:
    from lazyio.engine.bench.session import EngineRequest

_ROUNDS, _TABLE = "Rounds", "Table"


def bench_engine(
    path: Annotated[str, typer.Argument(metavar="MODEL", help="A folder of safetensors, or a GGUF file.")],
    *,
    prompts: Annotated[
        str, typer.Option(help="Lengths of prompts in tokens, separated by commas; empty for none.")
    ] = "2048",
    decode: Annotated[int, typer.Option(min=0, help="Decode steps; 0 measures none.")] = 128,
    streams: Annotated[
        str, typer.Option(help="Replies that go on at once, numbers separated by commas; empty for one sequence.")
    ] = "",
    queued: Annotated[
        str, typer.Option(help="Requests that wait behind one, numbers separated by commas; empty measures none.")
    ] = "",
    kv_pages: Annotated[
        str,
        typer.Option(help="Of streams: pages for all together, numbers, auto or off, separated by commas."),
    ] = "",
    context: Annotated[int, typer.Option(min=1, help="Tokens before the first decode step.")] = 256,
    ids: Annotated[
        Path | None,
        typer.Option(help="Token ids, a .npy file of integers.", show_default="a text that comes with lazyio"),
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Nothing of the table in memory, proved. The default.")] = False,
    warm: Annotated[bool, typer.Option("--warm", help="After an untimed pass over the same prompt.")] = False,
    modes: Annotated[
        str, typer.Option(help="Lazy modes, separated by commas; off is always among them.", rich_help_panel=_TABLE)
    ] = "off,on-bare,on,on-direct,uring",
    lookahead: Annotated[
        str, typer.Option(help="Ubatches that are read ahead, separated by commas.", rich_help_panel=_TABLE)
    ] = "0,2",
    ubatch: Annotated[
        str | None, typer.Option(help="Most tokens of a ubatch, or auto.", rich_help_panel=_TABLE)
    ] = None,
    row_cache: RowCache = None,
    direct_io: DirectIO = None,
    strict: Strict = False,
    table: TablePath = None,
    device: Device = None,
    dtype: Dtype = None,
    load_format: LoadFormat = "auto",
    layers: Layers = None,
    weights: Weights = None,
    trunk: Trunk = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each arm runs.", rich_help_panel=_ROUNDS)] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of random orders and tokens.", rich_help_panel=_ROUNDS)] = 0,
    json: Annotated[Path | None, typer.Option(help="Write all results to this file.", rich_help_panel=_ROUNDS)] = None,
) -> None:
    """Compare lazy modes under a whole model: prompts beside their floor T*, and decode steps."""
    from lazyio.engine.bench.session import EngineRequest

    check_writable(json)
    request = EngineRequest(
        path=path,
        model={
            "table": table,
            "device": device,
            "dtype": dtype,
            "load_format": load_format,
            "layers": layers,
            "weights": weights,
            "trunk": trunk,
            "ubatch": ubatch,
            "kv_pages": "off",  # runs have memory of their own
            "lazy_mode": "on-bare",  # opens at once, and is closed before anything is measured
        },
        table_options={"row_cache": row_cache, "direct_io": direct_io, "strict": strict or None},
        prompts=prompts,
        decode=decode,
        streams=streams,
        kv_pages=kv_pages,
        queued=queued,
        context=context,
        modes=modes,
        lookahead=lookahead,
        rounds=rounds,
        warm=warm,
        cold=cold,
        ids=ids,
        seed=seed,
    )
    _measure(request, KeptJson(json))


def _measure(request: EngineRequest, kept: KeptJson) -> None:
    """Measure, print and keep; what was measured before an interrupt or an error stands."""
    from lazyio.engine.bench.report import EngineOutcome, show_from, show_method
    from lazyio.engine.bench.session import execute

    console = Console(width=None if Console().is_terminal else WIDTH, highlight=False)
    latest: EngineOutcome | None = None
    shown = 0

    def keep(outcome: EngineOutcome) -> None:
        nonlocal latest
        latest = outcome
        kept.write(outcome.as_json())

    try:
        for outcome in execute(request, Console(stderr=True), keep):
            shown = show_from(outcome, shown, console)
    finally:
        if latest is not None:
            show_from(latest, shown, console, whole=False)
            if latest.parts:
                show_method(latest, console)
            kept.write(latest.as_json(), last=True)
