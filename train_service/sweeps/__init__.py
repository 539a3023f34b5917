"""Sweeps: searches in which Ray Tune schedules trials.

A sweep is a durable job, and each trial a training job with its own logs.
"""
