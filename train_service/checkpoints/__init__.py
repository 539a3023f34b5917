"""Checkpoints of a run: taken on all ranks at one step, written in the background, and resumed from."""
