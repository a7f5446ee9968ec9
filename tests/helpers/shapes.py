"""Shapes of models, from values of a config.json or with other attention windows."""

from dataclasses import replace

from transformers import AutoConfig

from furlong.models.describe import describe


def shape_of_values(values):
    """Return the shape of a model with these values in its config.json."""
    return describe(AutoConfig.for_model(**values))


def with_windows(shape, windows):
    """Return a shape with one layer per window, and these windows."""
    layers = tuple(replace(n, window=w) for n, w in zip(shape.layers, windows, strict=False))
    return replace(shape, layers=layers)
