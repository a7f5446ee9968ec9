"""Sizes of a model, read from its config.json or known by name."""
