"""Where the files of an import lie: local folders, S3, and uploads."""
