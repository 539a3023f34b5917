"""One rank of a run: the loop over its steps, its heartbeats, and the watch over its memory."""
