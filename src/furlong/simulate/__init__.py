"""The simulator: a plan on the clock of a cost model, and what its timeline amounts to."""
