"""Rows for a model's inputs: which column goes into which input, in which type, and where it is null."""
