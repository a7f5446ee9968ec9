"""The simulator: timelines of plans on a cost model, and figures of timelines."""
