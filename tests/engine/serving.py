"""A model, rows and memory for the scheduler that cost nothing and write down what is asked of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lazyio.engine import LLM
from lazyio.engine.account import Meter
from lazyio.engine.kv.pool import PAGE
from lazyio.engine.planning import Limits
from lazyio.engine.request import Request
from lazyio.engine.sampling import Following, Sampler, Sampling
from lazyio.engine.scheduler import Scheduler
from lazyio.engine.writing import Plan, Writing
from lazyio.errors import NoRoom, ReadError

VOCAB = 300
BROKEN, UNREADABLE = 280, 299  # tokens whose logits are no numbers, and whose rows can't be read


def unreadable() -> ReadError:
    return ReadError("bad sector", path="rows", offset=0, wanted=1, got=None)


class Kept:
    """The state of a sequence: its tokens."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.seen: list[int] = []


class Counting:
    """A model that goes on counting: after a token comes the next number. A sequence's tokens must come in order."""

    def __init__(self) -> None:
        self.ubatches: list[list[tuple[Kept, list[int]]]] = []
        self.exploding: set[int] = set()  # ubatches whose forward pass fails

    def step(self, chunks: Sequence[tuple[Any, Sequence[int]]], rows: Any) -> torch.Tensor:
        self.ubatches.append([(state, list(tokens)) for state, tokens in chunks])
        assert len({id(state) for state, _ in chunks}) == len(chunks)
        if len(self.ubatches) - 1 in self.exploding:
            raise RuntimeError("out of something")
        known = [token for _, tokens in chunks for token in tokens]
        values = known if rows is None else rows.values()[:, 0].tolist()
        place = 0
        for state, tokens in chunks:
            own, place = values[place : place + len(tokens)], place + len(tokens)
            assert own == list(tokens) or UNREADABLE in tokens
            state.seen += tokens
        return torch.tensor(known, dtype=torch.float32)[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden[:, 0].long()
        logits = torch.nn.functional.one_hot((tokens + 1) % VOCAB, VOCAB).float()
        logits[tokens == BROKEN] = torch.nan
        return logits


class Memory:
    """So many tokens of state in all."""

    def __init__(self, room: int) -> None:
        self.room, self.free = room, room
        self.seated: list[int] = []

    def fits_ever(self, tokens: int) -> None:
        assert tokens <= self.room

    def seat(self, prompt: Any, max_tokens: int) -> Any:
        tokens = len(prompt) + max_tokens
        if tokens > self.free:
            raise NoRoom("wait")
        self.free -= tokens
        self.seated.append(tokens)
        return SimpleNamespace(state=Kept(len(prompt)), known=0, marks=(), tokens=tokens)

    def mark(self, seat: Any, tokens: Sequence[int]) -> None: ...

    def release(self, seat: Any, tokens: Sequence[int] | None = None) -> None:
        self.free += seat.tokens

    def clear(self) -> None:
        self.free = self.room


class Asked:
    """Rows whose only value is their token."""

    def __init__(self, tokens: list[int], log: list[Asked], *, patient: bool = False) -> None:
        self.patient = patient
        self.ids = np.array(tokens)[:, None]
        self.exposed_s, self.stall_events = 0.5, None
        self.taken = self.cancelled = False
        log.append(self)

    def __len__(self) -> int:
        return len(self.ids)

    def values(self, out: torch.Tensor | None = None) -> torch.Tensor:
        assert not self.taken
        assert not self.cancelled
        assert not self.patient, "nobody waits for what has not been hurried"
        self.taken = True
        if UNREADABLE in self.ids:
            raise unreadable()
        values = torch.from_numpy(self.ids).float()
        return values if out is None else out.copy_(values)

    def send(self) -> None:
        pass

    def cancel(self) -> None:
        self.cancelled = True

    def hurry(self) -> None:
        self.patient = False


class Rows:
    """What feeds the scheduler; `context` tokens before must be given with each, if there are so many."""

    def __init__(self, lookahead: int = 2, context: int = 2, tokens_ahead: int = 1000) -> None:
        self.lookahead, self.tokens_ahead = lookahead, tokens_ahead
        self.row_ids = SimpleNamespace(context=context)
        self.asked: list[Asked] = []
        self.steps: list[list[int]] = []
        self.refusing = False
        self.beginnings: set[int] = set()  # first tokens of prompts

    def ahead(self, sequences: Any, *, patient: bool = False) -> Asked:
        return Asked(self._checked(sequences), self.asked, patient=patient)

    def step(self, sequences: Any) -> Asked:
        if self.refusing:
            raise unreadable()
        self.steps.append(self._checked(sequences))
        return Asked(self.steps[-1], self.asked)

    def again(self, rows: Asked, some: slice) -> Asked:
        return Asked(rows.ids[some, 0].tolist(), self.asked)

    def empty(self, tokens: int) -> torch.Tensor:
        return torch.full((tokens, 1), torch.nan)

    def _checked(self, sequences: Any) -> list[int]:
        found: list[int] = []
        for tokens, before in sequences:
            first, known = int(tokens[0]), list(before or [])
            if self.beginnings:
                assert len(known) == self.row_ids.context or first in self.beginnings or known[0] in self.beginnings
            assert known == list(range(first - len(known), first)), "prompts in these tests count"
            found += [int(token) for token in tokens]
        return found


def request_of(prompt: Sequence[int], max_tokens: int = 4, ubatch: int = 8, **plan: Any) -> Request:
    cuts = [min(ubatch, len(prompt) - start) for start in range(0, len(prompt), ubatch)]
    made = Plan(list(prompt), cuts, max_tokens, plan.get("stop_ids", ()), plan.get("stop_strings", ()))
    meter = Meter(len(prompt), None, on_cuda=False)
    return Request(made, Sampler(Sampling(), VOCAB), Writing(made, plan.get("text")), meter)


def serving(
    *, parallel: int = 4, ubatch: int = 8, mixed: int = 3, room: int = 10_000, rows: Rows | None = None
) -> tuple[Scheduler, Counting, Memory]:
    model, memory = Counting(), Memory(room)
    feed: Any = rows
    return Scheduler(model, feed, memory, Limits(ubatch, mixed), parallel), model, memory  # type: ignore[arg-type]


def run(scheduler: Scheduler) -> None:
    while scheduler.step():
        pass


class Recording(Following):
    """Follows a text, and keeps the logits of each step."""

    def __init__(self, text: Sequence[int], vocab: int) -> None:
        super().__init__(text, vocab)
        self.logits: list[torch.Tensor] = []

    @property
    def is_greedy(self) -> bool:
        return False

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        self.logits.append(logits.clone())
        return super().choose(logits)


def lanes(parallel: int, mixed: int) -> dict[str, Any]:
    """Both settings, where both have effect."""
    return {"parallel": parallel, "mixed": mixed} if parallel > 1 else {}


def followed(llm: LLM, texts: Sequence[tuple[list[int], list[int]]]) -> tuple[list[torch.Tensor], list[int]]:
    """Of each prompt and the text that follows it, all at once, the logits [tokens, vocab] that each token of this was
    chosen by, and how many tokens of the prompt were known."""
    samplers, requests = [], []
    for prompt, text in texts:
        request = llm._request(llm._plan(prompt, len(text), ()), Sampling())
        request.sampler = sampler = Recording(text, llm.model.vocab)
        llm.scheduler.add(request)
        samplers.append(sampler)
        requests.append(request)
    run(llm.scheduler)
    for request, (_, text) in zip(requests, texts, strict=True):
        assert request.error is None
        assert request.writing.tokens == text
    known = [request.meter.account(0).known_tokens for request in requests]
    return [torch.stack(sampler.logits) for sampler in samplers], known


def replied(folder: Path, prompts: list[list[int]], **given: Any) -> tuple[list[int], list[torch.Tensor]]:
    """Of replies on a GPU: tokens of prompts that were known, and the logits that their tokens were chosen by."""
    given = {"device": "cuda", "ubatch": PAGE, **given}
    with LLM(folder, **given) as llm:
        seen: list[torch.Tensor] = []
        logits = llm.scheduler._forward.logits

        def noted(hidden: torch.Tensor) -> torch.Tensor:
            seen.append(logits(hidden).clone())
            return seen[-1]

        llm.scheduler._forward.logits = noted  # type: ignore[method-assign]
        at_once = [prompts] if llm.parallel > 1 else [[prompt] for prompt in prompts]
        found = [completion for some in at_once for completion in llm.generate(some, max_tokens=6)]
        return [each.account.known_tokens for each in found], [each.cpu() for each in seen]
