"""Rows of per-layer embedding tables, read from disk as fast as the device allows.

`open_table(path)` finds the table of a model file, `table.gather(ids)` reads its rows. docs/structure.md tells how.
"""

from lazyio.errors import (
    Cancelled,
    LazyIOError,
    ModelError,
    NetworkFilesystemWarning,
    NeverFits,
    NoRoom,
    NotCold,
    PromptError,
    ReadError,
    RowIndexError,
    RunsDifferError,
    SettingError,
    TableError,
    Unsupported,
)
from lazyio.gate import TableStats
from lazyio.modes import MODES, Backend
from lazyio.ple.cache import CacheStats
from lazyio.ple.cuts import plan_cuts
from lazyio.ple.lookahead import Lookahead
from lazyio.ple.raw import raw_table
from lazyio.ple.rowids import row_ids_of
from lazyio.ple.spec import NgramHash, TableSpec
from lazyio.ple.tables import find_table, find_tables
from lazyio.prefetch import Ticket
from lazyio.started import Started
from lazyio.table import LazyTable, open_table
from lazyio.table_cache import TableCache
from lazyio.version import __version__

__all__ = [
    "MODES",
    "Backend",
    "CacheStats",
    "Cancelled",
    "LazyIOError",
    "LazyTable",
    "Lookahead",
    "ModelError",
    "NetworkFilesystemWarning",
    "NeverFits",
    "NgramHash",
    "NoRoom",
    "NotCold",
    "PromptError",
    "ReadError",
    "RowIndexError",
    "RunsDifferError",
    "SettingError",
    "Started",
    "TableCache",
    "TableError",
    "TableSpec",
    "TableStats",
    "Ticket",
    "Unsupported",
    "__version__",
    "find_table",
    "find_tables",
    "open_table",
    "plan_cuts",
    "raw_table",
    "row_ids_of",
]
