"""Bytes of a plan: what is alive while each action runs, in every tier."""
