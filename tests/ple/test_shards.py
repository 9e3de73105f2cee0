from __future__ import annotations

import struct
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyio.errors import TableError
from lazyio.fetchers.base import Extent
from lazyio.ple.checkpoint import Checkpoint, StoredTensor
from lazyio.ple.shards import build_table, group_shards
from lazyio.ple.spec import NgramHash


class Fake(Checkpoint):
    """Tensors that lie nowhere, except for small ones in a file."""

    path = "model"
    architecture = "made-up"

    def __init__(self, *tensors: StoredTensor) -> None:
        self.tensors = {tensor.name: tensor for tensor in tensors}

    @property
    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def tensor(self, name: str) -> StoredTensor:
        return self.tensors[name]

    def ngram(self, table: str) -> NgramHash | None:
        return None


def shard(number: int | str, offset: int = 0, rows: int = 10, values: int = 4, dtype: str = "BF16", file: str = "f"):
    size = {"BF16": 2, "F8_E4M3": 1, "U32": 4, "I16": 2, "NEW": 3}[dtype]
    return StoredTensor(f"t.shard_{number}.weight", dtype, (rows, values), file, offset, rows * values * size)


def built(*tensors: StoredTensor, table: str = "t.weight"):
    checkpoint = Fake(*tensors)
    return build_table(checkpoint, table, group_shards(checkpoint.names)[table], is_ple=True)


def refusal(*tensors: StoredTensor, table: str = "t.weight") -> str:
    with pytest.raises(TableError) as caught:
        built(*tensors, table=table)
    return str(caught.value)


def test_groups() -> None:
    assert group_shards(["a", "t.shard_10.weight", "t.shard_2.weight", "u.shard_0.weight", "shard_0.weight"]) == {
        "a": ("a",),
        "t.weight": ("t.shard_2.weight", "t.shard_10.weight"),
        "u.weight": ("u.shard_0.weight",),
        "shard_0.weight": ("shard_0.weight",),
    }


def test_a_whole_table_beside_its_shards_wins() -> None:
    assert group_shards(["t.shard_0.weight", "t.weight"]) == {"t.weight": ("t.weight",)}


@given(st.permutations(range(12)))
def test_shards_are_in_the_order_of_their_numbers(order: list[int]) -> None:
    spec = built(*(shard(number, offset=1000 * number) for number in order))
    assert spec.extents == tuple(Extent("f", 1000 * number, 10 * number, 10) for number in range(12))
    assert (spec.tensor, spec.rows, spec.row_values, spec.row_bytes) == ("t.weight", 120, 4, 8)


def test_shards_back_to_back_are_one_extent() -> None:
    spec = built(shard(0, 8), shard(1, 88, rows=5), shard(2, 128), shard(3, 8, file="g"), shard(4, 89, file="g"))
    assert spec.extents == (Extent("f", 8, 0, 25), Extent("g", 8, 25, 10), Extent("g", 89, 35, 10))
    assert spec.rows == 45
    assert len(built(shard(0, 8), shard(1, 88, file="g")).extents) == 2


def test_gaps_and_repeats() -> None:
    assert "has 2 shards here and lacks shard 1" in refusal(shard(0), shard(2))
    assert "lacks shard 0" in refusal(shard(1))
    assert "has shard 1 twice" in refusal(shard(0), shard(1), shard("01"))


@pytest.mark.parametrize("other", [shard(1, values=5), shard(1, values=8, dtype="F8_E4M3"), shard(1, dtype="F8_E4M3")])
def test_shards_that_differ(other: StoredTensor) -> None:
    assert "shards of one table must be alike" in refusal(shard(0), other)


def test_an_unknown_type_is_told_whichever_shard_has_it() -> None:
    odd = "tensor 't.shard_{}.weight' has rows of 4 values of NEW, a type unknown here, unlike 't.shard_{}.weight'"
    assert odd.format(0, 1) in refusal(shard(0, dtype="NEW"), shard(1))
    assert odd.format(1, 0) in refusal(shard(0), shard(1, dtype="NEW"))
    assert "unknown" not in refusal(shard(0), shard(1, values=5))


@pytest.mark.parametrize("shape", [(40,), (2, 5, 4), (0, 4), (10, 0)])
def test_no_table(shape: tuple[int, ...]) -> None:
    message = refusal(StoredTensor("t", "BF16", shape, "f", 0, 80), table="t")
    assert f"'t' has shape {list(shape)}; a table has rows and values" in message


def test_an_unknown_type_has_packed_rows_only() -> None:
    spec = built(shard(0, dtype="NEW"))
    assert (spec.dtype, spec.row_values, spec.row_bytes) == ("NEW", 0, 12)


@pytest.mark.parametrize("size_bytes", [None, 0, 81])
def test_an_unknown_row_width_is_refused(size_bytes: int | None) -> None:
    message = refusal(StoredTensor("t", "type-99", (10, 4), "f", 0, size_bytes), table="t")
    assert "'t' has the type type-99, which is unknown here" in message


def test_unknown_types_of_two_widths() -> None:
    other = StoredTensor("t.shard_1.weight", "NEW", (10, 4), "f", 0, 130)
    assert "rows of other bytes than 't.shard_0.weight'" in refusal(shard(0, dtype="NEW"), other)


def test_a_size_that_contradicts_the_type() -> None:
    message = refusal(StoredTensor("t", "BF16", (10, 4), "f", 0, 120), table="t")
    assert "has 12 bytes a row, which can't be 4 values of BF16" in message


def scale(path: str, dtype: str = "F32", shape: tuple[int, ...] = (1,), size_bytes: int = 4) -> StoredTensor:
    return StoredTensor("t.weight_scale", dtype, shape, path, 3, size_bytes)


def test_the_scale_of_an_fp8_table(tmp_path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"..." + struct.pack("<f", 0.375))
    assert built(shard(0, dtype="F8_E4M3"), scale(str(path))).scale == 0.375
    assert built(shard(0, dtype="F8_E4M3"), scale(str(path), shape=())).scale == 0.375
    assert built(shard(0, dtype="F8_E4M3")).scale is None
    assert built(shard(0), scale(str(path))).scale is None
    path.write_bytes(b"..." + struct.pack("<f", 0.375)[2:])
    assert built(shard(0, dtype="F8_E4M3"), scale(str(path), "BF16", size_bytes=2)).scale == 0.375


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_scale_that_is_none(tmp_path, value: float) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"..." + struct.pack("<f", value))
    assert f"t.weight_scale is {value}, which can't scale" in refusal(shard(0, dtype="F8_E4M3"), scale(str(path)))


def test_scales_of_other_layouts() -> None:
    fp8 = shard(0, dtype="F8_E4M3")
    blocks = StoredTensor("t.weight_scale", "F32", (2, 2), "f", 0, 16)
    assert "F32 [2, 2]; a table is read with one scale" in refusal(fp8, blocks)
    halves = StoredTensor("t.weight_scale", "F16", (1,), "f", 0, 2)
    assert "F16 [1]" in refusal(fp8, halves)
    for name in ("t.weight_scale_inv", "t.shard_0.weight_scale", "t.shard_0.weight_scale_inv"):
        assert f"is scaled by {name}" in refusal(fp8, StoredTensor(name, "F32", (1,), "f", 0, 4))


def test_mlx_tables_are_to_be_interleaved() -> None:
    scales, biases = (StoredTensor(f"t.shard_0.{name}", "BF16", (10, 1), "f", 0, 20) for name in ("scales", "biases"))
    message = refusal(shard(0, dtype="U32"), scales, biases)
    assert "table t.weight is in MLX's group-quantised layout" in message
    assert "python tools/interleave.py model NEW_FOLDER" in message
    assert "with scales and without biases" in refusal(shard(0, dtype="U32"), scales)
