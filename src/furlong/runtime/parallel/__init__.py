"""Several processes: which one this is, how weights are shared, how gradients are added up."""
