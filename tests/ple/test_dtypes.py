from __future__ import annotations

import pytest
from gguf import GGML_QUANT_SIZES

from lazyio.errors import TableError
from lazyio.ple.dtypes import GGUF_TYPES, TYPES


def test_gguf_types_are_those_of_the_gguf_package() -> None:
    ours = {number: (stored.name, stored.block_values, stored.block_bytes) for number, stored in GGUF_TYPES.items()}
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    # Either side may know types that the other does not yet.
    both = ours.keys() & theirs.keys()
    assert {number: ours[number] for number in both} == {number: theirs[number] for number in both}
    assert len(both) >= 30


@pytest.mark.parametrize(("name", "row_bytes"), [("Q8_0", 170), ("IQ4_NL", 90), ("BF16", 320), ("F8_E4M3", 160)])
def test_row_of_160_values(name: str, row_bytes: int) -> None:
    assert TYPES[name].row_bytes(160) == row_bytes
    assert TYPES[name].row_values(row_bytes) == 160


def test_a_part_of_a_block_is_refused() -> None:
    with pytest.raises(TableError, match="160 values is no whole number of Q4_K blocks, which hold 256"):
        TYPES["Q4_K"].row_bytes(160)
    with pytest.raises(TableError, match="91 bytes is no whole number of IQ4_NL blocks, which take 18"):
        TYPES["IQ4_NL"].row_values(91)
