"""Uploads: bytes that clients send into the store, to be imported from there."""
