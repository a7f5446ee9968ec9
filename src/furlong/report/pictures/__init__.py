"""A timeline as a PNG, an HTML page and a Perfetto trace."""
