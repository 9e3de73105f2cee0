from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

Stored = tuple[str, list[int], bytes]  # dtype, shape, data
WriteSafetensors = Callable[[Path, Mapping[str, Stored]], None]


@pytest.fixture(scope="session")
def write_safetensors() -> WriteSafetensors:
    """Writes a safetensors file of tensors of any dtype, one after the other in the order given."""

    def write(path: Path, tensors: Mapping[str, Stored]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        data = b""
        for name, (dtype, shape, content) in tensors.items():
            offsets = [len(data), len(data) + len(content)]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            data += content
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)

    return write
