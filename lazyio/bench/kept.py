"""What was measured, in a file from the first run on: whoever stops a measurement has what it had."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class KeptJson:
    """The file of `--json`, written after each run; `path` None is no file.

    What is no regular file, such as a pipe, and a file in a folder where none can be made, is written to once, at the
    end. Methods raise OSError.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._written = path, False
        regular = path is not None and (path.is_file() or not path.exists())
        self._replaced = path is not None and regular and os.access(path.resolve().parent, os.W_OK)

    def write(self, document: Mapping[str, Any], *, last: bool = False) -> None:
        """Write all that there is by now; with `last`, there will be no more."""
        if self._path is not None and self._replaced:
            write_whole(self._path, document)
            self._written = True
        elif self._path is not None and last:
            self._path.write_text(_text(document))

    def void(self) -> None:
        """Remove what was written: it is no result."""
        if self._path is not None and self._written:
            self._path.unlink(missing_ok=True)


def write_whole(path: Path, document: Mapping[str, Any]) -> None:
    """Write a file whole or not at all, wherever this is interrupted. Raises OSError."""
    path = path.resolve()
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(_text(document))
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1) + "\n"
