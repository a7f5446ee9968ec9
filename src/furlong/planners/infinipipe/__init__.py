"""InfiniPipe: equal-time chunks, elastic pipelines, recomputation by integer programs."""
