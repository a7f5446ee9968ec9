"""Seconds of a plan: FLOPs, rates, and what waits for a link."""
