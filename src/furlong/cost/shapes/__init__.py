"""What a model computes with: its sizes, from a config.json or by name."""
