"""One rank of a run: the loop over its steps, and the signs that it gives of itself."""
