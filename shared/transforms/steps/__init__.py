"""The steps, one family a file; each is a pure function from a batch to a batch."""
