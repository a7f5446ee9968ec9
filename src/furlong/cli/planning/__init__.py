"""What `furlong plan` does once its flags are read."""
