"""What a sequence carries from one ubatch to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Protocol, Self

import torch

from lazyio.kernels.pages import Entries


class Piece(Protocol):
    """One part of the state, of one layer."""

    def clone(self) -> Self:
        """A copy that shares nothing."""
        ...

    def placed(self, places: Places) -> Any:
        """The same of a sequence that begins, somewhere else."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        ...


class Places(Protocol):
    """Where pieces of the kinds below lie, in the place of memory of their own; `engine/kv` has such places."""

    def growing(self, entries: int, shape: Sequence[int], dtype: torch.dtype) -> Any:
        """In the place of a `Growing` with so many entries."""
        ...

    def sliding(self, reach: int, shape: Sequence[int], dtype: torch.dtype) -> Any:
        """In the place of a `Sliding` that keeps so many entries."""
        ...

    def recent(self, shape: Sequence[int], dtype: torch.dtype) -> Any:
        """In the place of a `Recent` of that shape."""
        ...

    def recurrent(self, shape: Sequence[int], dtype: torch.dtype) -> Any:
        """In the place of a `Recurrent` of that shape."""
        ...


class State:
    """All pieces of one sequence, by the module that keeps them, and how many tokens they stand for."""

    def __init__(self, pieces: dict[Any, Any], capacity: int) -> None:
        self.pieces = pieces
        self.capacity = capacity  # tokens it has room for
        self.tokens = 0

    def clone(self) -> State:
        """A copy that shares nothing: a point of the sequence to come back to."""
        copy = State({module: piece.clone() for module, piece in self.pieces.items()}, self.capacity)
        copy.tokens = self.tokens
        return copy

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(piece.nbytes for piece in self.pieces.values())


class Composite:
    """A piece made of pieces: subclass it with a dataclass whose fields are all of them."""

    def clone(self) -> Self:
        """A copy that shares nothing."""
        return type(self)(*(piece.clone() for piece in self._pieces()))

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(piece.nbytes for piece in self._pieces())

    def placed(self, places: Places) -> Self:
        """The same of a sequence that begins, somewhere else."""
        return type(self)(*(piece.placed(places) for piece in self._pieces()))

    def _pieces(self) -> list[Any]:
        return [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]


class Growing:
    """Entries of all tokens so far: a contiguous window with room for `capacity` of them."""

    def __init__(self, capacity: int, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        self._entries = torch.empty(capacity, *shape, dtype=dtype, device=device)
        self._length = 0

    @staticmethod
    def put_each(kinds: Sequence[Sequence[Growing]], new: Sequence[torch.Tensor], positions: torch.Tensor) -> None:
        """Add entries of several kinds, as keys and values: to one sequence, or one to each of several.

        new [entries, *shape] of each kind. positions int64 [entries], of the tokens, are for what takes the place of
        windows.
        """
        if len(kinds[0]) == 1:
            for (piece,), entries in zip(kinds, new, strict=True):
                piece.append(entries)
            return
        pieces = [piece for kind in kinds for piece in kind]
        full = any(piece._length == len(piece._entries) for piece in pieces)
        assert not full, "a sequence outgrew the capacity of its state"
        places = [piece._entries[piece._length] for piece in pieces]
        torch._foreach_copy_(places, [entry for entries in new for entry in entries.unbind()])
        for piece in pieces:
            piece._length += 1

    def append(self, new: torch.Tensor) -> torch.Tensor:
        """Add the entries [n, *shape] of the next tokens; return those of all tokens, a view."""
        end = self._length + len(new)
        assert end <= len(self._entries), "a sequence outgrew the capacity of its state"
        self._entries[self._length : end] = new
        self._length = end
        return self._entries[:end]

    @property
    def entries(self) -> torch.Tensor:
        """Those of all tokens so far, a view."""
        return self._entries[: self._length]

    @property
    def lie(self) -> Entries:
        """The same for a kernel, which takes them where they lie."""
        return self.entries

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._entries.nbytes

    def placed(self, places: Places) -> Any:
        """The same of a sequence that begins, somewhere else."""
        return places.growing(len(self._entries), self._entries.shape[1:], self._entries.dtype)

    def clone(self) -> Self:
        """A copy that shares nothing."""
        copy = type(self).__new__(type(self))
        copy._entries, copy._length = self._entries.clone(), self._length
        return copy


class Sliding:
    """Entries of the last `window` - 1 tokens: what attention with a window reaches back to.

    They lie in a buffer with room for two windows, so that a step of decoding writes one entry and moves the others
    to the front only once a window.
    """

    def __init__(self, window: int, capacity: int, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        self._reach = window - 1
        self._entries = torch.empty(min(2 * window, capacity), *shape, dtype=dtype, device=device)
        self._length = 0

    def append(self, new: torch.Tensor) -> torch.Tensor:
        """Add the entries [n, *shape] of the next tokens; return them behind those that the first of them reaches.

        That is [min(window - 1, tokens before) + n, *shape], valid until the next call.
        """
        before = self._entries[max(0, self._length - self._reach) : self._length]
        end = self._length + len(new)
        if end > len(self._entries):
            joined = torch.cat([before, new])
            self._keep(joined[max(0, len(joined) - self._reach) :])
            return joined
        self._entries[self._length : end] = new
        start, self._length = self._length - len(before), end
        return self._entries[start:end]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._entries.nbytes

    def placed(self, places: Places) -> Any:
        """The same of a sequence that begins, somewhere else."""
        return places.sliding(self._reach, self._entries.shape[1:], self._entries.dtype)

    def clone(self) -> Self:
        """A copy that shares nothing."""
        copy = type(self).__new__(type(self))
        copy._reach, copy._length = self._reach, self._length
        copy._entries = self._entries.clone()
        return copy

    def _keep(self, entries: torch.Tensor) -> None:
        self._entries[: len(entries)] = entries
        self._length = len(entries)


class Recent:
    """Entries of the last `count` tokens, zeros before the start: what a causal convolution reaches back to."""

    def __init__(self, count: int, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        self._entries = torch.zeros(count, *shape, dtype=dtype, device=device)

    @classmethod
    def at(cls, entries: torch.Tensor) -> Self:
        """The same in given memory, which has what came before."""
        piece = cls.__new__(cls)
        piece._entries = entries
        return piece

    def extend(self, new: torch.Tensor) -> torch.Tensor:
        """Those entries with the new ones [n, *shape] behind them, [count + n, *shape]; the last `count` are kept."""
        joined = torch.cat([self._entries, new])
        self._entries.copy_(joined[len(new) :])
        return joined

    @staticmethod
    def extend_each(pieces: Sequence[Recent], new: torch.Tensor) -> torch.Tensor:
        """`extend` for several sequences, as many tokens of each: [sequences, count + n, *shape] of new [.., n, ..].

        A step of many sequences costs as many launches as one of a few.
        """
        if len(pieces) == 1:
            return pieces[0].extend(new[0])[None]
        joined = torch.cat([torch.stack([piece._entries for piece in pieces]), new], 1)
        torch._foreach_copy_([piece._entries for piece in pieces], list(joined[:, new.shape[1] :].unbind()))
        return joined

    @property
    def entries(self) -> torch.Tensor:
        """Those of the last `count` tokens, [count, *shape], for whoever moves them on in place."""
        return self._entries

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._entries.nbytes

    def placed(self, places: Places) -> Any:
        """The same of a sequence that begins, somewhere else."""
        return places.recent(self._entries.shape, self._entries.dtype)

    def clone(self) -> Self:
        """A copy that shares nothing."""
        copy = type(self).__new__(type(self))
        copy._entries = self._entries.clone()
        return copy


class Recurrent:
    """A tensor that each ubatch replaces, zeros at the start."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        self.value = torch.zeros(*shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.value.nbytes

    def placed(self, places: Places) -> Any:
        """The same of a sequence that begins, somewhere else."""
        return places.recurrent(self.value.shape, self.value.dtype)

    def clone(self) -> Self:
        """A copy that shares nothing."""
        copy = type(self).__new__(type(self))
        copy.value = self.value.clone()
        return copy
