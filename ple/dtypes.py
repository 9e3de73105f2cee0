"""Names and sizes of the types that rows are stored in."""

from __future__ import annotations

from dataclasses import dataclass

from lazyio.errors import TableError


@dataclass(frozen=True, slots=True)
class StoredType:
    """A type that packs `block_values` values into `block_bytes` bytes."""

    name: str
    block_values: int
    block_bytes: int

    def row_bytes(self, row_values: int) -> int:
        """Bytes of a row of so many values. Raises TableError where that is no whole number of blocks."""
        blocks, rest = divmod(row_values, self.block_values)
        if rest:
            raise TableError(
                f"a row of {row_values} values is no whole number of {self.name} blocks, which hold {self.block_values}"
            )
        return blocks * self.block_bytes

    def row_values(self, row_bytes: int) -> int:
        """Values of a row of so many bytes. Raises TableError where that is no whole number of blocks."""
        blocks, rest = divmod(row_bytes, self.block_bytes)
        if rest:
            raise TableError(
                f"a row of {row_bytes} bytes is no whole number of {self.name} blocks, which take {self.block_bytes}"
            )
        return blocks * self.block_values


# id in the file, name, values and bytes of a block. The gguf package has the same facts, but importing it costs more
# than reading a header does; a test compares the two.
_GGUF = (
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 40),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
)

_SAFETENSORS = (
    *(("BOOL", 1), ("U8", 1), ("I8", 1), ("F8_E4M3", 1), ("F8_E5M2", 1), ("F8_E8M0", 1)),
    *(("U16", 2), ("I16", 2), ("F16", 2), ("BF16", 2)),
    *(("U32", 4), ("I32", 4), ("F32", 4)),
    *(("U64", 8), ("I64", 8), ("F64", 8), ("C64", 8)),
)

#: By the id that a GGUF file gives.
GGUF_TYPES = {number: StoredType(name, values, size) for number, name, values, size in _GGUF}

#: By the name that a safetensors file gives.
SAFETENSORS_TYPES = {name: StoredType(name, 1, size) for name, size in _SAFETENSORS}

#: Rows of EXL3's n-gram tables, K bits a value: a scale of 2 bytes, and one ring of 160 values.
EXL3_TYPES = {f"EXL3_K{bits}": StoredType(f"EXL3_K{bits}", 160, 2 + 20 * bits) for bits in range(1, 9)}

#: Rows of MLX's quantised tables, brought together: the values of all groups, then their scales, then their biases;
#: the latter are BF16 unless the name says F16. Sizes are those of a group, though its parts lie apart.
MLX_TYPES = {
    name: StoredType(name, group, group * bits // 8 + 4)
    for bits in (2, 4, 8)
    for group in (32, 64, 128)
    for name in (f"MLX_Q{bits}_G{group}", f"MLX_Q{bits}_G{group}_F16")
}

#: By name, whatever the file.
TYPES = SAFETENSORS_TYPES | {stored.name: stored for stored in GGUF_TYPES.values()} | EXL3_TYPES | MLX_TYPES
