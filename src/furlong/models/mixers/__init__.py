"""Layers that remember earlier tokens in a state: found, called slice by slice, checked alone."""
