from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_logits_are_those_of_transformers(tiny: Callable[[str], Any], check_logits: Callable[[Any], None]):
    check_logits(tiny("qwen3_5"))
