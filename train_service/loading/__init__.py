"""From a dataset version to a rank's batches, in the order that the run's seed and the step decide."""
