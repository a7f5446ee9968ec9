"""Chunk attention and the tiled loss: the two computations furlong does in its own way."""
