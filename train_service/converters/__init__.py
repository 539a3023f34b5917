"""Conversion between protobuf messages and the service's own values."""
