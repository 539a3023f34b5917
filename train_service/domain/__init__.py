"""Pure rules of training. They cover the order of rows, their assignment to ranks, and specifications."""
