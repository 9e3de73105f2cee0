"""What `lazyio.engine` offers, and what it says without torch."""

import subprocess
import sys

import pytest

import lazyio.engine


def test_public_names() -> None:
    assert lazyio.engine.__all__ == ["LLM", "Completion", "Reply", "Sampling"]
    assert all(getattr(lazyio.engine, name).__name__ == name for name in lazyio.engine.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = lazyio.engine.Llm  # type: ignore[attr-defined]


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from lazyio.errors import Unsupported
try:
    import lazyio.engine
except Unsupported as error:
    print(error)
"""


def test_without_torch_it_says_how_to_install_it() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True)
    assert done.stdout == "models run on torch, which is not installed: pip install 'lazyio[engine]'\n"
