"""Models that run on torch, their tables left on the disk."""
