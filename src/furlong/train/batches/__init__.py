"""A global batch: its plan, its draw, its engines on all processes, its chunks that fit."""
