"""What `lazyio run` does."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from lazyio import settings
from lazyio.bench.workload import load_ids
from lazyio.engine.generate import Reply
from lazyio.engine.llm import LLM
from lazyio.engine.prompt import Prompt
from lazyio.engine.sampling import Sampling
from lazyio.errors import PromptError
from lazyio.run import Request


def execute(request: Request) -> None:
    """Load the model, print its reply as it comes and at the end, however that came about, one line of what it took."""
    # What is wrong with these shows before minutes of loading.
    sampling = Sampling(request.temperature, request.top_k, request.top_p, request.min_p, request.seed)
    given = _prompt(request)
    end: dict[str, Any] = {"max_tokens": request.max_tokens, "stop": request.stop or ()}
    with _load(request, lambda llm: llm.check(_asked(llm, request, given), **end)) as llm:
        _introduce(llm, request)
        with llm.reply(_asked(llm, request, given), sampling=sampling, **end) as reply:
            try:
                _show(reply, llm, silent=request.json)
            finally:
                _conclude(reply, request)


def _prompt(request: Request) -> Prompt:
    if request.ids is not None:
        return load_ids(str(request.ids))
    prompt = sys.stdin.read() if request.prompt == "-" else request.prompt
    if not prompt:
        raise PromptError("the prompt is empty: give some text")
    return prompt


def _settings(request: Request) -> dict[str, Any]:
    """The settings that were given as options, None for the others."""
    names = ("lazy_mode", "lookahead", "ubatch", "row_cache", "direct_io", "weights", "trunk")
    return {name: getattr(request, name) for name in names} | {"strict": request.strict or None}


def _load(request: Request, check: Callable[[LLM], None]) -> LLM:
    with _progress() as progress:
        return LLM(
            request.model,
            table=request.table,
            device=request.device,
            dtype=request.dtype,
            load_format=request.load_format,
            layers=request.layers,
            before_loading=check,
            progress=progress,
            **_settings(request),
        )


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes loaded, on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("")
        yield lambda done, size: bar.update(task, completed=done, total=size)


def _introduce(llm: LLM, request: Request) -> None:
    _say(llm.summary())
    given = _settings(request)
    if settings.resolve("ubatch", request.ubatch) != llm.ubatch:
        given["ubatch"] = llm.ubatch  # auto, from the environment, is not in force where there is nothing to plan
    changed = settings.differing(given)
    if changed:
        _say(f"settings: {', '.join(changed)}")
    if llm.no_text is not None:
        _say(f"token ids only: {llm.no_text}")


def _asked(llm: LLM, request: Request, prompt: Prompt) -> Prompt:
    """The prompt as it is, or as a message of a chat."""
    if request.ids is not None:
        return prompt
    is_chat = llm.text.has_template if request.chat is None else request.chat
    return [{"role": "user", "content": prompt}] if is_chat else prompt


def _show(reply: Reply, llm: LLM, *, silent: bool) -> None:
    """Print text as it becomes certain, or token ids where there is no tokenizer."""
    for piece in reply:
        if not silent:
            print(piece.text if llm.no_text is None else f"{piece.token} ", end="", flush=True)


def _conclude(reply: Reply, request: Request) -> None:
    completion = reply.completion
    if request.json:
        result = {
            "model": str(request.model),
            "token_ids": completion.token_ids,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "account": completion.account.as_json(),
        }
        print(json.dumps(result, indent=1))
    else:
        print(flush=True)
    _say(completion.account.line())


def _say(line: str) -> None:
    print(f"lazyio: {' '.join(line.split())}", file=sys.stderr, flush=True)
