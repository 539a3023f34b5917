"""Checkpoints served over the Open Inference Protocol, on Ray Serve."""
