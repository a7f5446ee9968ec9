"""Published methods, a file each: they say which chunks, in which order."""
