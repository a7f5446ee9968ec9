"""Shapes of models with other windows than transformers gives them."""

from dataclasses import replace


def with_windows(shape, windows):
    """A shape of so many layers, with these windows."""
    layers = tuple(replace(n, window=w) for n, w in zip(shape.layers, windows, strict=False))
    return replace(shape, layers=layers)
