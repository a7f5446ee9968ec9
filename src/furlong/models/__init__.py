"""All that knows transformers: the adapter of a decoder, refusals, building, exporting."""
