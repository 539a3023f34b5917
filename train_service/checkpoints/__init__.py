"""Checkpoints of a run.

All ranks take them at one step. They are written in the background, and runs resume from them.
"""
