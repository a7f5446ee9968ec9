"""Planners of chunks: they say which tokens share one, and which sequences share a replica."""
