"""The work of `furlong plan` once its flags are read."""
