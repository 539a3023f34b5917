"""What a run leaves behind of its doings, and how that is read: events, metrics, logs, coverage."""
