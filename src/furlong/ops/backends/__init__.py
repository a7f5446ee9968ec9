"""Attention kernels with one interface."""
