"""Proof on the user's own configuration, shrunk: gradients, isolation, accumulation, resume."""
