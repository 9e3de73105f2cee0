"""Keys, values and states of all sequences in pages of one pool: see docs/kv.md."""
