"""What knows transformers: the adapter of a decoder, what is refused, building and exporting."""
