"""What hardware can do: rates, memory, links, by name or of this machine."""
