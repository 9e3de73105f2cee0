"""Tables made from nothing, for tests and measurements: true formats, any number of rows, checkable bytes."""

from lazyio.ple.synthetic.gguf import write_gguf
from lazyio.ple.synthetic.pattern import expected_rows, row_bytes_of
from lazyio.ple.synthetic.safetensors import write_safetensors

__all__ = ["expected_rows", "row_bytes_of", "write_gguf", "write_safetensors"]
