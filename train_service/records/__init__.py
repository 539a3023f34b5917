"""The records of a run, written and read: events, metrics, logs, coverage."""
