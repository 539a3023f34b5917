"""The storage of an import's files: local folders, S3, and uploads."""
