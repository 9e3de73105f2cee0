"""From what is asked for to what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from lazyio import settings
from lazyio.bench.cold import make_cold
from lazyio.bench.watch import Watch
from lazyio.bench.workload import load_ids
from lazyio.engine.bench.decoding import measure_decode
from lazyio.engine.bench.prompts import PromptBench
from lazyio.engine.bench.queueing import QueueOutcome, measure_queue
from lazyio.engine.bench.report import EngineOutcome, Part
from lazyio.engine.bench.rig import Rig
from lazyio.engine.bench.streams import StreamsOutcome, arms_of, check_arms, counts_of, measure_streams
from lazyio.engine.bench.ways import Way, ways_of
from lazyio.engine.kv.options import KvOptions
from lazyio.engine.llm import LLM
from lazyio.engine.place import check_state
from lazyio.engine.planning import Limits
from lazyio.engine.weights.load import open_source, outline
from lazyio.errors import ModelError, RunsDifferError, SettingError
from lazyio.units import format_bytes

#: Is called with what there is after each run.
Keep = Callable[[Part], None]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """The options of the command; `model` has those of `LLM`, `table_options` those of each arm's table."""

    path: str
    model: dict[str, Any]
    table_options: dict[str, Any]
    prompts: str
    decode: int
    streams: str
    kv_pages: str
    queued: str
    context: int
    modes: str
    lookahead: str
    rounds: int
    warm: bool
    cold: bool
    ids: Path | None
    seed: int

    def lengths(self) -> list[int]:
        """Tokens of each prompt. Raises SettingError for what is no list of numbers."""
        words = [word.strip() for word in self.prompts.split(",") if word.strip()]
        if not all(word.isascii() and word.isdecimal() and int(word) for word in words):
            raise SettingError(f"--prompts is {self.prompts!r}; it can be numbers of tokens separated by commas")
        if self.queued and not self.decode:
            raise SettingError("--queued needs replies to wait for, and --decode is 0: give a number of steps")
        if not words and not self.decode:
            raise SettingError("there is nothing to measure: give --prompts or --decode")
        if self.warm and not words:
            raise SettingError("--warm has no effect without --prompts: decode steps are measured cold; leave it out")
        if self.kv_pages and not self.streams:
            raise SettingError("--kv-pages has no effect without --streams: give a number of them")
        if self.streams and not self.decode:
            raise SettingError("--streams measures decode steps, and --decode is 0: give a number of them")
        return [int(word) for word in words]

    def heats(self) -> list[bool]:
        """Whether prompts are warm: once, or both."""
        return [warm for warm, asked in ((False, self.cold or not self.warm), (True, self.warm)) if asked]


def execute(request: EngineRequest, console: Console, keep: Callable[[EngineOutcome], None]) -> Iterator[EngineOutcome]:
    """Measure what is asked for; the outcome so far, whenever a part is done. `keep` has it after each run.

    Raises SettingError or NeverFits for a request that can't be, NotCold, RunsDifferError, and what models and tables
    raise.
    """
    lengths, ways = request.lengths(), ways_of(request.modes, request.lookahead)
    modes = [Way(mode, 0) for mode in dict.fromkeys(way.mode for way in ways)]
    together, queue = _streams(request, modes), _queue(request, ways)
    of_a_stream, of_streams = together.most_tokens
    decode = request.context + request.decode if request.decode else 0
    most = max([*lengths, decode, of_a_stream, queue.tokens_each if queue.arms else 0])
    text = max(most, of_streams, queue.most_tokens)
    # Before anything is opened, and minutes of loading.
    tokens, source = tokens_of(request.ids, text, _vocab_of(request, most), request.seed)
    alone = max([1, *lengths, 0 if together.arms or queue.arms else decode, queue.tokens_each if queue.arms else 0])

    def check(llm: LLM) -> None:
        KvOptions.resolve("off", None, None).fits_ever(llm.trunk, alone, 1)
        check_arms(together, llm.trunk, tokens)

    with LLM(request.path, before_loading=check, **request.model) as llm, ExitStack() as stack:
        assert llm.table is not None
        assert llm.feed is not None
        check_state(llm.model, alone)
        rig = Rig(llm.model, llm.table.spec, llm.feed.row_ids, request.table_options, stack)
        cuts = {length: llm.cuts(length) for length in lengths}
        llm.table.close()  # what it has mapped could not be made cold
        if request.decode or not all(request.heats()):
            make_cold(rig.spec)  # what can't be is said at once
        bench = PromptBench(rig, ways, request.rounds, request.seed)
        with Watch(console, request.rounds * (len(ways) + 1)) as watch:
            parts: list[Callable[[Keep], None]] = [
                partial(_prompt, bench, tokens[:length], cuts[length], warm, watch)
                for length, warm in product(lengths, request.heats())
            ]
            if together.arms:
                parts.append(partial(measure_streams, rig, together, tokens, request.rounds, watch))
            if queue.arms:
                parts.append(partial(measure_queue, rig, queue, tokens, request.rounds, watch))
            if request.decode and not (together.arms or queue.arms):
                taken, rounds, seed = tokens[: request.context + request.decode], request.rounds, request.seed
                parts.append(partial(measure_decode, rig, modes, taken, request.context, rounds, seed, watch))
            outcome = EngineOutcome(_subject(llm, source), ways, [])
            for measure in parts:
                _measure(outcome, measure, keep)
                outcome.complete = len(outcome.parts) == len(parts)
                yield outcome


def _prompt(bench: PromptBench, tokens: list[int], cuts: list[int], warm: bool, watch: Watch, keep: Keep) -> None:
    bench.measure(tokens, cuts, warm=warm, watch=watch, keep=keep)


def _measure(outcome: EngineOutcome, measure: Callable[[Keep], None], keep: Callable[[EngineOutcome], None]) -> None:
    """Measure one part more, which is in the outcome from its first run on. If its runs differ, it is void."""
    done = len(outcome.parts)

    def has_run(part: Part) -> None:
        outcome.parts[done:] = [part]
        keep(outcome)

    try:
        measure(has_run)
    except RunsDifferError:
        del outcome.parts[done:]
        keep(outcome)
        raise


def _streams(request: EngineRequest, modes: list[Way]) -> StreamsOutcome:
    arms = arms_of(request.streams, modes, request.kv_pages)
    return StreamsOutcome(arms, request.context, request.decode, _limits(request))


def _queue(request: EngineRequest, ways: list[Way]) -> QueueOutcome:
    arms = [(queued, way) for queued in counts_of("--queued", request.queued) for way in ways]
    return QueueOutcome(arms, request.context, request.decode, _limits(request))


def _limits(request: EngineRequest) -> Limits:
    ubatch = settings.resolve("ubatch", request.model["ubatch"]) or settings.SETTINGS["ubatch"].default
    return Limits(ubatch, min(ubatch, settings.resolve("mixed")))


def _vocab_of(request: EngineRequest, tokens: int) -> int:
    """Token ids that the model has. Raises for a model without a table, or with less context than that."""
    model = outline(open_source(request.path), request.model["load_format"], request.model["layers"])
    if not model.row_values:
        raise ModelError(f"{request.path} has no table whose rows could be waited for; there is nothing to compare")
    if tokens > model.max_tokens:
        raise SettingError(
            f"{tokens} tokens are asked for, and the model takes {model.max_tokens}: lower --prompts, or "
            "--context, --decode and --streams"
        )
    return model.vocab


def tokens_of(path: Path | None, count: int, vocab: int, seed: int) -> tuple[list[int], str]:
    """So many token ids, and where they come from: a file, the text of the package where they fit, or at random.

    Raises TableError for a file that can't be used, SettingError where it is too short or has ids beyond `vocab`.
    """
    if path is not None:
        ids, source = load_ids(str(path)), f"token ids of {path}"
        if len(ids) < count or int(ids[:count].max()) >= vocab or int(ids[:count].min()) < 0:
            raise SettingError(
                f"{path} has {len(ids)} token ids from {ids.min()} to {ids.max()}, and {count} below {vocab} are needed"
            )
        return ids[:count].tolist(), source
    with resources.as_file(resources.files("lazyio.bench") / "data" / "text.ids.npy") as own:
        ids = np.load(own)[:count]
    if len(ids) == count and int(ids.max()) < vocab:
        return ids.tolist(), "token ids of the text that comes with lazyio"
    random = np.random.default_rng(seed).integers(0, vocab, count)
    return random.tolist(), f"uniform random token ids, seed {seed}"


def _subject(llm: LLM, source: str) -> str:
    assert llm.table is not None
    spec = llm.table.spec
    return (
        f"Model: {llm.path}, {llm.architecture}, weights of {llm.trunk} on {_device_name(llm)}. Table: {spec.path}, "
        f"{spec.rows:,} rows of {spec.row_bytes:,} bytes ({spec.dtype}), {format_bytes(spec.table_bytes)}. Tokens: "
        f"{source}."
    )


def _device_name(llm: LLM) -> str:
    import torch

    return torch.cuda.get_device_name(llm.device) if llm.device.type == "cuda" else "the CPU"
