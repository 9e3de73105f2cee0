"""Options that commands which run a model have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_TABLE, _MODEL = "Table", "Model"

RowCache = Annotated[
    str | None, typer.Option(help="Memory for rows that were read, such as 256MiB.", rich_help_panel=_TABLE)
]
DirectIO = Annotated[str | None, typer.Option(help="auto, on or off.", rich_help_panel=_TABLE)]
TablePath = Annotated[
    Path | None, typer.Option(help="Where the table lies, if not in the same checkpoint.", rich_help_panel=_TABLE)
]
Strict = Annotated[bool, typer.Option("--strict", help="Fail instead of falling back.", rich_help_panel=_TABLE)]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default="cuda if there", rich_help_panel=_MODEL)
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16 or float16.",
        show_default="float32 on cpu, the checkpoint's own on cuda",
        rich_help_panel=_MODEL,
    ),
]
LoadFormat = Annotated[str, typer.Option(help="auto, or dummy for random weights.", rich_help_panel=_MODEL)]
Layers = Annotated[
    int | None, typer.Option(min=1, help="Of dummy weights, the first so many layers.", rich_help_panel=_MODEL)
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="Quantised weights: packed on the device, dequantised, or auto.",
        show_default="auto: packed on cuda",
        rich_help_panel=_MODEL,
    ),
]
KvPages = Annotated[
    str | None,
    typer.Option(
        help="Pages of 256 positions for all sequences together: a number, auto, or off.",
        show_default="off",
        rich_help_panel=_MODEL,
    ),
]
PoisonState = Annotated[
    bool, typer.Option("--poison-state", help="Fill pages with no numbers before use.", rich_help_panel=_MODEL)
]
Trunk = Annotated[
    str | None,
    typer.Option(
        help="Of dummy weights, the type of matrices, such as Q4_0.",
        show_default="values of the dtype",
        rich_help_panel=_MODEL,
    ),
]
