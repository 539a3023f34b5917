"""The data service: datasets and their immutable versions."""
