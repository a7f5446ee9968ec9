"""The parts of a run before its first step."""
