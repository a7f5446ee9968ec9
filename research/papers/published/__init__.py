"""The fastest plan over all methods and layouts: candidates, bounds, simulation."""
