"""Chunk attention and the tiled loss, the two computations that furlong replaces."""
