"""Per-layer embedding tables: where their rows lie, which rows a token needs, and what the bytes mean."""
