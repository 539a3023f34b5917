"""Append-only resource log on put-if-absent."""

from shared.log.resource_log import Record, ResourceLog, StaleAttempt

__all__ = ["Record", "ResourceLog", "StaleAttempt"]
