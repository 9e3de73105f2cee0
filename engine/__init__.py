"""Models that run on torch, their tables left on the disk.

`LLM` loads one and generates text; docs/run.md tells how. torch is an optional part of this package: importing this
one without it raises Unsupported, which says how to install it.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from lazyio.errors import Unsupported

if TYPE_CHECKING:
    from lazyio.engine.generate import Completion, Reply
    from lazyio.engine.llm import LLM
    from lazyio.engine.sampling import Sampling

__all__ = ["LLM", "Completion", "Reply", "Sampling"]

_MODULES = {"LLM": "llm", "Completion": "generate", "Reply": "generate", "Sampling": "sampling"}

if importlib.util.find_spec("torch") is None:
    raise Unsupported("models run on torch, which is not installed: pip install 'lazyio[engine]'")


def __getattr__(name: str) -> Any:
    # Imported when they are asked for: parts of the engine are used without the rest of it.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
