"""The demonstration: from raw digits to a served model, as a client of the three services and nothing else."""
