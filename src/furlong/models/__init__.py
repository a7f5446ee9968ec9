"""All code that depends on transformers: decoder adapter, refusals, building, exporting."""
