"""The datasets in the store: each is a resource log below `datasets/{d}/log`."""

from __future__ import annotations

import time
import uuid

from data_service.domain.dataset import Dataset, check_fields
from shared import names, paging
from shared.errors import already_exists, not_found
from shared.log import ResourceLog
from shared.requests import claimed
from shared.storage import ObjectStore

# Whose request ids these are.
SERVICE = "data"


class Datasets:
    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def create(
        self,
        dataset_id: str,
        *,
        display_name: str,
        description: str,
        request_id: str,
        body_sha256: str,
        validate_only: bool,
    ) -> Dataset:
        """Raises `InvalidArgument` and `AlreadyExists`."""
        check_fields(dataset_id, display_name, description)
        request_id = names.check_request_id("request_id", request_id)
        dataset = Dataset(
            name=f"datasets/{dataset_id}",
            uid="" if validate_only else uuid.uuid4().hex,
            display_name=display_name,
            description=description,
            create_time=time.time(),
            request_id=request_id,
        )
        if validate_only:
            if self._find(dataset.name):
                raise already_exists(dataset.name)
            return dataset
        with claimed(self._store, SERVICE, request_id, body_sha256, dataset.name):
            return self._append(dataset)

    def get(self, name: str, field: str = "name") -> Dataset:
        """Raises `InvalidArgument` naming `field`, and `NotFound`."""
        names.parse(field, name, "datasets/{d}")
        dataset = self._find(name)
        if dataset is None:
            raise not_found(name)
        return dataset

    def list(self, page_size: int, page_token: str) -> tuple[list[Dataset], str]:
        """One page in the order of names, and the token of the next."""
        found, next_token = paging.page(self._store.folders("datasets"), page_size, page_token)
        datasets = [self._find(f"datasets/{one}") for one in found]
        return [dataset for dataset in datasets if dataset], next_token

    def _append(self, dataset: Dataset) -> Dataset:
        log = ResourceLog(self._store, f"{dataset.name}/log")
        if log.head() is None and log.append(None, dataset.as_state()):
            return dataset
        winner = self._find(dataset.name)
        # A repeated call, or one of two at the same time, is answered with what the first made.
        if winner and dataset.request_id and winner.request_id == dataset.request_id:
            return winner
        raise already_exists(dataset.name)

    def _find(self, name: str) -> Dataset | None:
        record = ResourceLog(self._store, f"{name}/log").head()
        return Dataset.from_state(record.state) if record else None
