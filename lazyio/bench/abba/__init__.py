"""Whole commands compared: in turns, a fresh process each, their outputs held against each other; docs/abba.md."""
