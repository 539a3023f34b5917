"""From requests to batches of the models that this process serves, within everybody's deadline."""
