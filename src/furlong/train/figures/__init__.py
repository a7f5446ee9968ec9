"""Figures of a run: printed, logged and reported."""
