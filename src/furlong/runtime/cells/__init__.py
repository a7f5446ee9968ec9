"""A stage of a chunk while it computes: its rows, its inputs, what it keeps alive, its loss."""
