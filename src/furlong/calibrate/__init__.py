"""Measure a machine with the real executor, and fit the cost model to the results."""
