"""Sweeps: a sweep is a durable job in which Ray Tune schedules trials, each a training job with its own logs."""
