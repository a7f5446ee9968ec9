"""Pictures, traces and tables of timelines, simulated or measured."""
