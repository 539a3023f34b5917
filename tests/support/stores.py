"""An empty store of either kind, for fixtures that outlive a test."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from shared.settings import StoreSettings
from shared.storage.object_store import ensure_bucket
from tests.support.s3_server import S3Server, name_under_test

# As tests' ids name it.
S3 = f"s3-{name_under_test()}"
STORES = {"file": "file", "s3": S3}
# Parameters of fixtures and tests; of the latter one kind is left to `make chaos`.
KINDS = ["file", pytest.param("s3", id=S3)]
S3_IN_CHAOS = ["file", pytest.param("s3", id=S3, marks=pytest.mark.chaos)]
FILES_IN_CHAOS = [pytest.param("file", marks=pytest.mark.chaos), pytest.param("s3", id=S3)]


def new_store(request: pytest.FixtureRequest, folder: Path) -> StoreSettings:
    """Of the kind that the fixture's parameter names."""
    if request.param == "file":
        return StoreSettings(url=(folder / "store").as_uri())
    server: S3Server = request.getfixturevalue("s3_server")
    settings = server.settings(f"s3://millrace/{uuid.uuid4().hex}")
    ensure_bucket(settings)
    return settings
