"""Small copies of a model's config, on which families are tried."""
