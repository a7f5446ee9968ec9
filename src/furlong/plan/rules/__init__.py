"""Invariants of a plan: of its chunks, of stored K,V, between ranks; others in `plan.check`."""
