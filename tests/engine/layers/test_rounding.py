from __future__ import annotations

import pytest
import torch

from lazyio.engine.layers.rounding import rounded


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.bfloat16, 39.25), (torch.float16, 39.1875), (torch.float32, 39.191837310791016)]
)
def test_a_factor_is_the_next_number_of_the_dtype(dtype: torch.dtype, expected: float):
    assert rounded(1536**0.5, dtype) == expected


def test_it_is_a_number_whatever_the_default_device():
    with torch.device("meta"):
        assert rounded(0.3, torch.bfloat16) == 0.30078125
