"""The path of a request: from its message to the replica of a model, and back."""
