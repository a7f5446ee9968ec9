"""The dials of a run on one device: what `auto` means in `furlong train`."""
