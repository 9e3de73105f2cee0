"""An embedding whose weight stays on disk."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import nn

from lazyio.engine.device_table import DeviceTable
from lazyio.errors import RowIndexError, TableError
from lazyio.gate import TableStats
from lazyio.table import LazyTable


class LazyEmbedding(nn.Module):
    """What `nn.Embedding(rows, width)` gives, its rows read from a table when they are asked for.

    It has no parameters, is moved and converted like any module, and gives values on the device and in the dtype that
    it has then. Deep copies share one table, which is closed with `close`, at the end of a with block, or when the last
    of them is forgotten. Values have no gradient. `scale`, if any, multiplies them, rounded to their dtype first.

    Raises TableError where the table's rows are too few, or not `width` values long.
    """

    _like: torch.Tensor

    def __init__(
        self,
        table: LazyTable,
        rows: int,
        width: int,
        *,
        scale: float | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if table.row_values != width or table.n_rows < rows:
            raise TableError(
                f"{table.spec.path}: {table.spec.tensor} has {table.n_rows} rows of {table.row_values} values; the "
                f"model's embedding has {rows} of {width}"
            )
        self.rows, self.width, self.scale = rows, width, scale
        # Modules are moved and converted by their tensors; this one tells where to and what to.
        self.register_buffer("_like", torch.empty(0, device=device, dtype=dtype), persistent=False)
        self._opened = _Opened(table)

    @property
    def table(self) -> LazyTable:
        """The table that rows come from."""
        return self._opened.table

    @property
    def weight(self) -> torch.Tensor:
        """A tensor [rows, width] without data, for code that asks an embedding for its shape and dtype."""
        return torch.empty(self.rows, self.width, dtype=self._like.dtype, device="meta")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Values of rows `ids`, integers of any shape on any device: [*ids.shape, width].

        Ids are brought to the host, which waits for them. Raises RowIndexError for ids outside 0 to rows - 1, ReadError
        where reading fails, TableError once the table is closed.
        """
        asked = ids.detach().cpu().numpy()
        if asked.size and self.rows < self.table.n_rows and asked.max() >= self.rows:
            raise RowIndexError(f"row {asked.max()} is outside the embedding, which has rows 0 to {self.rows - 1}")
        values = self._opened.values(asked, self._like.device, self._like.dtype)
        return values if self.scale is None else values * torch.tensor(self.scale).to(values.dtype).item()

    def stats(self) -> TableStats:
        """Counts since the table was opened."""
        return self.table.stats()

    def close(self) -> None:
        """Close the table, for all copies. Harmless when done twice."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def extra_repr(self) -> str:
        """What printing a model shows."""
        return f"{self.rows}, {self.width}, {self.table!r}"


class _Opened:
    """A table, and its ways to the devices that values were asked for on. Copies of a model share it."""

    def __init__(self, table: LazyTable) -> None:
        self.table = table
        self._ways: dict[tuple[torch.device, torch.dtype], DeviceTable] = {}
        self._turn = threading.Lock()  # a way is for one thread at a time
        self.close = weakref.finalize(self, _close, self._turn, self._ways, table)

    def values(self, ids: NDArray[Any], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Those of rows `ids`."""
        with self._turn:
            if not self.close.alive:
                raise TableError(
                    f"the table of this model is closed: {self.table.spec.tensor} of {self.table.spec.path}"
                )
            if (device, dtype) not in self._ways:
                self._ways[device, dtype] = DeviceTable(self.table, device, dtype)
            return self._ways[device, dtype].gather(ids)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(f"an open table can't be pickled: {self.table!r}")


def _close(turn: threading.Lock, ways: dict[Any, DeviceTable], table: LazyTable) -> None:
    with turn:
        while ways:
            ways.popitem()[1].close()
        table.close()
