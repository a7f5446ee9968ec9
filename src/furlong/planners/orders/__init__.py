"""The order in which every rank runs the forwards and backwards of its chunks."""
