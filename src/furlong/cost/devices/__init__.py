"""Rates, memory and links of hardware, by name or of this machine."""
