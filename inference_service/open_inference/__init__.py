"""The Open Inference Protocol: one request, or a stream of them, from its message to its answer."""
