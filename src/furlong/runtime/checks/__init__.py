"""The start-up self-check of a model in chunks, and of what surrounds a call."""
