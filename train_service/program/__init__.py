"""A user's own training function on Ray Train's workers: its reports become checkpoints that the attempt commits."""
