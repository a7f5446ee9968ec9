"""Several processes: mesh, sharded weights, messages, agreement."""
