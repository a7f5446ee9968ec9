"""Which tokens share a chunk, and which sequences share a replica or a group of devices."""
