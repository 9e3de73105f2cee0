"""A model that is loaded, and fed by its table."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Self, Unpack

import torch

from lazyio import settings
from lazyio.engine.account import Meter, describe
from lazyio.engine.device_table import DeviceTable
from lazyio.engine.feed import Feed
from lazyio.engine.forward import BLOCK, BatchInvariant, Forward
from lazyio.engine.generate import Completion, Reply
from lazyio.engine.kv.options import KvOptions
from lazyio.engine.opening import TableOptions, find_rows, open_beside, plan_weights, refuse_ignored
from lazyio.engine.pace import MeasuredPace, measure_pace
from lazyio.engine.place import check_memory, device_of, dtype_of
from lazyio.engine.planning import Limits
from lazyio.engine.prompt import Prompt, check_length, each_prompt, token_ids
from lazyio.engine.request import Request
from lazyio.engine.sampling import Sampler, Sampling
from lazyio.engine.scheduler import Scheduler
from lazyio.engine.sequence import TokenSequence
from lazyio.engine.state import State
from lazyio.engine.text.text import Text, open_text
from lazyio.engine.weights.load import check_room, load_model, open_source, outline
from lazyio.engine.writing import Plan, Writing
from lazyio.errors import ModelError, SettingError
from lazyio.ple.cuts import fixed_cuts
from lazyio.ple.spec import TableSpec
from lazyio.table import LazyTable
from lazyio.units import format_bytes

# Logits are computed for so many tokens at once: there is one for each word of the vocabulary.
_LOGITS_TOKENS = 512
_DEFAULT_UBATCH: int = settings.SETTINGS["ubatch"].default


class LLM:
    """A model with its table on the disk. Use it as a context manager, or `close` it; by one thread at a time.

    `model` is its trunk and `trunk` how the weights of that are held, `table` its lazy table and `feed` what brings
    rows from there, both None for a model without a table. `lookahead` and `ubatch` are the settings in use, `pace`
    what was measured for ubatch auto, else None. `no_text` says why there is no tokenizer, None where there is one.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        table: str | os.PathLike[str] | TableSpec | None = None,
        lazy_mode: str | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        load_format: str = "auto",
        layers: int | None = None,
        weights: str | None = None,
        trunk: str | None = None,
        lookahead: int | None = None,
        ubatch: int | str | None = None,
        parallel: int | None = None,
        mixed: int | None = None,
        batch_invariant: bool | None = None,
        kv_pages: int | str | None = None,
        prefix_reuse: bool | None = None,
        poison_state: bool | None = None,
        before_loading: Callable[[Self], object] | None = None,
        progress: Callable[[int, int], None] | None = None,
        **table_options: Unpack[TableOptions],
    ) -> None:
        """Load a model from a folder of safetensors or a GGUF file, and open its table.

        `table` is where the table lies, if not in the same checkpoint. `device` is cpu or cuda, by default cuda if
        there is one; `dtype` float32, bfloat16 or float16, by default float32 on the CPU and the checkpoint's own on
        cuda. `load_format` dummy reads no weights and takes random ones, of the first `layers` layers if that is given.
        `lazy_mode`, `lookahead`, `ubatch`, `parallel`, `weights`, `trunk` and the other options are settings, which
        come from the environment where they are None; docs/settings.md lists them. `before_loading` is called with this
        object when all but its weights is known, for calls of `check` and `text`, so that what is wrong with a prompt
        is said without waiting for them. `progress` is called with the bytes loaded and all there are.

        Raises ModelError for a checkpoint that can't be used, or a table that is not the model's; NeverFits where
        memory does not suffice; SettingError for a setting that is malformed or would be ignored; Unsupported for a
        device that is not there; and what `lazyio.open_table` raises. Whatever it raises, nothing is left open.
        """
        self.path = os.fspath(model)
        self.device = device_of(device)
        self.lookahead: int = settings.resolve("lookahead", lookahead)
        self.ubatch: int | None = settings.resolve("ubatch", ubatch)
        self.parallel: int = settings.resolve("parallel", parallel)
        settings.check_lanes(parallel, mixed)
        self.batch_invariant: bool = settings.resolve("batch_invariant", batch_invariant)
        kv = KvOptions.resolve(kv_pages, prefix_reuse, poison_state)
        self.table: LazyTable | None = None
        self.feed: Feed | None = None
        self.pace: MeasuredPace | None = None
        source = open_source(self.path)
        self.architecture = str(source.config["model_type"]).removesuffix("_text")
        self.dtype = dtype_of(dtype, source.config, self.device)
        shape = outline(source, load_format, layers)
        found = find_rows(shape, self.path, table)
        if found is None:
            given = {"table": table, "lazy_mode": lazy_mode, "lookahead": lookahead, **table_options}
            refuse_ignored(self.path, given)
        self._check_auto(ubatch, has_table=found is not None)
        self.limits = self._limits_of(settings.resolve("mixed", mixed))
        self._text, self.no_text = _open_text(self.path, shape.vocab)
        self._vocab, self._max_tokens = shape.vocab, shape.max_tokens
        self.trunk = plan_weights(source, shape, self.device, self.dtype, load_format, weights, trunk)
        check_room(self.trunk)  # before a table is loaded, which takes minutes
        kv.check(self.trunk)
        self._fits_ever: Callable[[int], None] = lambda tokens: kv.fits_ever(self.trunk, tokens, self.parallel)
        if before_loading is not None:
            before_loading(self)
        with ExitStack() as stack:
            if found is not None:
                self.table = open_beside(found[0], self.trunk, lazy_mode, table_options)
                stack.callback(self.table.close)
            self.model = load_model(self.trunk, progress=progress)
            if self.table is not None and found is not None:
                rows = DeviceTable(self.table, self.device, self.dtype, timed=True)
                stack.callback(rows.close)
                self.feed = Feed(rows, found[1], self.lookahead)
                self.pace = None if self.ubatch else measure_pace(self.model, self.table, found[1].heads)
            self._forward = BatchInvariant(self.model) if self.batch_invariant else Forward(self.model)
            self.admission = kv.admission(self.model, self.parallel, batch_invariant=self.batch_invariant)
            self._fits_ever = self.admission.fits_ever
            self.scheduler = Scheduler(self._forward, self.feed, self.admission, self.limits, self.parallel)
            stack.callback(self.scheduler.close)
            self._stack = stack.pop_all()

    @property
    def text(self) -> Text:
        """The tokenizer. Raises ModelError where there is none, or one that is not the model's."""
        if self._text is None:
            raise ModelError(self.no_text)
        return self._text

    def logits(self, prompt: Prompt, *, cuts: Sequence[int] | None = None) -> torch.Tensor:
        """Logits after each token of a prompt: float32 [tokens, vocab], on the CPU.

        `cuts` are the tokens of each ubatch, in place of those that the setting `ubatch` gives. Raises PromptError for
        a prompt that can't be served, NeverFits where memory does not suffice, NoRoom where replies that go on hold too
        many of its pages, SettingError for cuts of another prompt.
        """
        tokens = token_ids(prompt, lambda: self.text, self._vocab)
        check_length(len(tokens), 0, self._max_tokens)
        cuts = self.cuts(len(tokens)) if cuts is None else _checked_cuts(cuts, len(tokens))
        size = 4 * len(tokens) * self.model.vocab
        check_memory(size, f"the logits of {len(tokens)} tokens", torch.device("cpu"), "give a shorter prompt")
        return self.scheduler.apart(len(tokens), lambda state: self._all_logits(state, tokens, cuts))

    def check(self, prompt: Prompt, *, max_tokens: int = 128, stop: str | int | Sequence[str | int] = ()) -> None:
        """Raise what `generate` raises for these arguments before anything runs, as far as it shows by now.

        Before weights are loaded nobody knows what pages there will be room for.
        """
        tokens, *_ = self._checked(prompt, max_tokens, stop)
        self._fits_ever(len(tokens) + max_tokens)

    def reply(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: str | int | Sequence[str | int] = (),
    ) -> Reply:
        """A reply to one prompt, generated while it is iterated over. `generate` has the arguments and errors.

        It takes its place in the queue now, and the rows that its prompt begins with are asked for.
        """
        request = self._request(self._plan(prompt, max_tokens, stop), sampling or Sampling())
        self.scheduler.add(request)
        return Reply(self.scheduler, request)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | int | Sequence[str | int] = (),
        raise_errors: bool = True,
    ) -> list[Completion]:
        """Replies to one prompt or many, in their order, up to `parallel` of them computed at once.

        A prompt is text, as it is; token ids; or messages {"role": ..., "content": ...}, to which the model's chat
        template is applied. A reply ends after `max_tokens` tokens, at a stop id of the model or of `stop`, or where a
        string of `stop` begins. `Sampling` has the other arguments; each prompt is sampled from the same seed.

        Raises, before anything runs, PromptError for a prompt that is empty, has ids beyond the vocabulary or goes with
        its reply beyond the model's context; ModelError for text where there is no tokenizer; SettingError for an
        argument out of range; NeverFits where memory does not suffice. Later, ReadError for rows that can't be read,
        and ModelError for weights whose logits are no finite numbers; without `raise_errors` it is only the completion
        of such a prompt that has the error, and the others are whole.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, seed)
        plans = [self._plan(prompt, max_tokens, stop) for prompt in each_prompt(prompts)]
        requests = [self._request(plan, sampling) for plan in plans]
        self._serve(requests, raise_errors=raise_errors)
        return [Completion.of(request) for request in requests]

    def cuts(self, tokens: int) -> list[int]:
        """The sizes of the ubatches that a prompt of so many tokens is cut into."""
        if self.ubatch is not None:
            return fixed_cuts(tokens, self.ubatch)
        assert self.pace is not None
        return self.pace.cuts(tokens, _DEFAULT_UBATCH)

    def summary(self) -> str:
        """One line: the model, where its weights are, its table and how that is read."""
        trunk = f"{self.architecture}, {self.trunk} on {self.device}"
        ubatch = "auto" if self.ubatch is None else self.ubatch
        lanes = f", parallel {self.parallel}" if self.parallel > 1 else ""
        lanes += ", batch-invariant" if self.batch_invariant else ""
        if self.table is None:
            return f"{trunk}; no table; ubatch {ubatch}{lanes}"
        spec, backend = self.table.spec, self.table.backend
        pace = "" if self.pace is None else f", planned for {self.pace}"
        return (
            f"{trunk}; table {spec.tensor}, {format_bytes(spec.table_bytes)} of {spec.dtype}, {describe(backend)} "
            f"({backend.why}); lookahead {self.lookahead}, ubatch {ubatch}{pace}{lanes}"
        )

    def close(self) -> None:
        """Close the table, and give back what feeds the device. Harmless when done twice."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all_logits(self, state: State, tokens: Sequence[int], cuts: Sequence[int]) -> torch.Tensor:
        logits = torch.empty(len(tokens), self.model.vocab)
        done = 0
        with closing(TokenSequence(self._forward, self.feed, state).prefill(tokens, cuts)) as ubatches:
            for hidden in ubatches:
                for start in range(0, len(hidden), _LOGITS_TOKENS):
                    part = hidden[start : start + _LOGITS_TOKENS]
                    logits[done : done + len(part)] = self._forward.logits(part)
                    done += len(part)
        return logits

    def _plan(self, prompt: Prompt, max_tokens: int, stop: str | int | Sequence[str | int]) -> Plan:
        tokens, strings, ids = self._checked(prompt, max_tokens, stop)
        return Plan(tokens, self.cuts(len(tokens)), max_tokens, ids, strings)

    def _checked(
        self, prompt: Prompt, max_tokens: int, stop: str | int | Sequence[str | int]
    ) -> tuple[list[int], list[str], frozenset[int]]:
        """The tokens of a prompt, and the strings and ids that end its reply. Needs no weights."""
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise SettingError(f"max_tokens is {max_tokens!r}; it must be an integer, 1 or more")
        tokens = token_ids(prompt, lambda: self.text, self._vocab)
        check_length(len(tokens), max_tokens, self._max_tokens)
        return tokens, *self._stops((stop,) if isinstance(stop, str | int) else stop)

    def _serve(self, requests: Sequence[Request], *, raise_errors: bool) -> None:
        try:
            for request in requests:
                self.scheduler.add(request)
            for request in requests:
                while not request.ended:
                    self.scheduler.step()
                    error = next((each.error for each in requests if each.error is not None), None)
                    if error is not None and raise_errors:
                        raise error
        finally:
            for request in requests:
                self.scheduler.cancel(request)

    def _request(self, plan: Plan, sampling: Sampling) -> Request:
        meter = Meter(len(plan.tokens), self.table, on_cuda=self.device.type == "cuda")
        return Request(plan, Sampler(sampling, self.model.vocab), Writing(plan, self._text), meter)

    def _limits_of(self, mixed: int) -> Limits:
        """Tokens of prompts in a ubatch. Raises SettingError for cuts that a batch would leave its mark in."""
        limits = Limits(self.ubatch or _DEFAULT_UBATCH, min(mixed, self.ubatch or _DEFAULT_UBATCH))
        sizes = (limits.ubatch, limits.mixed) if self.parallel > 1 else (limits.ubatch,)
        if self.batch_invariant and (self.ubatch is None or any(size % BLOCK for size in sizes)):
            ubatch = "auto" if self.ubatch is None else self.ubatch
            raise SettingError(
                f"batch_invariant needs cuts at multiples of {BLOCK} tokens; ubatch is {ubatch} and mixed {mixed}: "
                "give multiples of that"
            )
        return limits

    def _stops(self, stop: Sequence[str | int]) -> tuple[list[str], frozenset[int]]:
        strings = [each for each in stop if isinstance(each, str)]
        ids = [each for each in stop if not isinstance(each, str)]
        wrong = [each for each in ids if not isinstance(each, int) or not 0 <= each < self._vocab]
        if wrong or "" in strings:
            raise SettingError(
                f"stop has {repr(wrong[0]) if wrong else 'an empty string'}; it is strings that are not empty, and "
                f"token ids from 0 to {self._vocab - 1}"
            )
        own = self.text.stop_ids if strings or self._text is not None else frozenset()
        return strings, own.union(ids)

    def _check_auto(self, ubatch: int | str | None, *, has_table: bool) -> None:
        """Planned cuts hide reads behind computing. Without either there is nothing to plan, and cuts are fixed."""
        if self.ubatch is not None or (has_table and self.lookahead):
            return
        if ubatch is not None:
            reason = "lookahead is 0" if has_table else f"the model of {self.path} has no table"
            raise SettingError(f"ubatch auto has no effect where {reason}: leave it out, or give a number of tokens")
        self.ubatch = _DEFAULT_UBATCH


def _open_text(path: str, vocab: int) -> tuple[Text | None, str | None]:
    """The tokenizer, or why there is none that could be used."""
    try:
        text = open_text(path)
        text.check(vocab)
    except ModelError as error:
        return None, str(error)
    return text, None


def _checked_cuts(cuts: Sequence[int], tokens: int) -> list[int]:
    if min(cuts, default=0) < 1 or sum(cuts) != tokens:
        raise SettingError(
            f"cuts are {list(cuts)}; they must be 1 or more, and sum to the {tokens} tokens of the prompt"
        )
    return list(cuts)
