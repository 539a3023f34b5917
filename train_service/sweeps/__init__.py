"""Sweeps: a durable job whose attempt lets Ray Tune decide which training jobs run, each a trial with its own logs."""
