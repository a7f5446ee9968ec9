"""The cost of a plan: FLOPs, bytes and seconds of its actions (passes, messages, collectives)."""
