"""The simulator: it runs plans on a cost model as timelines, and computes seconds and bubbles of
timelines."""
