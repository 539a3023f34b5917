"""Pure rules of training: the order of rows, their assignment to ranks, and the rules of a specification."""
