"""Figures that were measured on this machine, in the place of those of a data sheet."""
