"""Checkpoints of a run: taken on all ranks at one step, written behind the training, and gone on from."""
