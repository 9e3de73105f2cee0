"""Models made from nothing, for tests and measurements: true formats, random weights, a table, a real tokenizer."""

from lazyio.engine.synthetic.folder import write_folder
from lazyio.engine.synthetic.gguf import write_gguf
from lazyio.engine.synthetic.plan import Plan, plan_model

__all__ = ["Plan", "plan_model", "write_folder", "write_gguf"]
