"""Attention kernels behind one signature."""
