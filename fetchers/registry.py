"""Finding fetchers by name: ours and those that other packages register."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from lazyio.errors import SettingError
from lazyio.fetchers.base import Fetcher

GROUP = "lazyio.fetchers"

# Ours are listed here too, so that a bare checkout on PYTHONPATH, which has no metadata, finds them.
_OURS = {
    "resident": "lazyio.fetchers.resident:ResidentFetcher",
    "mmap": "lazyio.fetchers.mmap:MmapFetcher",
    "pread": "lazyio.fetchers.pread:PreadFetcher",
    "uring": "lazyio.fetchers.uring:UringFetcher",
}


def available() -> dict[str, str]:
    """Names of all registered fetchers and the `module:Class` that each stands for."""
    found = {entry.name: entry.value for entry in entry_points(group=GROUP)}
    return {**found, **_OURS}


def load(name: str) -> type[Fetcher]:
    """Return the fetcher class registered as `name`.

    Raises SettingError for an unknown name, naming those there are, and for one that stands for no fetcher class.
    """
    place = _OURS.get(name) or available().get(name)  # looking for other packages takes a while
    if place is None:
        raise SettingError(f"no fetcher is called {name!r}; there are: {', '.join(sorted(available()))}")
    module, _, attribute = place.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SettingError(f"fetcher {name!r} is registered as {place}, which can't be loaded: {error}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, Fetcher)):
        raise SettingError(f"fetcher {name!r} is registered as {place}, which is not a Fetcher class")
    return loaded
