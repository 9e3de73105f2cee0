"""What `lazyio run` does."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from lazyio import settings
from lazyio.bench.figures import short
from lazyio.bench.workload import load_ids
from lazyio.engine.generate import Completion, Reply
from lazyio.engine.kv.paged import Paged
from lazyio.engine.llm import LLM
from lazyio.engine.prompt import Prompt
from lazyio.engine.sampling import Sampling
from lazyio.errors import PromptError
from lazyio.run import Request


def execute(request: Request) -> None:
    """Load the model, print its replies as they come and at the end, however that came about, what they took."""
    # What is wrong with these shows before minutes of loading.
    sampling = Sampling(request.temperature, request.top_k, request.top_p, request.min_p, request.seed)
    given = _prompts(request)
    end: dict[str, Any] = {"max_tokens": request.max_tokens, "stop": request.stop or ()}

    def check(llm: LLM) -> None:
        for prompt in given:
            llm.check(_asked(llm, request, prompt), **end)

    with _load(request, check) as llm, ExitStack() as stack:
        _introduce(llm, request)
        began = time.perf_counter()
        asked = [_asked(llm, request, prompt) for prompt in given]
        replies = [stack.enter_context(llm.reply(prompt, sampling=sampling, **end)) for prompt in asked]
        try:
            _show_all(replies, llm, silent=request.json)
        finally:
            _conclude(replies, llm, request, time.perf_counter() - began)


def _prompts(request: Request) -> list[Prompt]:
    if request.ids is not None:
        return [load_ids(str(request.ids))]
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in request.prompt or ()]
    if not all(prompts):
        raise PromptError("the prompt is empty: give some text")
    return prompts


def _settings(request: Request) -> dict[str, Any]:
    """The settings that were given as options, None for the others."""
    names = ("lazy_mode", "lookahead", "ubatch", "row_cache", "direct_io", "weights", "trunk")
    lanes = ("parallel", "mixed", "kv_pages")
    given = {name: getattr(request, name) for name in names + lanes}
    return given | {name: getattr(request, name) or None for name in ("strict", "batch_invariant", "poison_state")}


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
    if isinstance(llm.admission, Paged):
        _say(llm.admission.summary())
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


def _show_all(replies: Sequence[Reply], llm: LLM, *, silent: bool) -> None:
    """Print one after the other. What goes wrong with one is raised when the others are whole."""
    failed: Exception | None = None
    for i, reply in enumerate(replies):
        if i and not silent:
            print(flush=True)
        try:
            _show(reply, llm, silent=silent)
        except BrokenPipeError:
            raise  # nobody reads any of them
        except Exception as error:
            failed = failed or error
    if failed is not None:
        raise failed


def _show(reply: Reply, llm: LLM, *, silent: bool) -> None:
    """Print text as it becomes certain, or token ids where there is no tokenizer."""
    for piece in reply:
        if not silent:
            print(piece.text if llm.no_text is None else f"{piece.token} ", end="", flush=True)


def _conclude(replies: Sequence[Reply], llm: LLM, request: Request, seconds: float) -> None:
    completions = [reply.completion for reply in replies]
    if request.json:
        results = [_as_json(request, completion) for completion in completions]
        print(json.dumps(results[0] if len(results) == 1 else results, indent=1))
    else:
        print(flush=True)
    for i, completion in enumerate(completions):
        number = f"{i + 1}: " if len(completions) > 1 else ""
        failed = "" if completion.error is None or not number else f"error: {completion.error}; "
        _say(f"{number}{failed}{completion.account.line()}")
    if len(completions) > 1:
        tokens = sum(len(completion.token_ids) for completion in completions)
        _say(
            f"{len(completions)} replies of {tokens:,} tokens together in {seconds:.2f} s, "
            f"{short(tokens / seconds)}/s, {_room(llm)}"
        )


def _room(llm: LLM) -> str:
    counts, admission = llm.scheduler.counts, llm.admission
    lanes = f"at most {counts.most_lanes} at once"
    if not isinstance(admission, Paged):
        return lanes
    pool = admission.ledger.pool
    return f"{lanes} in at most {pool.peak} of {len(pool)} pages; {counts.refused} steps in which one found no room"


def _as_json(request: Request, completion: Completion) -> dict[str, Any]:
    return {
        "model": str(request.model),
        "token_ids": completion.token_ids,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "error": None if completion.error is None else str(completion.error),
        "account": completion.account.as_json(),
    }


def _say(line: str) -> None:
    print(f"lazyio: {' '.join(line.split())}", file=sys.stderr, flush=True)
