"""Uploads: bytes that clients send to the store, for later imports."""
