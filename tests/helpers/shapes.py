"""Shapes of models of some values, also with other windows than transformers gives them."""

from dataclasses import replace

from transformers import AutoConfig

from furlong.models.describe import describe


def shape_of_values(values):
    """The shape of the values of a config.json."""
    return describe(AutoConfig.for_model(**values))


def with_windows(shape, windows):
    """A shape of so many layers, with these windows."""
    layers = tuple(replace(n, window=w) for n, w in zip(shape.layers, windows, strict=False))
    return replace(shape, layers=layers)
