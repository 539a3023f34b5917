"""The loading of a rank's batches from a dataset version, ordered by the run's seed and the step."""
