"""In which order chunks run: on one device, in a pipeline, layer by layer, on replicas."""
