"""Modules that two or more services need, one concept per file."""
