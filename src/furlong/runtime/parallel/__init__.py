"""Several processes: how one of them exchanges with the others."""
