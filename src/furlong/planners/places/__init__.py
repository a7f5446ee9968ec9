"""Whole sequences on places of one pool: which processes, and in which micro-batch."""
