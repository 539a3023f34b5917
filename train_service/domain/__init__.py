"""Pure rules of training: the order of rows, who reads which, and what a specification may say."""
