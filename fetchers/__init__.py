"""Fetchers: how the rows of a table get from files into memory."""

from lazyio.fetchers.base import (
    Alignment,
    Extent,
    Fetcher,
    FetcherOptions,
    Pending,
    ReadPlan,
    ReadStats,
    RowFetcher,
)
from lazyio.fetchers.registry import available, load

__all__ = [
    "Alignment",
    "Extent",
    "Fetcher",
    "FetcherOptions",
    "Pending",
    "ReadPlan",
    "ReadStats",
    "RowFetcher",
    "available",
    "load",
]
