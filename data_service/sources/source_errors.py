"""Errors about files that an import names."""

from __future__ import annotations

from shared.errors import NotFound


def source_not_found(field: str, uri: str, remedy: str = "name a file that exists") -> NotFound:
    return NotFound(
        f"{field}: {uri} does not exist",
        reason="SOURCE_NOT_FOUND",
        metadata={"field": field, "uri": uri},
        fields=[(field, remedy)],
    )
