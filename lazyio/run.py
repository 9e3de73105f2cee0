"""The command `lazyio run`: its options, checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from lazyio import settings
from lazyio.errors import SettingError
from lazyio.model_options import (
    Device,
    DirectIO,
    Dtype,
    KvPages,
    Layers,
    LoadFormat,
    PoisonState,
    RowCache,
    Strict,
    TablePath,
    Trunk,
    Weights,
)

_PROMPT, _REPLY, _TABLE, _LANES = "Prompt", "Reply", "Table", "Many at once"


@dataclass(frozen=True, slots=True)
class Request:
    """The options of the command, None where one was not given."""

    model: Path
    prompt: list[str] | None = None
    ids: Path | None = None
    chat: bool | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | None = None
    lazy_mode: str | None = None
    lookahead: int | None = None
    ubatch: str | None = None
    row_cache: str | None = None
    direct_io: str | None = None
    table: Path | None = None
    parallel: int | None = None
    mixed: int | None = None
    batch_invariant: bool = False
    strict: bool = False
    device: str | None = None
    dtype: str | None = None
    load_format: str = "auto"
    layers: int | None = None
    weights: str | None = None
    trunk: str | None = None
    kv_pages: str | None = None
    poison_state: bool = False
    json: bool = False

    def check(self) -> None:
        """Raise SettingError for options that contradict each other, or of which one would be ignored."""
        if bool(self.prompt) == (self.ids is not None):
            raise SettingError(
                "give one prompt: text with -p (-p - reads it from stdin; several -p give as many replies), or token "
                "ids with --ids"
            )
        if self.prompt and self.prompt.count("-") > 1:
            raise SettingError("-p - is given more than once, and there is one stdin to read")
        if self.ids is not None and self.chat is not None:
            raise SettingError("--chat and --no-chat have no effect on --ids, which are taken as they are")
        settings.check_lanes(self.parallel, self.mixed)


def run(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A folder of safetensors, or a GGUF file.")],
    *,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            "-p",
            help="Text; - reads it from stdin. Given several times, there are as many replies.",
            rich_help_panel=_PROMPT,
        ),
    ] = None,
    ids: Annotated[
        Path | None, typer.Option(help="Token ids, a .npy file of integers.", rich_help_panel=_PROMPT)
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Whether the text is a message of a chat.",
            show_default="chat, if the model has a template for it",
            rich_help_panel=_PROMPT,
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of the reply.", rich_help_panel=_REPLY)] = 128,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 takes the likeliest token.", rich_help_panel=_REPLY)
    ] = 0.0,
    top_k: Annotated[
        int, typer.Option(min=0, help="Of the likeliest tokens, how many; 0: all.", rich_help_panel=_REPLY)
    ] = 0,
    top_p: Annotated[
        float, typer.Option(help="Of the likeliest tokens, those of this probability together.", rich_help_panel=_REPLY)
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(help="Tokens of at least this part of the likeliest one's probability.", rich_help_panel=_REPLY),
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of random choices, to repeat them.", rich_help_panel=_REPLY)
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Text before which the reply ends; may be given several times.", rich_help_panel=_REPLY),
    ] = None,
    lazy_mode: Annotated[
        str | None, typer.Option(help="off, on, on-bare, on-direct, uring or auto.", rich_help_panel=_TABLE)
    ] = None,
    lookahead: Annotated[
        int | None, typer.Option(help="Ubatches of the prompt read ahead; 0: none.", rich_help_panel=_TABLE)
    ] = None,
    ubatch: Annotated[
        str | None,
        typer.Option(
            help="Tokens of the prompt computed together. auto: planned from a measured pace, may vary between runs.",
            rich_help_panel=_TABLE,
        ),
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(min=1, help="Prompts that are computed at once.", rich_help_panel=_LANES)
    ] = None,
    mixed: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of prompts computed together beside replies.", rich_help_panel=_LANES),
    ] = None,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant", help="Each sequence by itself: no bit depends on others. Slow.", rich_help_panel=_LANES
        ),
    ] = False,
    row_cache: RowCache = None,
    direct_io: DirectIO = None,
    table: TablePath = None,
    strict: Strict = False,
    device: Device = None,
    dtype: Dtype = None,
    load_format: LoadFormat = "auto",
    layers: Layers = None,
    weights: Weights = None,
    trunk: Trunk = None,
    kv_pages: KvPages = None,
    poison_state: PoisonState = False,
    json: Annotated[bool, typer.Option("--json", help="Print the reply and all counts as JSON, at the end.")] = False,
) -> None:
    """Generate a reply: it goes to stdout, all else to stderr, the last line being what it took."""
    request = Request(**locals())
    request.check()
    from lazyio.engine.run_command import execute

    execute(request)
