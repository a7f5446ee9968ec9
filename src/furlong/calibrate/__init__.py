"""Measures a machine with the real executor, and fits the cost model to what it found."""
