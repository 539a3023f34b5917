from __future__ import annotations

import pytest

from data_service.uploads.uploads import Uploads
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.upload_server import uploads_of


@pytest.fixture
def store(file_store: StoreSettings) -> ObjectStore:
    return open_store(file_store)


@pytest.fixture
def uploads(store: ObjectStore) -> Uploads:
    return uploads_of(store)
