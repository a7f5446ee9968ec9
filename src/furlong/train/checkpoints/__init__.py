"""The state of a run on disk: saved, found again, exported."""
