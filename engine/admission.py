"""Who gets a lane: what a sequence carries must have room for its prompt and its reply before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from lazyio.engine.models.base import Model
from lazyio.engine.place import check_memory, check_state
from lazyio.engine.state import State
from lazyio.errors import NeverFits, NoRoom
from lazyio.fetchers.base import Int64


class Seat(Protocol):
    """What a seated sequence holds until it is released."""

    @property
    def state(self) -> State:
        """Its state, with room for all of its tokens."""
        ...

    @property
    def known(self) -> int:
        """So many tokens of its prompt need not be computed: the state is the one after them."""
        ...

    @property
    def marks(self) -> tuple[int, ...]:
        """Positions of its prompt, ascending, at which a ubatch is to end, and then `Admission.mark` to be called."""
        ...


class Admission(Protocol):
    """Gives sequences what they need for their whole length, or has them wait for it."""

    def fits_ever(self, tokens: int) -> None:
        """Raise NeverFits where a sequence of so many tokens would have no room even by itself."""
        ...

    def seat(self, prompt: Int64, max_tokens: int) -> Seat:
        """Room for a prompt and the longest reply. Raises NoRoom where others must go first."""
        ...

    def apart(self, tokens: int) -> Seat:
        """Room for a sequence of so many tokens that takes no lane, of which nothing is known or marked.

        Raises NoRoom where others must go first, NeverFits where it would have none even by itself.
        """
        ...

    def mark(self, seat: Seat, tokens: Sequence[int]) -> None:
        """The state of a sequence is now the one after these tokens, up to one of its marks."""
        ...

    def release(self, seat: Seat, tokens: Sequence[int] | None = None) -> None:
        """Take it back. Its state is that of as many of `tokens` as it counts; without them, nobody knows whose."""
        ...

    def clear(self) -> None:
        """Begin afresh: take all seats back, though one of these calls was interrupted somewhere in the middle."""
        ...


class Window:
    """A seat with a contiguous window in every layer."""

    known = 0
    marks = ()

    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def state(self) -> State:
        """See `Seat`."""
        return self._state


def check_lanes(
    each_bytes: int,
    tokens: int,
    parallel: int,
    device: torch.device,
    *,
    held_bytes: int = 0,
    weights_bytes: int = 0,
) -> None:
    """Raise NeverFits where memory is too little for windows of so many tokens and bytes in every lane.

    `held_bytes` and `weights_bytes` are as `check_memory` has them.
    """
    what, advice = f"the state of a sequence of {tokens} tokens", "shorten the prompt, or lower max_tokens"
    if parallel > 1:
        what = f"the state of {parallel} sequences of {tokens} tokens, one for each lane of parallel {parallel},"
        advice = f"lower parallel, {advice}"
    needed = each_bytes * parallel
    check_memory(needed, what, device, advice, held_bytes=held_bytes, weights_bytes=weights_bytes)


class Windows:
    """A contiguous window a lane, made when it is taken. Each of `parallel` lanes may rely on its share of memory."""

    def __init__(self, model: Model, parallel: int) -> None:
        self._model, self._parallel = model, parallel
        self._taken: dict[Window, int] = {}  # bytes
        self._sizes: dict[int, int] = {}  # bytes, by tokens: telling takes a while

    def __len__(self) -> int:
        return len(self._taken)

    def fits_ever(self, tokens: int) -> None:
        """See `Admission`: so many sequences of that length must fit as there are lanes."""
        held = sum(self._taken.values())
        check_lanes(self._bytes(tokens), tokens, self._parallel, self._model.device, held_bytes=held)

    def seat(self, prompt: Int64, max_tokens: int) -> Window:
        """See `Admission`. Raises NeverFits where memory is too little though nobody is seated."""
        tokens = len(prompt) + max_tokens
        if len(self._taken) == self._parallel:
            raise NoRoom(f"all {self._parallel} lanes are taken: wait for one, or raise parallel")
        needed = self._bytes(tokens)
        try:
            what = f"the state of a sequence of {tokens} tokens"
            check_memory(needed, what, self._model.device, "shorten the prompt, or lower max_tokens")
        except NeverFits as error:
            if not self._taken:
                raise
            raise NoRoom(str(error)) from error
        window = Window(self._model.new_state(tokens))
        self._taken[window] = needed
        return window

    def apart(self, tokens: int) -> Window:
        """See `Admission`. Raises NeverFits where memory is too little, whoever has the rest."""
        check_state(self._model, tokens)
        return Window(self._model.new_state(tokens))

    def mark(self, seat: Seat, tokens: Sequence[int]) -> None:
        """See `Admission`. There are no marks."""

    def release(self, seat: Seat, tokens: Sequence[int] | None = None) -> None:
        """See `Admission`."""
        assert isinstance(seat, Window)
        self._taken.pop(seat, None)  # what was apart is not there

    def clear(self) -> None:
        """See `Admission`."""
        self._taken.clear()

    def _bytes(self, tokens: int) -> int:
        if tokens not in self._sizes:
            self._sizes[tokens] = self._model.new_state(tokens, torch.device("meta")).nbytes
        return self._sizes[tokens]
