"""Where tensors wait between two uses: in the arena, in host memory, on disk."""
