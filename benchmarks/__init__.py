"""Ours beside the peers, in one run: ratios on the same machine at the same time."""
