"""The cost of a plan: FLOPs, bytes and seconds of its actions, from plain numbers."""
