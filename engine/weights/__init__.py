"""Checkpoints of a model: what they hold, and its way into parameters."""
